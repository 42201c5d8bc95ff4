"""Facts about a checkpoint of any kind, from headers alone: model, formats, UAQ factor, files."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from qurl_megatron.checkpoints.megatron_reader import CRITIC, MegatronReader
from qurl_megatron.checkpoints.ops import parameter_count
from qurl_megatron.checkpoints.source import Checkpoint
from qurl_megatron.kit.disk import read_json
from qurl_megatron.observe.text import byte_size


def inspect(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return facts about a checkpoint, as JSON."""
    reader = checkpoint.reader
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
        "kind": checkpoint.kind,
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
    if checkpoint.kind == "quantized":
        facts |= {"scheme": checkpoint.scheme, "format": checkpoint.fmt}
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


def tensor_rows(checkpoint: Checkpoint) -> list[str]:
    """Return one line per stored tensor: number format, shape, name."""
    return [
        f"    {str(dtype).removeprefix('torch.'):<14} {list(shape)!s:<22} {name}"
        for name, (dtype, shape) in checkpoint.reader.stored().items()
    ]
