"""The process that scores: a JSON line of items in, one of scores out. Started by ``scoring``.

It imports no torch and ignores Ctrl-C, which is for the trainer. A check that takes too long is the
pool's affair, which kills the process.
"""

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, BinaryIO

from qurl_megatron.config import RewardConfig
from qurl_megatron.errors import ConfigError
from qurl_megatron.rewards.functions import call, find_function
from qurl_megatron.rewards.item import Item, Score, Unscored
from qurl_megatron.rewards.judge import Judge
from qurl_megatron.rewards.kinds import KINDS

Scorer = Callable[[list[Item]], list[Score]]


def main(key: str, config: RewardConfig) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A huge power is a MemoryError here, not a full machine.
    memory = int(config.memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, results = _own_ends()

    def say(what: Any) -> None:
        results.write(json.dumps(what).encode("ascii") + b"\n")
        results.flush()

    try:
        score, batch = make_scorer(key, config)
    except ConfigError as error:
        return say({"refused": str(error)})
    say({"ready": batch})
    for line in requests:
        scores = score([Item(*item) for item in json.loads(line)])
        say([asdict(one) if isinstance(one, Unscored) else one for one in scores])


def _own_ends() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the pool; what a reward prints goes to stderr, and what it reads is empty."""
    requests, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, results


def make_scorer(key: str, config: RewardConfig) -> tuple[Scorer, int]:
    """What scores, ready to, and how many responses it takes at once.

    Raises:
        ConfigError: the recipe's function cannot be used, or there is no key for its server.
    """
    if config.url:
        return Judge(key, config), config.batch
    if config.function:
        setting = key if key.startswith("--") else f"{key}.function"  # an option, or of a recipe
        function = find_function(setting, config.function)
        batched = config.batched or bool(getattr(function, "batched", False))
        return partial(call, function, batched=batched), config.batch if batched else 1
    logging.disable()  # math-verify warns of every bad answer
    check = KINDS[config.kind]
    check("$1$", "1")  # imports, before the clock of a check runs
    wrong = (Exception, _timeout_exception())  # model output breaks sympy in every way there is

    def score(items: list[Item]) -> list[Score]:
        (item,) = items
        try:
            return [check(item.response, item.answer)]
        except wrong:
            return [0.0]

    return score, 1


def _timeout_exception() -> type[BaseException]:
    """math-verify's own; a BaseException, so that sympy's handlers do not swallow it."""
    from math_verify.errors import TimeoutException

    return TimeoutException


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    main(task["key"], RewardConfig(**task["config"]))
