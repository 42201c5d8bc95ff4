"""Engines to put a load on: started here with a model of a scheme, or already there at a URL.

Those started here are a trainer's: one process each, brought to every version by the fleet. One at
a URL serves what it serves, and is asked nothing but what a client asks.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurl_megatron.bench.load.drive import Looking, Publish
from qurl_megatron.bench.load.model import Version
from qurl_megatron.bench.load.outcome import Look
from qurl_megatron.bench.load.protocols import PROTOCOLS, Protocol, read_look, read_metrics
from qurl_megatron.config import RolloutConfig
from qurl_megatron.engines.kinds import ENGINE_KINDS
from qurl_megatron.engines.starting import given_key
from qurl_megatron.errors import ConfigError
from qurl_megatron.fleet.answer import parsed
from qurl_megatron.fleet.client import EngineClient, EngineError, Session
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.fleet.process import SERVE_COMMAND

TOLD = ("version", "engine", "tp_size", "scheme", "quantization", "dtype", "device", "threads")
"""What ``/server_info`` says of the engine that must not change between repeats."""

INCREMENTAL = "--incremental-streaming-output"  # of `qurl serve` and of SGLang alike


@dataclass(frozen=True)
class Target:
    """One engine, as a load needs it."""

    client: EngineClient
    protocol: Protocol
    model: str  # name that OpenAI's protocol wants
    look: Looking
    identity: Callable[[], dict[str, object]]  # equal as long as it is the same engine
    publish: Publish | None = None


@contextlib.contextmanager
def started(
    kind: str,
    folder: Path,
    version: Version,
    vocab: int,
    logs: Path,
    *,
    tensor: int,
    threads: int,
    timeout_s: float,
    cache_gb: float,
    text: bool = False,
) -> Iterator[Target]:
    """An engine of its own, with ``version`` published to it.

    Args:
        kind: a name in ``engines.kinds.ENGINE_KINDS``.
        folder: the model's, from which it starts.
        logs: gets engine-0.log.
        threads: of each rank; 0 takes the cores of the machine.
        timeout_s: for a response.
        cache_gb: for keys and values of an embedded engine; SGLang takes what memory is free.
        text: it reads and writes text as well, by the tokenizer in ``folder``.

    Raises:
        ConfigError, EngineError: it does not start, or does not take the weights.
    """
    config, serve_command = engine_config(
        kind, tensor=tensor, threads=threads, timeout_s=timeout_s, cache_gb=cache_gb
    )
    with Fleet(
        config,
        folder,
        scheme=version.scheme,
        dtype=version.dtype,
        log_dir=logs,
        vocabulary=vocab,
        serve_command=serve_command,
        text=text,
    ) as fleet:
        fleet.await_recruits(config.start_limit_s)
        numbers = iter(range(1, 1 << 30))
        version.publish(fleet, next(numbers))
        (engine,) = fleet.engines()
        client = engine.client  # the fleet forgets that of an engine that dies
        assert client is not None, "it serves"

        def identity() -> dict[str, object]:
            process = engine.process and engine.process.popen
            return {**_told(client), "process": process and process.pid}

        yield Target(
            client,
            PROTOCOLS["sglang"],
            "",
            _look_at_server if ENGINE_KINDS[kind].says else _look_at_loads,
            identity,
            lambda: version.publish(fleet, next(numbers)),
        )


def engine_config(
    kind: str,
    *,
    tensor: int,
    threads: int,
    timeout_s: float,
    cache_gb: float,
) -> tuple[RolloutConfig, Sequence[str]]:
    """How to start an engine, and the command of an embedded one.

    Its streams bring new tokens alone: all tokens so far, with each, would make a response's work
    on this side grow with the square of its length.
    """
    given: dict[str, Any] = {
        "backend": kind,
        "engine_tensor": tensor,
        "engine_threads": threads,
        "engine_memory_gb": cache_gb,
        "timeout_s": timeout_s,
        "engine_args": (INCREMENTAL,) if ENGINE_KINDS[kind].takes_gpus else (),
    }
    config = RolloutConfig(**given)
    return config, (*SERVE_COMMAND, INCREMENTAL)


def reached(url: str, protocol: str, *, timeout_s: float) -> Target:
    """The engine at a URL, with the key in QURL_API_KEY if there is one.

    Raises:
        ConfigError: it does not answer.
    """
    client = EngineClient(url, api_key=given_key(os.environ), timeout_s=timeout_s)
    try:
        if protocol == "openai":
            told = _told_by_openai(client)
            model = str(told["model"])
            return Target(
                client,
                PROTOCOLS[protocol],
                model,
                _look_at_metrics,
                lambda: _told_by_openai(client),
            )
        info = client.info()
    except (EngineError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--engine {url} does not answer as --protocol {protocol}: {error}"
        ) from None
    look = _look_at_server if info.kind.says else _look_at_loads
    return Target(client, PROTOCOLS[protocol], "", look, lambda: _told(client))


def _told(client: EngineClient) -> dict[str, object]:
    info = client.server_info()
    return {name: info[name] for name in TOLD if name in info}


def _told_by_openai(client: EngineClient) -> dict[str, object]:
    model = client.get("/v1/models")["data"][0]
    told: dict[str, object] = {"model": model["id"]}
    if "owned_by" in model:  # "vllm", "sglang": the model's owner is who serves it
        told["engine"] = model["owned_by"]
    with contextlib.suppress(EngineError):  # vLLM reports it, others need not
        told["version"] = client.get("/version").get("version")
    return told


async def _look_at_server(session: Session, at: float) -> Look:
    return read_look(parsed(await session.get("/server_info")), at)


async def _look_at_loads(session: Session, at: float) -> Look:
    loads = parsed(await session.get("/v1/loads?include=core"))["loads"]
    return read_look(loads[0], at)


async def _look_at_metrics(session: Session, at: float) -> Look:
    return read_metrics((await session.get("/metrics")).decode(), at)
