"""Log-probs and entropies of the next tokens, as others compute them.

A way takes this rank's slice of the logits, [T, v], and the targets, [T], both flat, and returns
log-probs, [T], and entropies, [T], or None where it has none.

    dense      torch, through a float32 log-softmax; whole vocabularies only
    megatron   megatron.core.fusions.fused_cross_entropy, log-probs alone; as it ships (its parts
               compiled by torch.compile), and eager
    verl       verl.utils.megatron.tensor_parallel, as verl's Megatron engine calls it: the entropy
               of the logits, the log-probs of a copy of them
    liger      liger-kernel's cross entropy, log-probs alone; whole vocabularies, Triton
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

Way = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


def dense(entropy: str) -> Way:
    """log_softmax of a float32 copy.

    Args:
        entropy: "none", "logged" (without a gradient) or "differentiated".
    """

    def way(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        log_p = logits.float().log_softmax(-1)
        picked = log_p.gather(1, targets[:, None]).squeeze(1)
        if entropy == "none":
            return picked, None
        with torch.set_grad_enabled(entropy == "differentiated"):
            return picked, (log_p.exp() * log_p).sum(-1).neg()

    return way


def megatron(group: dist.ProcessGroup, *, compiled: bool) -> Way:
    """Megatron's fused cross entropy, negated."""
    from megatron.core import jit

    if not compiled:
        jit.disable_jit_fuser()  # before the module is imported, whose decorators look at it
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    def way(logits: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        # It wants [sequence, batch, vocabulary].
        loss = fused_vocab_parallel_cross_entropy(logits[:, None], targets[:, None], group)
        return -loss.squeeze(1), None

    return way


def verl(source: Path) -> Way:
    """verl's two functions, out of an unpacked wheel or a checkout: its package imports more than
    they need, so the one file they are in is loaded by itself."""
    module = _load(source / "verl" / "utils" / "megatron" / "tensor_parallel.py")

    def way(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        copy = logits.clone()  # the cross entropy may overwrite what it is given
        entropy = module.vocab_parallel_entropy(logits)
        return module.vocab_parallel_log_probs_from_logits(copy, targets), entropy

    return way


def liger() -> Way:
    from liger_kernel.transformers.functional import liger_cross_entropy

    def way(logits: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        return -liger_cross_entropy(logits, targets, reduction="none"), None

    return way


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
