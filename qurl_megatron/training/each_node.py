"""Engines on each of the trainer's machines, started by the first rank there."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from qurl_megatron.actor.megatron import Ranks, everywhere, on_lead, together
from qurl_megatron.config import RunConfig
from qurl_megatron.engines.starting import Start
from qurl_megatron.fleet.offered import Offering, prepare
from qurl_megatron.kit.place import address_for_others, own_name, ranks_here


def start_here(config: RunConfig, count: int, api_key: str) -> Start:
    """Return how to start ``count`` engines on this machine, for a leading rank elsewhere.

    Raises:
        ConfigError: it is not clear by which address others reach this machine.
    """
    host = address_for_others(one_node=False)
    return Start(
        config=replace(config.rollout, engines=count, engine_host=host),
        model_dir=Path(config.model.path),
        folder=Path(config.train.run_dir) / "logs" / own_name(),
        scheme=config.quant.scheme,
        dtype=config.model.dtype,
        api_key=api_key,
        routed=config.model.routing_replay == "rollout",
    )


@contextmanager
def engines_here(config: RunConfig, ranks: Ranks) -> Iterator[Offering | None]:
    """Inside, each machine's share of ``rollout.engines`` runs; all ranks call it together.

    Yields:
        This machine's engines, on its first rank.

    Raises:
        ConfigError: on every rank, where they do not divide, or cannot be started on a machine.
    """
    first, rollout = os.environ.get("LOCAL_RANK", "0") == "0", config.rollout
    count = rollout.engines_on_each(sum(everywhere(first)))
    key = on_lead(
        lambda: prepare(Path(rollout.rendezvous)), ranks, waiting_for="preparing the rendezvous"
    )
    offerings: list[Offering] = []
    with ExitStack() as stack:

        def start() -> None:
            if first:
                settings = start_here(config, count, key)
                settings = replace(settings, trainer_ranks=ranks_here(os.environ))
                offerings.append(stack.enter_context(Offering(settings, Path(rollout.rendezvous))))
                offerings[0].watch()

        together(start)
        yield offerings[0] if offerings else None
