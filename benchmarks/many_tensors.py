"""CPU seconds that a version's tensors cost beside their bytes, as their number grows.

An INT8 version of Qwen3-30B-A3B has 37,491 tensors, for each of its 48 layers has 128 experts. The
sixteen training ranks of its recipe (TP4, CP2, PP2, EP8) lay out theirs and sum them. The leading
rank describes a bucket of all of them to four engines and reads a receipt, and one of an engine's
four ranks takes in its parts. Each does what it does in a run, without network and Megatron, on
tensors of a few numbers: 1/8 to all of the layers show how the seconds grow.

    python -m benchmarks.many_tensors --out DIR
"""

import argparse
import gc
import math
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.harness import measure, parser_of
from qurl_megatron.bench.command import count
from qurl_megatron.bench.record import Case, Figure, in_turns, progress
from qurl_megatron.bench.rollout_engines import config_of
from qurl_megatron.checkpoints.ops import hf_shapes
from qurl_megatron.publish.shards import engine_part
from qurl_megatron.tensors.arch import Arch, read_arch
from qurl_megatron.tensors.slice import Shard, buckets
from qurl_megatron.tensors.table import hf_tensor, is_quantized
from qurl_megatron.wire.message import Message, encoded, message_in, payload
from qurl_megatron.wire.session import UpdateEnd
from qurl_megatron.wire.shared_memory import MemorySender

TENSOR, CONTEXT, PIPELINE = 4, 2, 2  # EP is TENSOR * CONTEXT
STAGE = TENSOR * CONTEXT  # ranks
ENGINES, ENGINE_TP = 4, 4
BUCKET = 256 << 20  # bytes

T = TypeVar("T")


def parser() -> argparse.ArgumentParser:
    options = parser_of("many_tensors", __doc__, model="Qwen3-30B-A3B")
    add = options.add_argument
    add("--layers", type=count, nargs="+", default=[6, 12, 24, 48], help="default 6 12 24 48")
    return options


def run(options: argparse.Namespace) -> list[Case]:
    """Return a case per number of layers."""
    torch.set_num_threads(1)
    arch = read_arch(config_of(options.model))
    with tempfile.TemporaryDirectory(prefix="qurl-tensors-") as folder:
        versions = {}
        for layers in options.layers:
            runs = Versions(replace(arch, num_layers=layers), Path(folder) / str(layers))
            versions[f"{layers} layers"] = runs
        gc.freeze()  # an engine's process does not have sixteen training ranks to look through
        turns = in_turns(
            {name: version.publish for name, version in versions.items()},
            repeats=options.repeats,
            warm_up=1,
            seen=lambda name, figures: progress(f"{name}: {figures}"),
        )
        for version in versions.values():
            version.close()
    cases = []
    for (name, measured), layers in zip(turns.items(), options.layers, strict=True):
        figures = []
        for key in measured[0]:
            repeats = [turn[key] for turn in measured]
            unit = "µs" if key == "a tensor" else "CPU s"
            figures.append(Figure(name=key, unit=unit, better="lower", repeats=repeats))
        keys = {"model": options.model, "layers": layers}
        notes = {"tensors": versions[name].tensors}
        cases.append(
            Case(name=f"{notes['tensors']:,} tensors", keys=keys, figures=figures, notes=notes)
        )
    return cases


class Versions:
    """Versions of one model, from all training ranks to an engine rank, in one process."""

    def __init__(self, arch: Arch, folder: Path) -> None:
        """
        Args:
            arch: fills buckets as it would; its tensors are made with fewer numbers.
        """
        experts = replace(arch.routed, intermediate=8)
        small = replace(arch, hidden=8, head_dim=2, vocab=64 * ENGINE_TP, experts=experts)
        names = list(_names(small))
        self.tensors = len(names)
        self._ranks = []
        for rank in range(STAGE * PIPELINE):
            shards = list(_shards_of(rank, small, names))
            sizes = [_bytes(arch, shard) for shard in shards]
            self._ranks.append(buckets(shards, sizes, BUCKET))
        folder.mkdir()
        self._senders = [
            MemorySender("bench", rank, leads=not rank, root=folder)
            for rank in range(len(self._ranks))
        ]
        self._engine = UpdateEnd(_Live(small, names))
        self._version = 0

    def publish(self) -> dict[str, float]:
        """Return the CPU seconds of each part of one version."""
        self._version += 1
        session = f"v{self._version}"
        transport = self._senders[0].describe("engine", ENGINE_TP)
        training = [0.0] * len(self._ranks)
        leading = engine = 0.0
        rounds = max(map(len, self._ranks))
        for index in range(rounds):
            gathered = []
            for rank, shards in enumerate(self._ranks):
                put = partial(self._put, rank, index, shards[index] if index < len(shards) else [])
                blob, seconds = timed(put)
                training[rank] += seconds
                gathered.append(blob)
            message = Message("bucket", session, index, transport)
            text, seconds = timed(partial(_described, message, gathered))
            leading += seconds
            _, seconds = timed(partial(self._take, text))
            engine += seconds
        check = payload(Message("check", session, rounds, transport))
        _, seconds = timed(partial(self._take, check))
        engine += seconds
        (receipt,), seconds = timed(partial(self._senders[0].receipts, session, 1))
        leading += seconds
        if receipt.error is not None:
            raise RuntimeError(receipt.error)
        both = leading + engine + max(training)
        return {
            "training rank": max(training),
            "leading rank": leading,
            "engine rank": engine,
            "a tensor": both / self.tensors * 1e6,
        }

    def _put(self, rank: int, index: int, shards: list[Shard]) -> bytes:
        """Put a training rank's part of a bucket; return its blob as ``gather_object`` sends it."""
        return pickle.dumps(self._senders[rank].put(index, shards))

    def _take(self, text: str) -> None:
        self._engine.handle(message_in(text))

    def close(self) -> None:
        for sender in reversed(self._senders):
            sender.close()


def timed(act: Callable[[], T]) -> tuple[T, float]:
    """Return what it returns, and its CPU seconds."""
    start = time.process_time()
    value = act()
    return value, time.process_time() - start


def _described(message: Message, gathered: list[bytes]) -> str:
    """Make the leading rank's message of all ranks' blobs for each engine; return one of them."""
    blobs = encoded(blob for blob in map(pickle.loads, gathered) if blob.pieces)
    texts = [payload(message, blobs) for _ in range(ENGINES)]
    return texts[0]


def _names(arch: Arch) -> Iterator[str]:
    for name in hf_shapes(arch):
        yield name
        if is_quantized(name):
            yield f"{name}_scale"


def _shards_of(rank: int, arch: Arch, names: list[str]) -> Iterator[Shard]:
    """Yield the parts that one training rank sends: its stage's, its experts', its copy's."""
    stage, place = divmod(rank, STAGE)
    copy, tensor_rank = divmod(place, TENSOR)
    first, end = (arch.num_layers * at // PIPELINE for at in (stage, stage + 1))
    of_rank = arch.routed.count // STAGE
    for name in names:
        words = name.split(".")
        tensor = hf_tensor(arch, name)
        if "layers" not in words:
            if stage != (0 if "embed" in name else PIPELINE - 1) or copy:
                continue
        elif not first <= int(words[2]) < end:
            continue
        elif "experts" in words:
            if int(words[5]) // of_rank == place:
                yield Shard.whole(name, _value(name, tensor.shape))
            continue
        elif int(words[2]) % CONTEXT != copy:  # copies take turns
            continue
        dim, shape = tensor.split_dim, list(tensor.shape)
        if dim is not None:
            shape[dim] //= TENSOR
            start = tensor_rank * shape[dim]
            yield Shard(name, _value(name, tuple(shape)), tensor.shape, dim, start)
        elif not tensor_rank:
            yield Shard.whole(name, _value(name, tensor.shape))


def _bytes(arch: Arch, shard: Shard) -> int:
    """Return the bytes of this part of the full model's tensor."""
    tensor = hf_tensor(arch, shard.name)
    elements = math.prod(tensor.shape) * shard.value.numel() // math.prod(shard.shape)
    return elements * shard.value.element_size()


def _value(name: str, shape: tuple[int, ...]) -> Tensor:
    if name.endswith("_scale"):
        return torch.ones(shape)
    return torch.ones(shape, dtype=torch.int8 if is_quantized(name) else torch.bfloat16)


class _Live:
    """The weights of an engine's first rank."""

    def __init__(self, arch: Arch, names: list[str]) -> None:
        self._targets: dict[str, Shard] = {}
        for name in names:
            tensor = hf_tensor(arch, name)
            part = engine_part(tensor, tensor.shape, ENGINE_TP, 0)
            value = _value(name, part.sizes)
            self._targets[name] = Shard(name, value, tensor.shape, tensor.split_dim, 0)

    def tensor_rank(self) -> int:
        return 0

    def targets(self) -> Mapping[str, Shard]:
        return self._targets

    def takes(self, target: Shard, dtype: torch.dtype) -> bool:
        return target.value.dtype == dtype

    def finish(self) -> None:
        pass


if __name__ == "__main__":
    sys.exit(measure("many_tensors", parser().parse_args(), run))
