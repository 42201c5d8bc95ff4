"""The process that answers for an environment: a JSON line in, one out. Started by ``pool``.

It imports no torch. A call that takes too long is the pool's affair, which kills the process.
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from qurl_megatron.kit.errors import ConfigError, Unscored, unscored
from qurl_megatron.rewards.functions import check_call, find_named, last_line
from qurl_megatron.rewards.line_worker import serve
from qurl_megatron.rewards.reply import FIELDS, Reply, as_reply

KEY = "rollout.environment"


def main(name: str, memory_gb: float) -> None:
    def make() -> tuple[None, Callable[[Any], Any]]:
        environment, runner = make_environment(name), asyncio.Runner()

        def answer(fields: dict[str, Any]) -> Any:
            reply = call(environment, fields, runner)
            return {"failed": asdict(reply)} if isinstance(reply, Unscored) else {"reply": reply}

        return None, answer

    serve(make, memory_gb)


def make_environment(name: str) -> Any:
    """An object of the class that the recipe names, or of what a function there returns.

    Raises:
        ConfigError: there is no such class, it cannot be made, or has no ``step`` to call.
    """
    named, attribute = find_named(KEY, name, "class"), name.rpartition(":")[2]
    of_class = inspect.isclass(named.found)
    if not of_class and _needs_arguments(named.found):
        raise named.other_kind()
    try:
        environment = named.found()
    except BaseException as error:  # whatever it does, this is one sentence
        raise ConfigError(f"{KEY}={name}: {attribute}() failed: {last_line(error)}") from None
    parameters = ", ".join(f"{field}=..." for field in FIELDS)
    step = getattr(environment, "step", None)
    if not callable(step):
        if not of_class:
            raise named.other_kind()
        raise ConfigError(f"{KEY}={name}: {attribute} has no method step({parameters}); write one")
    check_call(step, f"{KEY}={name}", f"{attribute}().step", parameters)
    return environment


def _needs_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except ValueError:
        return False  # some of those written in C tell no signature; the call will say
    except TypeError:
        return True
    return False


def call(environment: Any, asked: dict[str, Any], runner: asyncio.Runner) -> Reply:
    """Return the reply of ``step``, async or not.

    Args:
        runner: one for all calls: clients of servers may live on its loop.
    """
    try:
        result = environment.step(**asked)
        if inspect.isawaitable(result):
            result = runner.run(_awaited(result))
        return as_reply(result)  # which may run code of its own
    except BaseException as error:  # sys.exit() is no reason to end, either
        return unscored("exceptions", last_line(error))


async def _awaited(result: Any) -> Any:
    return await result


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
