"""What a checkpoint is, from its headers: kind, model, layout, formats, UAQ factor, files."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qurl_megatron.checkpoints.anykind import AnyCheckpoint
from qurl_megatron.checkpoints.job import read_manifest
from qurl_megatron.checkpoints.megatron_reader import CRITIC, MegatronReader, stacked_parts
from qurl_megatron.checkpoints.shapes import parameter_count
from qurl_megatron.data.tokenizer import FILES, Tokenizer
from qurl_megatron.kit.disk import read_json
from qurl_megatron.kit.errors import ConfigError


def inspect(found: AnyCheckpoint) -> dict[str, Any]:
    """Facts about a checkpoint, as JSON."""
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
        "tokenizer": tokenizer(checkpoint.description),
    }
    if found.kind == "quantized":
        facts |= {"scheme": found.scheme, "format": found.fmt}
    if isinstance(reader := checkpoint.reader, MegatronReader):
        facts["layout"] = layout(found)
        facts["fp32_masters"] = reader.masters is not None
        facts["critic"] = any(key.startswith(CRITIC) for key in reader.table.keys())  # noqa: SIM118
        facts["step"] = step(checkpoint.folder)
    return facts


def tokenizer(folder: Path) -> str | None:
    """What is wrong with a folder's tokenizer, empty if nothing is; None: it has none."""
    if not any((folder / name).is_file() for name in FILES):
        return None
    try:
        return Tokenizer(folder).disagreement().removeprefix(f"{folder}: ")
    except ConfigError as error:
        return str(error)


def formats(found: AnyCheckpoint) -> dict[str, int]:
    """How many tensors of the model are stored in each number format."""
    reader = found.checkpoint.reader
    if isinstance(reader, MegatronReader):
        # What the model runs in; masters are named apart.
        counted = Counter(
            str(reader.table.dtype(key))
            for key in reader.table.keys()  # noqa: SIM118
            if not key.startswith(("optimizer.", CRITIC))
        )
    else:
        counted = Counter(str(reader.stored(name).dtype) for name in reader.names())
    return {name.removeprefix("torch."): count for name, count in counted.most_common()}


def layout(found: AnyCheckpoint) -> dict[str, int]:
    """The tensor-parallel size a Megatron checkpoint is cut for, and its padded vocabulary."""
    reader = found.checkpoint.reader
    assert isinstance(reader, MegatronReader)
    ops = found.checkpoint.ops()
    attention = next(op for op in ops if op.megatron.endswith("linear_proj.weight"))
    return {
        "tensor": reader.cuts(attention) // stacked_parts(attention),
        "padded_vocab": reader.shape(ops[0])[0],
    }


def step(folder: Path) -> int | None:
    """The training step of a checkpoint of ``qurl train``; None for a converted one."""
    state = folder / "state.json"
    return read_json(state).get("step") if state.is_file() else None


def text(facts: dict[str, Any], *, files: int = 12) -> str:
    """The same for a person; of many files the largest are listed."""
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
    if facts["tokenizer"] is not None:
        rows["tokenizer"] = facts["tokenizer"] or "AutoTokenizer reads it as it is read here"
    sizes = sorted(facts["files"].items(), key=lambda item: -item[1])
    rows["files"] = f"{len(sizes)}, {sum(facts['files'].values()):,} bytes"
    lines = [facts["folder"], *(f"  {name:<11} {value}" for name, value in rows.items())]
    lines += [f"    {size:>15,}  {name}" for name, size in sizes[:files]]
    if len(sizes) > files:
        lines.append(f"    {'':>15}  and {len(sizes) - files} smaller ones")
    return "\n".join(lines)


def tensor_rows(found: AnyCheckpoint) -> list[str]:
    """One line per stored tensor: number format, shape, name."""
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
