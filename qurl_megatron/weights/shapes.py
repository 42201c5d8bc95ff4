"""The shapes that config.json gives to a model's tensors, without torch and without its weights."""

import math

from qurl_megatron.weights.arch import Arch
from qurl_megatron.weights.families import stage_ops


def hf_shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    """The shape a config gives to each Hugging Face tensor of the model."""
    hidden, head = arch.hidden, arch.head_dim
    rows = {
        "embed_tokens": arch.vocab,
        "lm_head": arch.vocab,
        "q_proj": arch.heads * head,
        "k_proj": arch.kv_heads * head,
        "v_proj": arch.kv_heads * head,
        "o_proj": hidden,
        "down_proj": hidden,
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for op in stage_ops(arch, range(arch.num_layers), first=True, last=True):
        for tensor in op.hf:
            path, _, kind = tensor.name.rpartition(".")
            module = path.rpartition(".")[2]  # of "lm_head", itself
            inner = arch.intermediate
            if arch.experts and ".experts." in path:
                inner = arch.experts.intermediate
            if module in ("q_norm", "k_norm"):
                shapes[tensor.name] = (head,)
            elif module.endswith("norm"):
                shapes[tensor.name] = (hidden,)
            elif module == "gate" and arch.experts:
                shapes[tensor.name] = (arch.experts.count, hidden)
            elif kind == "bias":
                shapes[tensor.name] = (rows[module],)
            elif module in ("gate_proj", "up_proj"):
                shapes[tensor.name] = (inner, hidden)
            else:
                columns = {"o_proj": arch.heads * head, "down_proj": inner}.get(module, hidden)
                shapes[tensor.name] = (rows[module], columns)
    return shapes


def parameter_count(arch: Arch) -> int:
    """Numbers in a checkpoint of the model."""
    return sum(math.prod(shape) for shape in hf_shapes(arch).values())
