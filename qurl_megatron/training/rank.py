"""One rank of a run, from the first signal handler to the exit code."""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from qurl_megatron.config import RunConfig
from qurl_megatron.config.env import prepare_cuda, use_transformer_engine
from qurl_megatron.data.rows import DataFile
from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.kit.launch import tell
from qurl_megatron.kit.stop import StopRequest
from qurl_megatron.kit.terminal import terminal
from qurl_megatron.observe import failures


@terminal(lasting=True)
def run_rank(config: RunConfig, prepare: Callable[[], dict[str, DataFile]] | None = None) -> int:
    """Train as the rank the environment names.

    Args:
        prepare: as for ``loop.train``.

    Returns:
        0 when all steps are done, 128 + n after a clean stop on signal n. A failure does not
        return: the process leaves with 2 and one sentence for a mistake in the input, with 3 and
        one sentence where the guard, or a number that is not finite, halted the run, with 1 for
        anything else.
    """
    stop = StopRequest()
    prepare_cuda(config.parallel)
    from qurl_megatron.actor.megatron import RankLost
    from qurl_megatron.fleet.client import EngineError
    from qurl_megatron.rewards.pool import RewardDown
    from qurl_megatron.training.guard import Collapse

    codes: dict[type[Exception], int]
    codes = {ConfigError: 2, Collapse: 3, EngineError: 1, RankLost: 1, RewardDown: 1}
    try:
        use_transformer_engine()  # reports a broken one before Megatron trips over it
        from qurl_megatron.training.loop import train

        finished = train(config, stop, prepare)
    except tuple(codes) as error:
        failures.keep(error)
        tell(f"qurl: {error}")
        _leave(next(code for kind, code in codes.items() if isinstance(error, kind)))
    except BaseException as error:
        failures.keep(error)
        tell(printable(traceback.format_exc()))
        _leave(1)
    return 0 if finished else 128 + (stop.signal or signal.SIGTERM)


def _leave(code: int) -> NoReturn:
    """Leave without goodbyes: other ranks may be in a collective that this one will never join."""
    for child in multiprocessing.active_children():
        child.kill()  # nobody else would end it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
