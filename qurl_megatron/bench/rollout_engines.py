"""Models of a benchmark, and engines to put a load on, started here with one of them.

``--model`` is a folder of ``launch/models`` or any other folder with a config.json. Where no
weights are at hand random ones do: their values change no bytes and no times.

The engines are a trainer's: brought to every version by the fleet. A version is as the trainer
would publish it: quantized, in the engines' own layout, checked and named. It is written once and
published under ever new numbers, since engines do not care whether weights have changed.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qurl_megatron.checkpoints.huggingface import TensorSpec, write_safetensors
from qurl_megatron.checkpoints.ops import hf_shapes
from qurl_megatron.checkpoints.places import SINGLE
from qurl_megatron.checkpoints.source import (
    Checkpoint,
    open_checkpoint,
    read_tensors,
    write_json,
)
from qurl_megatron.config import RolloutConfig, SyncConfig
from qurl_megatron.engines.embedded.decoder import DTYPES
from qurl_megatron.fleet.client import EngineClient
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.shipped import ROOT
from qurl_megatron.publish.update import BlobsFor, Update
from qurl_megatron.quant import quantize
from qurl_megatron.quant.export import stored
from qurl_megatron.tensors.arch import read_arch, read_config
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire.files import FilesSender
from qurl_megatron.wire.message import Blob

BUCKET = 256 << 20  # bytes
IDENTITY = ("version", "engine", "tp_size", "scheme", "quantization", "dtype", "device", "threads")
"""Facts in ``/server_info`` that a record keeps."""

MODELS = ROOT / "launch/models"


def config_of(model: str) -> dict[str, Any]:
    """The config.json of a folder, or of a shape that ships.

    Raises:
        ConfigError: there is neither.
    """
    for folder in (Path(model), MODELS / model):
        if (folder / "config.json").is_file():
            return read_config(folder)
    shipped = sorted(path.name for path in MODELS.glob("*") if path.is_dir())
    raise ConfigError(
        f"--model {model} is neither a folder with a config.json nor a known shape; "
        f"known: {', '.join(shipped)}"
    )


def write_random(config: dict[str, Any], folder: Path) -> None:
    """Write a BF16 Hugging Face folder without a tokenizer."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    shapes = hf_shapes(read_arch(config))

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16).mul_(0.02)

    specs = [TensorSpec(name, shape, torch.bfloat16) for name, shape in shapes.items()]
    tensors = ((name, random(shape)) for name, shape in shapes.items())
    write_safetensors(folder / SINGLE, specs, tensors)


@dataclass(frozen=True)
class StartedEngine:
    """One engine, as a load needs it."""

    client: EngineClient
    publish: Callable[[], float]  # one more version; returns for how many seconds it paused
    identity: dict[str, object]


def model_folder(given: str, work: Path) -> Path:
    """Return the folder of the weights: ``given`` itself, or random ones made in ``work``.

    Args:
        given: a checkpoint, or a folder with a config.json alone, or the name of one that ships.

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
        for parts in _buckets(self._tensors(source)):
            self.blobs.append(self.sender.put(len(self.blobs), parts))

    def _tensors(self, source: Checkpoint) -> Iterator[Shard]:
        for op in source.ops():
            quantized = self.scheme != "none" and op.hf[0].quantized
            dtype = None if quantized else DTYPES[self.dtype]
            for name, tensor in read_tensors(source, op, dtype).items():
                stored_tensors = {name: tensor}
                if quantized:
                    stored_tensors = stored(name, quantize(tensor, self.scheme))
                for each, value in stored_tensors.items():
                    yield Shard.whole(each, value)

    def publish(self, fleet: Fleet, number: int) -> float:
        """Publish as the trainer does, under rising numbers; return for how long engines paused.

        Raises:
            EngineError: an engine did not take it.
        """
        with (
            fleet.publication() as engines,
            Update(fleet, engines, number, SyncConfig(), self.sender.describe) as update,
        ):
            for blob in self.blobs:
                update.bucket(_to_all(blob))
            return update.commit(self.sender.receipts)["sync/paused_s"].value


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


@contextlib.contextmanager
def started(
    config: RolloutConfig, folder: Path, version: Version, logs: Path
) -> Iterator[StartedEngine]:
    """An engine of its own, with ``version`` published to it.

    Args:
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
        numbers = itertools.count(1)
        version.publish(fleet, next(numbers))
        (engine,) = fleet.engines()
        client = engine.client  # the fleet forgets a dead engine's
        assert client is not None, "it serves"
        info = client.server_info()
        identity = {name: info[name] for name in IDENTITY if name in info}
        yield StartedEngine(client, lambda: version.publish(fleet, next(numbers)), identity)
