"""Facts about a checkpoint of any kind, from headers alone: model, formats, UAQ factor, files."""

from collections import Counter

from qurl_megatron.checkpoints.megatron_reader import CRITIC, MegatronReader
from qurl_megatron.checkpoints.ops import parameter_count
from qurl_megatron.checkpoints.source import Checkpoint
from qurl_megatron.kit.disk import read_json
from qurl_megatron.observe.text import byte_size
from qurl_megatron.tensors.arch import Arch


def inspect(checkpoint: Checkpoint) -> str:
    """Return the facts as text, a line each."""
    files = [path for path in checkpoint.folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    kind = "Hugging Face, safetensors"
    if checkpoint.scheme:
        kind = f"Hugging Face, quantized: {checkpoint.scheme}"
    elif isinstance(checkpoint.reader, MegatronReader):
        kind = "Megatron, torch_dist"
    rows = {
        "kind": kind,
        "model": _model(checkpoint.arch),
        "parameters": f"{parameter_count(checkpoint.arch):,}",
        "weights": _weights(checkpoint),
        "UAQ": "none",
        "files": f"{len(files)}, {byte_size(size)}",
    }
    if checkpoint.uaq_scale != 1:
        rows["UAQ"] = f"s = {checkpoint.uaq_scale:g} folded in"
    state = checkpoint.folder / "state.json"  # of a checkpoint of `qurl train`
    if state.is_file():
        rows["step"] = str(read_json(state).get("step"))
    lines = [f"  {name:<11} {row}" for name, row in rows.items()]
    return "\n".join([str(checkpoint.folder), *lines])


def _model(arch: Arch) -> str:
    text = (
        f"{arch.family}: {arch.num_layers} layers, hidden {arch.hidden}, "
        f"{arch.heads} heads over {arch.kv_heads} of keys, vocabulary {arch.vocab}"
    )
    if arch.experts:
        text += f", {arch.experts.count} experts of which {arch.experts.top_k} work"
    if arch.tied:
        text += ", tied embeddings"
    return text


def _weights(checkpoint: Checkpoint) -> str:
    """Return the formats that the model runs in; masters and a critic are named apart."""
    reader = checkpoint.reader
    stored = reader.stored
    formats = Counter(
        str(tensor.dtype).removeprefix("torch.")
        for name, tensor in stored.items()
        if not name.startswith(("optimizer.", CRITIC))
    )
    text = ", ".join(f"{name} ({count} tensors)" for name, count in formats.most_common())
    if isinstance(reader, MegatronReader) and reader.masters:
        text += "; FP32 masters and optimizer state beside them"
    if any(name.startswith(CRITIC) for name in stored):
        text += "; a critic, which no conversion takes along"
    return text
