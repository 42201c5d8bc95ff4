"""The process that scores: a JSON line of items in, one of scores out. Started by ``scoring``.

It imports no torch and ignores Ctrl-C, which is for the trainer. A check that takes too long is the
pool's affair, which kills the process.
"""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from qurl_megatron.config import RewardConfig
from qurl_megatron.kit.errors import Unscored
from qurl_megatron.rewards.functions import call, find_function
from qurl_megatron.rewards.item import Item, Score
from qurl_megatron.rewards.judge import Judge
from qurl_megatron.rewards.line_worker import serve
from qurl_megatron.rewards.verifiers import KINDS

Scorer = Callable[[list[Item]], list[Score]]


def main(key: str, config: RewardConfig) -> None:
    def make() -> tuple[int, Callable[[Any], Any]]:
        score, batch = make_scorer(key, config)

        def answer(items: list[list]) -> list[Any]:
            scores = score([Item(*item) for item in items])
            return [asdict(value) if isinstance(value, Unscored) else value for value in scores]

        return batch, answer

    serve(make, config.memory_gb)


def make_scorer(key: str, config: RewardConfig) -> tuple[Scorer, int]:
    """Return a scorer that is ready, and how many responses it takes at once.

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
