"""Models of a benchmark, and engines to put a load on, started here with one of them.

``--model`` is a folder of ``launch/models`` or any other folder with a config.json. Where no
weights are at hand random ones do: their values change no bytes and no times.

The engines are a trainer's: brought to every version by the fleet, through memory that both map. A
version is as the trainer would publish it: quantized, in the engines' own layout, checked and
named. Its tensors are made once and published under ever new numbers, since engines do not care
whether weights have changed. Random ones of one shape are one tensor, so that a model of 32 billion
parameters takes no more room here than a layer of it and its vocabulary.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.checkpoints.huggingface import TensorSpec, write_safetensors
from qurl_megatron.checkpoints.ops import hf_shapes
from qurl_megatron.checkpoints.places import SINGLE
from qurl_megatron.checkpoints.source import open_checkpoint, read_tensors, write_json
from qurl_megatron.config import RolloutConfig, SyncConfig
from qurl_megatron.engines.embedded.decoder import DTYPES
from qurl_megatron.fleet.client import EngineClient
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.shipped import ROOT
from qurl_megatron.publish.update import Update
from qurl_megatron.quant import quantize
from qurl_megatron.quant.export import stored
from qurl_megatron.quant.weights import QuantizedWeight
from qurl_megatron.tensors.arch import read_arch, read_config
from qurl_megatron.tensors.slice import Shard, buckets
from qurl_megatron.tensors.table import is_quantized
from qurl_megatron.wire.message import encoded
from qurl_megatron.wire.shared_memory import MemorySender

BUCKET = 256 << 20  # bytes
IDENTITY = ("version", "engine", "tp_size", "scheme", "quantization", "dtype", "device", "threads")
"""Facts in ``/server_info`` that a record keeps."""

MODELS = ROOT / "launch/models"

Weight = Tensor | QuantizedWeight


def config_of(model: str) -> dict[str, Any]:
    """Return the config.json of a folder or of a shape that ships; ``ConfigError`` if neither."""
    return read_config(described(model))


def described(model: str) -> Path:
    """Return the folder with the config.json that ``config_of`` reads."""
    for folder in (Path(model), MODELS / model):
        if (folder / "config.json").is_file():
            return folder
    shipped = sorted(path.name for path in MODELS.glob("*") if path.is_dir())
    raise ConfigError(
        f"--model {model} is neither a folder with a config.json nor a known shape; "
        f"known: {', '.join(shipped)}"
    )


def model_folder(model: str, work: Path, *, empty: bool) -> Path:
    """Return the folder from which engines start.

    Args:
        model: a checkpoint, or a folder with a config.json alone, or the name of one that ships.
        work: where random weights are written if they are needed.
        empty: no engine needs weights before the first version.
    """
    folder = described(model)
    if empty or has_weights(folder):
        return folder
    random = work / "model"
    random.mkdir(parents=True)
    write_json(random / "config.json", config_of(model))
    shapes = hf_shapes(read_arch(config_of(model)))
    specs = [TensorSpec(name, shape, torch.bfloat16) for name, shape in shapes.items()]
    tensors = ((name, random_weight(shape)) for name, shape in shapes.items())
    write_safetensors(random / SINGLE, specs, tensors)
    return random


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.distcp"))


def random_weight(shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(0.02)


@dataclass(frozen=True)
class StartedEngine:
    """One engine, as a load needs it."""

    client: EngineClient
    publish: Callable[[], float]  # one more version; returns for how many seconds it paused
    identity: dict[str, object]


class Version:
    """The weights as one training rank would send them; their folder is the caller's to remove."""

    def __init__(self, folder: Path, scheme: str, dtype: str, root: Path) -> None:
        """
        Args:
            folder: a checkpoint, or a config.json alone: then weights are random.
            scheme: of the linear layers; "none", "int8" or "fp8".
            dtype: of all else.
            root: gets receipts, and on a CPU the memory that engines map.

        Raises:
            ConfigError: it is no checkpoint.
        """
        self.arch, self.scheme, self.dtype = read_arch(read_config(folder)), scheme, dtype
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        weights = self._read(folder) if has_weights(folder) else self._random(device)
        self.shards: list[Shard] = []
        for name, weight in weights:
            tensors = {name: weight} if isinstance(weight, Tensor) else stored(name, weight, scheme)
            self.shards += [Shard.whole(each, value) for each, value in tensors.items()]
        self.sender = MemorySender("bench", 0, leads=False, device=device, root=root)
        torch.cuda.empty_cache()  # an engine takes all memory that is free

    def _read(self, folder: Path) -> Iterator[tuple[str, Weight]]:
        source = open_checkpoint(folder)
        source.reader.check(source.arch)
        for op in source.ops():
            for name, tensor in read_tensors(source, op, None).items():
                yield name, self._encoded(tensor, is_quantized(name))

    def _random(self, device: torch.device) -> Iterator[tuple[str, Weight]]:
        @functools.cache
        def weight_of(shape: tuple[int, ...], quantized: bool) -> Weight:
            return self._encoded(random_weight(shape, device), quantized)

        for name, shape in hf_shapes(self.arch).items():
            yield name, weight_of(shape, is_quantized(name))

    def _encoded(self, weight: Tensor, quantized: bool) -> Weight:
        if quantized and self.scheme != "none":
            return quantize(weight, self.scheme)
        return weight.to(DTYPES[self.dtype])

    def publish(self, fleet: Fleet, number: int) -> float:
        """Publish as the trainer does, under rising numbers; return for how long engines paused, or
        raise ``EngineError``."""
        self.sender.begin(number)
        with (
            fleet.publication() as engines,
            Update(fleet, engines, number, SyncConfig(), self.sender.describe) as update,
        ):
            sizes = [shard.value.nbytes for shard in self.shards]
            for index, parts in enumerate(buckets(self.shards, sizes, BUCKET)):
                blobs = encoded([self.sender.put(index, parts)])
                update.bucket(lambda engine, rank, blobs=blobs: blobs)  # type: ignore[misc]
            return update.commit(self.sender.receipts)["sync/paused_s"].value


@contextlib.contextmanager
def started(
    config: RolloutConfig, folder: Path, version: Version, logs: Path
) -> Iterator[StartedEngine]:
    """Start an engine, and publish ``version`` to it.

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
