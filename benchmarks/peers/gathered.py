"""The straightforward way of publishing weights, to measure ours against.

Every parameter is gathered whole, in BF16, over the tensor-parallel ranks; the leading one turns it
into Hugging Face tensors, quantizes those, and hands them to the engine:

    loader       files of whole quantized tensors, through our loader: SGLang itself cannot load
                 W8A8 weights twice
    from_tensor  BF16, SGLang's own flattened buckets, in memory that both sides map
    from_disk    BF16, a Hugging Face folder that SGLang reads

Nothing overlaps, which is what such code usually does.
"""

import base64
import io
import secrets
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from qurl_megatron.fleet.engine_record import EngineRecord
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.model.policy import Policy
from qurl_megatron.quant import quantize
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.tensors.table import is_quantized
from qurl_megatron.wire.files import FilesSender
from qurl_megatron.wire.message import LOADER, Action, Message, payload

Way = Literal["loader", "from_tensor", "from_disk"]
Named = list[tuple[str, Tensor]]


@dataclass
class Spent:
    """Seconds of the leading rank in each phase, and what it handed over."""

    gather_s: float = 0.0
    quantize_s: float = 0.0
    put_s: float = 0.0
    load_s: float = 0.0
    paused_s: float = 0.0
    bytes: int = 0


class Gathered:
    """All ranks make one and call ``publish`` together."""

    def __init__(
        self,
        policy: Policy,
        fleet: Fleet | None,
        scheme: str,
        way: Way,
        folder: Path,
        limit: float = float("inf"),
    ) -> None:
        """
        Args:
            fleet: one engine, on the leading rank; None on the others.
            folder: for files.
            limit: bytes of a bucket; by default the whole model is one.
        """
        assert (scheme == "none") or way == "loader", "SGLang loads W8A8 weights once only"
        self.policy, self.fleet, self.scheme, self.way = policy, fleet, scheme, way
        self.folder, self.limit = folder, limit
        self._sender: FilesSender | None = None
        if fleet and way == "loader":
            self._sender = FilesSender(folder, "whole", leads=True)

    def close(self) -> None:
        if self.fleet:
            shutil.rmtree(self.folder, ignore_errors=True)

    @torch.no_grad()
    def publish(self, version: int) -> Spent:
        """Bring the engine to what the policy holds now."""
        spent = Spent()
        if not self.fleet:
            for _ in self._whole(spent):
                pass
            return spent
        with self.fleet.publication() as (engine,):
            took = {"loader": self._load, "from_tensor": self._tensors, "from_disk": self._disk}
            took[self.way](engine, version, spent)
            self.fleet.confirm([engine], version)
        return spent

    def _whole(self, spent: Spent) -> Iterator[Named]:
        """Buckets of whole tensors; empty ones on all ranks but the leading one."""
        named: Named = []
        size = 0
        for index in range(self.policy.parameter_count):
            start = time.perf_counter()
            shards = list(self.policy.hf_parameter(index, lambda parameter: parameter.detach()))
            whole = [(shard.name, self._gather(shard)) for shard in shards]
            spent.gather_s += time.perf_counter() - start
            if not self.policy.ranks.leads:
                continue
            start = time.perf_counter()
            found = [pair for name, value in whole for pair in self._quantized(name, value)]
            spent.quantize_s += time.perf_counter() - start
            more = sum(value.nbytes for _, value in found)
            spent.bytes += more
            if named and size + more > self.limit:
                yield named
                named, size = [], 0
            named, size = named + found, size + more
            del whole, found
        yield named

    def _gather(self, shard: Shard) -> Tensor:
        tensor = self.policy.ranks.tensor
        dim = shard.dim
        if dim is None or tensor.size == 1:
            return shard.value
        value = shard.value.transpose(0, dim)
        # The last rank may hold padding of the vocabulary, which its shard leaves out.
        rows = shard.start // tensor.rank if tensor.rank else len(value)
        sizes = [min(rows, shard.shape[dim] - rank * rows) for rank in range(tensor.size)]
        if len(value) < rows:
            value = F.pad(value, (0, 0, 0, rows - len(value)))
        parts = [value.new_empty(rows, *value.shape[1:]) for _ in sizes]
        dist.all_gather(parts, value.contiguous(), group=tensor.group)
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return whole.transpose(0, dim).contiguous()

    def _quantized(self, name: str, value: Tensor) -> Named:
        if self.scheme == "none" or not is_quantized(name):
            return [(name, value)]
        codes = quantize(value, self.scheme)
        return [(name, codes.values), (f"{name}_scale", codes.scale)]

    @contextmanager
    def _update(
        self, engine: EngineRecord, version: int, spent: Spent
    ) -> Iterator[Callable[[], None]]:
        """The engine paused, from the first call of what this yields."""
        client, fleet = engine.api, self.fleet
        started: list[float] = []
        assert fleet is not None

        def begin() -> None:
            if not started:
                started.append(time.perf_counter())
                client.pause("retract")
                client.begin_weight_update()

        yield begin
        start = time.perf_counter()
        client.end_weight_update()
        client.flush()
        client.set_weight_version(fleet.names.of(version))
        client.resume()
        spent.load_s += time.perf_counter() - start
        spent.paused_s = time.perf_counter() - started[0]

    def _load(self, engine: EngineRecord, version: int, spent: Spent) -> None:
        session = f"v{version}-{secrets.token_hex(4)}"
        sender, client = self._sender, engine.api
        assert sender is not None
        sender, client = self._sender, engine.api
        assert sender is not None

        def call(action: Action, index: int, blobs: Sequence = ()) -> None:
            about = sender.describe(engine.name)
            message = Message(action, session, version, index, about, tuple(blobs))
            client.update_weights_from_tensor(payload([message] * engine.tp), LOADER)

        sender.begin(version)
        with self._update(engine, version, spent) as begin:
            count = 0
            for named in self._whole(spent):
                start = time.perf_counter()
                blob = sender.put(count, [Shard.whole(name, value) for name, value in named])
                spent.put_s += time.perf_counter() - start
                del named
                start = time.perf_counter()
                begin()
                call("bucket", count, [blob])
                spent.load_s += time.perf_counter() - start
                count += 1
            call("check", count)
            for receipt in sender.receipts(session, engine.tp):
                assert receipt.error is None, receipt.error
            call("finish", count)
        sender.finish(keep=1)

    def _tensors(self, engine: EngineRecord, version: int, spent: Spent) -> None:
        with self._update(engine, version, spent) as begin:
            for named in self._whole(spent):
                start = time.perf_counter()
                serialized, _held = _serialized(named)
                del named
                spent.put_s += time.perf_counter() - start
                start = time.perf_counter()
                begin()
                engine.api.update_weights_from_tensor([serialized] * engine.tp, "flattened_bucket")
                spent.load_s += time.perf_counter() - start

    def _disk(self, engine: EngineRecord, version: int, spent: Spent) -> None:
        (named,) = self._whole(spent)
        start = time.perf_counter()
        self.folder.mkdir(exist_ok=True)
        shutil.copy(self.policy.source.description / "config.json", self.folder)
        save_file(dict(named), self.folder / "model.safetensors", metadata={"format": "pt"})
        spent.put_s += time.perf_counter() - start
        del named
        with self._update(engine, version, spent) as begin:
            start = time.perf_counter()
            begin()
            # An engine that was started empty would otherwise make up its weights again.
            body = {"model_path": str(self.folder), "load_format": "auto", "flush_cache": False}
            engine.api._succeed("/update_weights_from_disk", body)
            spent.load_s += time.perf_counter() - start


PLACE = "sglang.srt.weight_sync.tensor_bucket"


@dataclass
class FlattenedTensorMetadata:
    """SGLang's class of this name, which the trainer's environment does not have."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


FlattenedTensorMetadata.__module__ = PLACE


def _serialized(named: Named) -> tuple[str, Tensor]:
    """SGLang's flattened bucket, and its bytes: the engine maps them while they are held here."""
    metadata, end = [], 0
    for name, value in named:
        start, end = end, end + value.nbytes
        size = value.nbytes
        metadata.append(FlattenedTensorMetadata(name, value.shape, value.dtype, start, end, size))
    flat = torch.cat([value.flatten().view(torch.uint8) for _, value in named])
    mp.set_sharing_strategy("file_system")  # the engine is not a child of this process
    out = io.BytesIO()
    with _importable():
        ForkingPickler(out).dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(out.getvalue()).decode(), flat


@contextmanager
def _importable() -> Iterator[None]:
    """Pickle looks a class up where it says that it is from."""
    parts = PLACE.split(".")
    names = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    modules = {name: types.ModuleType(name) for name in names}
    modules[PLACE].FlattenedTensorMetadata = FlattenedTensorMetadata
    with patch.dict(sys.modules, modules):
        yield
