"""Any checkpoint, to look at: opened whatever its kind, and its facts from headers alone.

Kind, model, layout, formats, UAQ factor and files; ``tensors`` and ``read`` serve comparisons.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from qurl_megatron.checkpoints.huggingface import HfReader
from qurl_megatron.checkpoints.job import read_manifest
from qurl_megatron.checkpoints.megatron_reader import CRITIC, MegatronReader, stacked_parts
from qurl_megatron.checkpoints.ops import Op, parameter_count
from qurl_megatron.checkpoints.places import find_torch_dist
from qurl_megatron.checkpoints.source import Checkpoint, open_checkpoint
from qurl_megatron.kit.disk import read_json
from qurl_megatron.quant import QuantizedWeight
from qurl_megatron.quant.export import loaded, read_quantization, scale_name
from qurl_megatron.tensors.arch import read_arch, read_config
from qurl_megatron.tensors.table import HfTensor, is_quantized

Kind = Literal["huggingface", "megatron", "quantized"]


@dataclass(frozen=True)
class AnyCheckpoint:
    """An opened checkpoint of any kind."""

    kind: Kind
    checkpoint: Checkpoint
    scheme: str = ""  # of a quantized one
    fmt: str = ""

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def uaq_scale(self) -> float:
        return self.checkpoint.uaq_scale

    def tensors(self) -> Iterator[tuple[HfTensor, Op | None]]:
        """Yield the model's tensors with their ops, then all others, without."""
        ops = [(tensor, op) for op in self.checkpoint.ops() for tensor in op.hf]
        reader = self.checkpoint.reader
        if isinstance(reader, MegatronReader):
            yield from ((tensor, op) for tensor, op in ops if reader.holds(op))
            return
        unread = reader.names()
        for tensor, op in ops:
            if tensor.name in unread:
                unread -= {tensor.name, self._scale_of(tensor.name)}
                yield tensor, op
        if self.checkpoint.arch.tied:
            unread.discard("lm_head.weight")  # the embedding once more
        unread = {name for name in unread if not name.endswith(".inv_freq")}
        for name in sorted(unread):
            yield HfTensor(name, reader.shape(name), quantized=is_quantized(name)), None

    def read(self, tensor: HfTensor, op: Op | None) -> Tensor | QuantizedWeight:
        """Return one of ``tensors`` as it is stored."""
        reader = self.checkpoint.reader
        if isinstance(reader, MegatronReader):
            assert op is not None
            return reader.shards(op)[tensor.name]
        if self.kind != "quantized" or not tensor.quantized:
            return reader.whole(tensor.name)
        names = {tensor.name, self._scale_of(tensor.name)} & reader.names()
        parts = {name: reader.whole(name) for name in names}
        return loaded(tensor.name, parts, self.scheme, self.fmt)

    def _scale_of(self, name: str) -> str:
        if self.kind != "quantized" or not name.endswith(".weight"):
            return ""
        return scale_name(name, self.scheme, self.fmt)


def open_any(folder: Path, description: Path | None = None) -> AnyCheckpoint:
    """Open a checkpoint of any kind; nothing but headers is read.

    Raises:
        ConfigError: there is none, or one that is not understood.
    """
    if find_torch_dist(folder):
        return AnyCheckpoint("megatron", open_checkpoint(folder, description))
    config = read_config(folder)
    quantization = read_quantization(config)
    if quantization is None:
        return AnyCheckpoint("huggingface", open_checkpoint(folder))
    dense = {key: value for key, value in config.items() if key != "quantization_config"}
    checkpoint = Checkpoint(folder, folder, config, read_arch(dense), HfReader(folder))
    return AnyCheckpoint("quantized", checkpoint, *quantization)


def inspect(found: AnyCheckpoint) -> dict[str, Any]:
    """Return facts about a checkpoint, as JSON."""
    checkpoint = found.checkpoint
    facts: dict[str, Any] = {
        "folder": str(checkpoint.folder),
        "kind": found.kind,
        "family": checkpoint.arch.family,
        "parameters": parameter_count(checkpoint.arch),
        "uaq_scale": checkpoint.uaq_scale,
        "arch": asdict(checkpoint.arch),
        "weights": formats(found),
        "files": {
            str(path.relative_to(checkpoint.folder)): path.stat().st_size
            for path in sorted(checkpoint.folder.rglob("*"))
            if path.is_file()
        },
        "manifest": read_manifest(checkpoint.folder) is not None,
    }
    if found.kind == "quantized":
        facts |= {"scheme": found.scheme, "format": found.fmt}
    if isinstance(reader := checkpoint.reader, MegatronReader):
        ops = checkpoint.ops()
        attention = next(op for op in ops if op.megatron.endswith("linear_proj.weight"))
        facts["layout"] = {
            "tensor": reader.cuts(attention) // stacked_parts(attention),
            "padded_vocab": reader.shape(ops[0])[0],
        }
        facts["fp32_masters"] = reader.masters is not None
        facts["critic"] = any(key.startswith(CRITIC) for key in reader.table.keys())  # noqa: SIM118
        state = checkpoint.folder / "state.json"  # of a checkpoint of `qurl train`
        facts["step"] = read_json(state).get("step") if state.is_file() else None
    return facts


def formats(found: AnyCheckpoint) -> dict[str, int]:
    """Count the model's tensors by the number format they are stored in."""
    reader = found.checkpoint.reader
    if isinstance(reader, MegatronReader):
        # Formats the model runs in; masters are named apart.
        counted = Counter(
            str(reader.table.dtype(key))
            for key in reader.table.keys()  # noqa: SIM118
            if not key.startswith(("optimizer.", CRITIC))
        )
    else:
        counted = Counter(str(reader.stored(name).dtype) for name in reader.names())
    return {name.removeprefix("torch."): count for name, count in counted.most_common()}


def text(facts: dict[str, Any], *, files: int = 12) -> str:
    """Return the facts as text; of many files the largest are listed."""
    arch = facts["arch"]
    kind = {
        "huggingface": "Hugging Face, safetensors",
        "megatron": "Megatron, torch_dist",
        "quantized": f"Hugging Face, quantized: {facts.get('scheme')} as {facts.get('format')}",
    }[facts["kind"]]
    model = (
        f"{arch['family']}: {arch['num_layers']} layers, hidden {arch['hidden']}, "
        f"{arch['heads']} heads over {arch['kv_heads']} of keys, vocabulary {arch['vocab']}"
    )
    if arch["experts"]:
        model += f", {arch['experts']['count']} experts of which {arch['experts']['top_k']} work"
    if arch["tied"]:
        model += ", tied embeddings"
    stored = ", ".join(f"{name} ({count} tensors)" for name, count in facts["weights"].items())
    if facts.get("fp32_masters"):
        stored += "; FP32 masters and optimizer state beside them"
    if facts.get("critic"):
        stored += "; a critic, which no conversion takes along"
    rows = {
        "kind": kind,
        "model": model,
        "parameters": f"{facts['parameters']:,}",
        "weights": stored,
        "UAQ": f"s = {facts['uaq_scale']:g} folded in" if facts["uaq_scale"] != 1 else "none",
    }
    if "layout" in facts:
        cut = facts["layout"]
        rows["layout"] = (
            f"cut for {cut['tensor']} tensor-parallel ranks, vocabulary padded to "
            f"{cut['padded_vocab']}; loads at any other"
        )
    if facts.get("step") is not None:
        rows["step"] = str(facts["step"])
    sizes = sorted(facts["files"].items(), key=lambda item: -item[1])
    rows["files"] = f"{len(sizes)}, {sum(facts['files'].values()):,} bytes"
    lines = [facts["folder"], *(f"  {name:<11} {value}" for name, value in rows.items())]
    lines += [f"    {size:>15,}  {name}" for name, size in sizes[:files]]
    if len(sizes) > files:
        lines.append(f"    {'':>15}  and {len(sizes) - files} smaller ones")
    return "\n".join(lines)


def tensor_rows(found: AnyCheckpoint) -> list[str]:
    """Return one line per stored tensor: number format, shape, name."""
    reader = found.checkpoint.reader
    if isinstance(reader, MegatronReader):
        table = reader.table
        stored = {key: (table.dtype(key), table.shape(key)) for key in table.keys()}  # noqa: SIM118
    else:
        stored = {
            name: (reader.stored(name).dtype, reader.stored(name).shape)
            for name in sorted(reader.names())
        }
    return [
        f"    {str(dtype).removeprefix('torch.'):<14} {list(shape)!s:<22} {name}"
        for name, (dtype, shape) in stored.items()
    ]
