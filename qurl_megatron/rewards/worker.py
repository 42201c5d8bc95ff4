"""The worker process of a reward or an environment: lines of questions in, of answers out.

Started by a ``WorkerPool``, which kills it where an answer takes too long. It imports no torch.
"""

import asyncio
import inspect
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from qurl_megatron.kit.errors import ConfigError, Unscored, unscored
from qurl_megatron.rewards.own_code import check_call, find_named, last_line
from qurl_megatron.rewards.verifiers import KINDS, Score, as_score
from qurl_megatron.rewards.workers import Reply

REWARD_FIELDS = ("prompt", "response", "answer", "metadata")
STEP_FIELDS = ("messages", "response", "answer", "metadata")
ROLES = ("tool", "user")

Answer = Callable[[dict[str, Any]], Any]
"""From the fields of a question to JSON, or Unscored."""


def serve(make: Callable[[], Answer], memory_gb: float) -> None:
    """Answer question after question, in the worker process, until there are no more.

    Whatever the code prints goes to stderr, and its standard input is empty.

    Args:
        make: returns the function that answers. Its ConfigError is sent instead, and ends the
            worker.
        memory_gb: GiB of address space.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    # A huge power is a MemoryError here, not a full machine.
    memory = int(memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)

    # The code may fork, and its child may come back here: it must never ask or answer.
    def part_from_the_pool() -> None:
        os.dup2(nothing, requests.fileno())
        os.dup2(nothing, results.fileno())

    os.register_at_fork(after_in_child=part_from_the_pool)
    worker_pid = os.getpid()

    def say(number: bytes, value: Any) -> None:
        if os.getpid() != worker_pid:
            os._exit(1)
        message = {"failed": asdict(value)} if isinstance(value, Unscored) else {"value": value}
        results.write(b"%s %s\n" % (number, json.dumps(message).encode("ascii")))
        results.flush()

    try:
        answer = make()
    except ConfigError as error:
        say(b"0", str(error))
        return
    say(b"0", None)  # ready
    for line in requests:
        number, _, question = line.partition(b" ")
        say(number, answer(json.loads(question)))


def own_reward(setting: str) -> Answer:
    """Make a user's reward; ``setting`` is its key, of the recipe or the option, as key=name.

    Raises:
        ConfigError: there is none, or it cannot be called as rewards are.
    """
    function = find_named(setting, "function")
    check_call(function, setting, setting.rpartition(":")[2], REWARD_FIELDS)
    return partial(call, function, score_of, asyncio.Runner())


def environment(setting: str) -> Answer:
    """Make an environment; raises ``ConfigError`` where that fails, or it has no ``step``."""
    own_class, class_name = find_named(setting, "class"), setting.rpartition(":")[2]
    try:
        instance = own_class()
    except BaseException as error:  # whatever it does, this is one sentence
        raise ConfigError(f"{setting}: {class_name}() failed: {last_line(error)}") from None
    step = getattr(instance, "step", None)
    if not callable(step):
        call_of = ", ".join(f"{field}=..." for field in STEP_FIELDS)
        raise ConfigError(f"{setting}: {class_name} has no method step({call_of}); write one")
    check_call(step, setting, f"{class_name}().step", STEP_FIELDS)
    return partial(call, step, as_reply, asyncio.Runner())


def our_check(setting: str) -> Answer:
    """Return a check that has imported all it needs, before the clock of an answer runs."""
    check = KINDS[setting.partition("=")[2]]
    check("$1$", "1")
    return lambda fields: check(fields["response"], fields["answer"])


def call(
    function: Callable[..., Any],
    read: Callable[[Any], Any],
    runner: asyncio.Runner,
    fields: dict[str, Any],
) -> Any:
    """Return the value of the user's function, async or not, by way of ``read``.

    Args:
        runner: one for all calls: clients of servers may live on its loop.
    """

    async def awaited(result: Any) -> Any:
        return await result

    try:
        result = function(**fields)
        if inspect.isawaitable(result):
            result = runner.run(awaited(result))
        return read(result)  # which may run code of its own
    except BaseException as error:  # sys.exit() is no reason to end, either
        return unscored("exceptions", last_line(error))


def score_of(value: Any) -> Score:
    """Return a value as a score; verl's dicts hold the score among other values that verl logs."""
    if not isinstance(value, dict):
        return as_score(value)
    if "score" not in value:
        return unscored("invalid", "a dict without a 'score'")
    return as_score(value["score"])


def as_reply(value: object) -> Reply:
    """Return an environment's value as a reply; Unscored where it is none."""
    if value is None:
        return None
    if not isinstance(value, dict):
        wrong = f"a value of type {type(value).__name__}"
    elif value.get("role") not in ROLES:
        wrong = f"a message with role {value.get('role')!r}"
    elif not isinstance(value.get("content"), str):
        wrong = f"a message whose content is of type {type(value.get('content')).__name__}"
    elif not value["content"].strip():
        wrong = "a message without text"  # after which the policy would talk to itself
    else:
        # Halves of a surrogate pair are text to Python, and to no tokenizer.
        content = value["content"].encode(errors="replace").decode()
        return {"role": value["role"], "content": content}
    return unscored(
        "invalid", f'{wrong}; return {{"role": "tool" or "user", "content": text}}, or None'
    )


TASKS = {"reward": own_reward, "environment": environment, "check": our_check}

if __name__ == "__main__":
    task, setting, memory_gb = sys.argv[1:]
    serve(partial(TASKS[task], setting), float(memory_gb))
