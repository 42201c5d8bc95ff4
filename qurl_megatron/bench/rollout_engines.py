"""Engines to put a load on: started here with a model of a scheme, or already there at a URL.

Those started here are a trainer's: one process each, brought to every version by the fleet. A
version is as the trainer would publish it: quantized, in the engines' own layout, checked and
named. It is written once and published under ever new numbers, since engines do not care whether
weights have changed. An engine at a URL keeps its own weights, and is asked as any client asks.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurl_megatron.bench.drive import PROTOCOLS, Looking, Protocol, Publish
from qurl_megatron.bench.random_model import config_of, write_random
from qurl_megatron.bench.rollout_load import Look
from qurl_megatron.checkpoints.source import Checkpoint, open_checkpoint, read_tensors
from qurl_megatron.config import RolloutConfig, SyncConfig
from qurl_megatron.engines.embedded.decoder import DTYPES
from qurl_megatron.engines.kinds import ENGINE_KINDS
from qurl_megatron.engines.starting import given_key
from qurl_megatron.fleet.answer import parsed
from qurl_megatron.fleet.client import EngineClient, EngineError, Session
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.publish.update import BlobsFor, Update
from qurl_megatron.quant import quantize
from qurl_megatron.quant.export import stored
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire.files import FilesSender
from qurl_megatron.wire.manifest import manifest_of
from qurl_megatron.wire.message import Blob

BUCKET = 256 << 20  # bytes
IDENTITY = ("version", "engine", "tp_size", "scheme", "quantization", "dtype", "device", "threads")
"""Facts in ``/server_info`` that must not change between repeats."""


@dataclass(frozen=True)
class Target:
    """One engine, as a load needs it."""

    client: EngineClient
    protocol: Protocol
    model: str  # name that OpenAI's protocol wants
    look: Looking | None
    identity: Callable[[], dict[str, object]]  # equal as long as it is the same engine
    publish: Publish | None = None


def model_folder(given: str, work: Path) -> Path:
    """Return the folder of the weights: ``given`` itself, or random ones made in ``work``.

    Args:
        given: a checkpoint, a folder with a config.json alone, or a shape's name.

    Raises:
        ConfigError: it is none of them.
    """
    folder = Path(given)
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.distcp")):
        return folder
    random = work / "model"
    write_random(config_of(given), random)
    return random


class Version:
    """The weights as one training rank would send them; their folder is the caller's to remove."""

    def __init__(self, folder: Path, scheme: str, dtype: str, root: Path) -> None:
        """
        Args:
            folder: a checkpoint.
            scheme: of the linear layers; "none", "int8" or "fp8".
            dtype: of all else.
            root: gets the files.

        Raises:
            ConfigError: it is no checkpoint.
        """
        source = open_checkpoint(folder)
        source.reader.check(source.arch)
        self.arch, self.scheme, self.dtype = source.arch, scheme, dtype
        self.sender = FilesSender(root, "tp0", leads=False)
        self.sender.begin(1)
        self.blobs: list[Blob] = []
        shapes: dict[str, tuple[int, ...]] = {}
        for parts in _buckets(self._tensors(source)):
            shapes |= {part.name: part.shape for part in parts}
            self.blobs.append(self.sender.put(len(self.blobs), parts))
        self.sender.seal(manifest_of(1, scheme, self.blobs, shapes))

    def _tensors(self, source: Checkpoint) -> Iterator[Shard]:
        for op in source.ops():
            quantized = self.scheme != "none" and op.hf[0].quantized
            dtype = None if quantized else DTYPES[self.dtype]
            for name, tensor in read_tensors(source, op, dtype).items():
                stored_tensors = {name: tensor}
                if quantized:
                    stored_tensors = stored(name, quantize(tensor, self.scheme), "sglang")
                for each, value in stored_tensors.items():
                    yield Shard.whole(each, value)

    def publish(self, fleet: Fleet, number: int) -> tuple[str, float]:
        """Publish as the trainer does; to be called with rising numbers.

        Returns:
            The engine's name of these weights, and the seconds that it paused.

        Raises:
            EngineError: it did not take them.
        """
        with (
            fleet.publication() as engines,
            Update(fleet, engines, number, SyncConfig(), self.sender.describe) as update,
        ):
            for blob in self.blobs:
                update.bucket(_to_all(blob))
            return fleet.names.of(number), update.commit(self.sender.receipts).paused_s


def _to_all(blob: Blob) -> BlobsFor:
    blobs = (blob,)
    return lambda engine, rank: blobs


def _buckets(tensors: Iterator[Shard]) -> Iterator[list[Shard]]:
    bucket: list[Shard] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.value.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.value.nbytes
    yield bucket


def engine_config(
    kind: str,
    *,
    tensor: int,
    threads: int,
    timeout_s: float,
    cache_gb: float,
    sglang_python: str = "",
) -> RolloutConfig:
    """Return how to start an engine.

    SGLang streams new tokens alone: all tokens so far, with each, would make a response's work
    on this side grow with the square of its length.

    Args:
        kind: a name in ``engines.kinds.ENGINE_KINDS``.
        threads: of each rank; 0 takes the cores of the machine.
        timeout_s: for a response.
        cache_gb: for keys and values of an embedded engine; SGLang takes the memory that is free.
    """
    settings: dict[str, Any] = {
        "backend": kind,
        "engine_tensor": tensor,
        "engine_threads": threads,
        "engine_memory_gb": cache_gb,
        "timeout_s": timeout_s,
        "sglang_python": sglang_python,
        "engine_args": ("--incremental-streaming-output",) * ENGINE_KINDS[kind].takes_gpus,
    }
    return RolloutConfig(**settings)


@contextlib.contextmanager
def started(config: RolloutConfig, folder: Path, version: Version, logs: Path) -> Iterator[Target]:
    """An engine of its own, with ``version`` published to it.

    Args:
        config: of ``engine_config``.
        folder: the model's, from which it starts.
        logs: gets engine-0.log.

    Raises:
        ConfigError, EngineError: it does not start, or does not take the weights.
    """
    with Fleet(
        config,
        folder,
        scheme=version.scheme,
        dtype=version.dtype,
        log_dir=logs,
        vocabulary=version.arch.vocab,
    ) as fleet:
        fleet.await_recruits(config.start_limit_s)
        numbers = iter(range(1, 1 << 30))
        version.publish(fleet, next(numbers))
        (engine,) = fleet.engines()
        client = engine.client  # the fleet forgets a dead engine's
        assert client is not None, "it serves"

        def identity() -> dict[str, object]:
            process = engine.process and engine.process.popen
            return {**_identity(client), "process": process and process.pid}

        yield Target(
            client,
            PROTOCOLS[config.backend],
            "",
            _look_at_server if ENGINE_KINDS[config.backend].says else _look_at_loads,
            identity,
            lambda: version.publish(fleet, next(numbers)),
        )


def reached(url: str, protocol: str, *, timeout_s: float) -> Target:
    """The engine at a URL, with the key in QURL_API_KEY if there is one.

    Raises:
        ConfigError: it does not answer.
    """
    client = EngineClient(url, api_key=given_key(os.environ), timeout_s=timeout_s)
    try:
        if protocol == "openai":
            model = str(_openai_identity(client)["model"])
            return Target(
                client, PROTOCOLS[protocol], model, None, lambda: _openai_identity(client)
            )
        kind = client.info().kind
    except (EngineError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--engine {url} does not answer as --protocol {protocol}: {error}"
        ) from None
    look = _look_at_server if kind.says else _look_at_loads
    return Target(client, PROTOCOLS[kind.name], "", look, lambda: _identity(client))


def _identity(client: EngineClient) -> dict[str, object]:
    info = client.server_info()
    return {name: info[name] for name in IDENTITY if name in info}


def _openai_identity(client: EngineClient) -> dict[str, object]:
    model = client.get("/v1/models")["data"][0]
    identity: dict[str, object] = {"model": model["id"]}
    if "owned_by" in model:  # "vllm", "sglang": the model's owner is who serves it
        identity["engine"] = model["owned_by"]
    with contextlib.suppress(EngineError):  # vLLM reports it, others need not
        identity["version"] = client.get("/version").get("version")
    return identity


async def _look_at_server(session: Session) -> Look:
    return read_look(parsed(await session.get("/server_info")))


async def _look_at_loads(session: Session) -> Look:
    return read_look(parsed(await session.get("/v1/loads?include=core"))["loads"][0])


def read_look(report: Mapping[str, Any]) -> Look:
    """Read ``/server_info`` (embedded), or a rank in ``/v1/loads`` (SGLang).

    Both use one set of names, but SGLang reports retractions with each answer alone.
    """
    used, room = report.get("num_used_tokens"), report.get("max_total_num_tokens")
    return Look(
        running=report.get("num_running_reqs"),
        waiting=report.get("num_waiting_reqs"),
        occupancy=used / room if used is not None and room else None,
        preemptions=report.get("num_retractions"),
    )
