"""Any checkpoint, to look at: opened whatever its kind, and its facts from headers alone.

Kind, model, formats, UAQ factor and files; ``tensors`` and ``read`` serve comparisons.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from qurl_megatron.checkpoints.huggingface import HEAD, HfReader
from qurl_megatron.checkpoints.megatron_reader import CRITIC, MegatronReader
from qurl_megatron.checkpoints.ops import Op, parameter_count
from qurl_megatron.checkpoints.places import find_torch_dist
from qurl_megatron.checkpoints.source import Checkpoint, open_checkpoint
from qurl_megatron.kit.disk import read_json
from qurl_megatron.observe.text import byte_size
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
            unread.discard(HEAD)  # the embedding once more
        for name in sorted(unread):
            if not name.endswith(".inv_freq"):
                shape = reader.stored()[name][1]
                yield HfTensor(name, shape, quantized=is_quantized(name)), None

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
    checkpoint, reader = found.checkpoint, found.checkpoint.reader
    files = [path for path in checkpoint.folder.rglob("*") if path.is_file()]
    masters = isinstance(reader, MegatronReader) and reader.masters
    stored = reader.stored()
    critic = any(name.startswith(CRITIC) for name in stored)
    # Formats that the model runs in; masters and a critic are named apart.
    formats = Counter(
        str(dtype).removeprefix("torch.")
        for name, (dtype, _) in stored.items()
        if not name.startswith(("optimizer.", CRITIC))
    )
    facts: dict[str, Any] = {
        "folder": str(checkpoint.folder),
        "kind": found.kind,
        "family": checkpoint.arch.family,
        "parameters": parameter_count(checkpoint.arch),
        "uaq_scale": checkpoint.uaq_scale,
        "arch": asdict(checkpoint.arch),
        "weights": dict(formats.most_common()),
        "fp32_masters": bool(masters),
        "critic": critic,
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
    }
    if found.kind == "quantized":
        facts |= {"scheme": found.scheme, "format": found.fmt}
    state = checkpoint.folder / "state.json"  # of a checkpoint of `qurl train`
    if state.is_file():
        facts["step"] = read_json(state).get("step")
    return facts


def text(facts: dict[str, Any]) -> str:
    """Return the facts as text."""
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
    if facts["fp32_masters"]:
        stored += "; FP32 masters and optimizer state beside them"
    if facts["critic"]:
        stored += "; a critic, which no conversion takes along"
    rows = {
        "kind": kind,
        "model": model,
        "parameters": f"{facts['parameters']:,}",
        "weights": stored,
        "UAQ": f"s = {facts['uaq_scale']:g} folded in" if facts["uaq_scale"] != 1 else "none",
        "files": f"{facts['files']}, {byte_size(facts['bytes'])}",
    }
    if facts.get("step") is not None:
        rows["step"] = str(facts["step"])
    return "\n".join([facts["folder"], *(f"  {name:<11} {row}" for name, row in rows.items())])


def tensor_rows(found: AnyCheckpoint) -> list[str]:
    """Return one line per stored tensor: number format, shape, name."""
    return [
        f"    {str(dtype).removeprefix('torch.'):<14} {list(shape)!s:<22} {name}"
        for name, (dtype, shape) in found.checkpoint.reader.stored().items()
    ]
