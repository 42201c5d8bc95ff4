"""The worker process of a reward or an environment: JSON lines of questions in, of answers out.

Started by a ``LinePool``, which kills it where an answer takes too long. It imports no torch.
"""

import asyncio
import inspect
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from qurl_megatron.config import RewardConfig
from qurl_megatron.kit.errors import ConfigError, Unscored, unscored
from qurl_megatron.rewards.environment import FIELDS, Reply, as_reply
from qurl_megatron.rewards.functions import call, check_call, find_function, find_named, last_line
from qurl_megatron.rewards.item import Item, Score
from qurl_megatron.rewards.line_pool import serve
from qurl_megatron.rewards.verifiers import KINDS

ENVIRONMENT_KEY = "rollout.environment"

Scorer = Callable[[list[Item]], list[Score]]


def serve_reward(key: str, config: RewardConfig) -> None:
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
        from qurl_megatron.rewards.judge import Judge  # httpx, which no other worker needs

        return Judge(key, config), config.batch
    if config.function:
        setting = key if key.startswith("--") else f"{key}.function"  # an option, or of a recipe
        function = find_function(setting, config.function)
        batched = config.batched or bool(getattr(function, "batched", False))
        return partial(call, function, batched=batched), config.batch if batched else 1
    from math_verify.errors import TimeoutException

    logging.disable()  # math-verify warns of every bad answer
    check = KINDS[config.kind]
    check("$1$", "1")  # imports, before the clock of a check runs

    def score(items: list[Item]) -> list[Score]:
        (item,) = items
        try:
            return [check(item.response, item.answer)]
        # Model output breaks sympy in every way there is. The timeout is a BaseException, so that
        # sympy's own handlers do not swallow it.
        except (Exception, TimeoutException):
            return [0.0]

    return score, 1


def serve_environment(name: str, memory_gb: float) -> None:
    def make() -> tuple[None, Callable[[Any], Any]]:
        environment, runner = make_environment(name), asyncio.Runner()

        def answer(fields: dict[str, Any]) -> Any:
            reply = step(environment, fields, runner)
            return {"failed": asdict(reply)} if isinstance(reply, Unscored) else {"reply": reply}

        return None, answer

    serve(make, memory_gb)


def make_environment(name: str) -> Any:
    """Return an object of the class that the recipe names, or made by the function it names.

    Raises:
        ConfigError: there is no such class, it cannot be made, or has no ``step`` to call.
    """
    named, attribute = find_named(ENVIRONMENT_KEY, name, "class"), name.rpartition(":")[2]
    is_class = inspect.isclass(named.found)
    if not is_class and _needs_arguments(named.found):
        raise named.other_kind()
    try:
        environment = named.found()
    except BaseException as error:  # whatever it does, this is one sentence
        raise ConfigError(f"{named.named}: {attribute}() failed: {last_line(error)}") from None
    parameters = ", ".join(f"{field}=..." for field in FIELDS)
    method = getattr(environment, "step", None)
    if not callable(method):
        if not is_class:
            raise named.other_kind()
        raise ConfigError(f"{named.named}: {attribute} has no method step({parameters}); write one")
    check_call(method, named.named, f"{attribute}().step", parameters)
    return environment


def _needs_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except ValueError:
        return False  # functions written in C may have no signature; the call will say
    except TypeError:
        return True
    return False


def step(environment: Any, fields: dict[str, Any], runner: asyncio.Runner) -> Reply:
    """Return the reply of the environment's ``step``, async or not.

    Args:
        runner: one for all calls: clients of servers may live on its loop.
    """

    async def awaited(result: Any) -> Any:
        return await result

    try:
        result = environment.step(**fields)
        if inspect.isawaitable(result):
            result = runner.run(awaited(result))
        return as_reply(result)  # which may run code of its own
    except BaseException as error:  # sys.exit() is no reason to end, either
        return unscored("exceptions", last_line(error))


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    if "environment" in task:
        serve_environment(task["environment"], task["memory_gb"])
    else:
        serve_reward(task["key"], RewardConfig(**task["config"]))
