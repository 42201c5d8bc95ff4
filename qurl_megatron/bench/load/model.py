"""The model of a load: a checkpoint, or random weights of a shape; and its versions for engines.

A version is what the trainer would publish: quantized, in the engines' own layout, checked and
named. It is written once and published under ever new numbers, since engines do not care whether
weights have changed.
"""

from collections.abc import Iterator
from pathlib import Path

from qurl_megatron.bench.load.words import write_tokenizer
from qurl_megatron.bench.random_model import config_of, write_random
from qurl_megatron.config import SyncConfig
from qurl_megatron.convert.read_source import folding, read_tensors
from qurl_megatron.engines.embedded.decoder import DTYPES
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.publish.update import BlobsFor, Update
from qurl_megatron.quant import quantize
from qurl_megatron.quant.export import stored
from qurl_megatron.tensors.arch import read_arch
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.weights.source import Checkpoint, open_checkpoint
from qurl_megatron.wire.files import FilesSender
from qurl_megatron.wire.manifest import manifest_of
from qurl_megatron.wire.message import Blob

BUCKET = 256 << 20  # bytes


def model_folder(given: str, work: Path) -> Path:
    """Where the weights are: ``given`` itself, or random ones made in ``work`` with a tokenizer.

    Args:
        given: a checkpoint, a folder with a config.json alone, or a shape's name.

    Raises:
        ConfigError: it is none of them.
    """
    folder = Path(given)
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.distcp")):
        return folder
    random = work / "model"
    config = config_of(given)
    write_random(config, random)
    write_tokenizer(random, read_arch(config).vocab)
    return random


class Version:
    """The weights as one training rank would send them; their folder is the caller's to remove."""

    def __init__(self, source: Checkpoint, scheme: str, dtype: str, root: Path) -> None:
        """
        Args:
            scheme: of the linear layers; "none", "int8" or "fp8".
            dtype: of all else.
            root: gets the files.
        """
        self.source, self.scheme, self.dtype = source, scheme, dtype
        self.sender = FilesSender(root, "tp0", leads=False)
        self.sender.begin(1)
        self.blobs: list[Blob] = []
        shapes: dict[str, tuple[int, ...]] = {}
        for parts in _buckets(self._tensors()):
            shapes |= {part.name: part.shape for part in parts}
            self.blobs.append(self.sender.put(len(self.blobs), parts))
        self.sender.seal(manifest_of(1, scheme, self.blobs, shapes))

    @property
    def folder(self) -> Path:
        return self.sender.folder

    def _tensors(self) -> Iterator[Shard]:
        for op in self.source.ops():
            quantized = self.scheme != "none" and op.hf[0].quantized
            dtype = None if quantized else DTYPES[self.dtype]
            for name, tensor in read_tensors(self.source, op, folding(1.0), dtype).items():
                made = {name: tensor}
                if quantized:
                    made = stored(name, quantize(tensor, self.scheme), "sglang")
                for each, value in made.items():
                    yield Shard.whole(each, value)

    def publish(self, fleet: Fleet, number: int) -> tuple[str, float]:
        """As the trainer does it; to be called with rising numbers.

        Returns:
            What the engine calls these weights, and for how many seconds it paused.

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


def checkpoint_of(folder: Path) -> Checkpoint:
    """
    Raises:
        ConfigError: it is not one.
    """
    source = open_checkpoint(folder)
    source.check()
    return source
