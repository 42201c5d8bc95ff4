"""Transformer Engine without CUDA, for tests: Megatron's own spec of its layers runs on the CPU.

Plain torch inside; outside, the library's modules, names, arguments, parameters and state, as far
as Megatron's spec and optimizers use them. ``tests/contracts`` holds every name and argument here
against the library's own wheels. There are no FP8 layers.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from tests.support.transformer_engine import attention, layers, optimizers, plain

VERSION = "2.11.0"

_LAYERS = (
    *((layers, name) for name in ("Linear", "GroupedLinear", "LayerNormLinear", "RMSNorm")),
    (plain, "LayerNorm"),
)

# Where the library has what is here. ``tests/contracts`` reads the table too.
MODULES = {
    "transformer_engine": (),
    "transformer_engine.common": (),
    "transformer_engine.common.recipe": ((plain, "DelayedScaling"),),
    "transformer_engine.pytorch": (
        *_LAYERS,
        (attention, "DotProductAttention"),
        (plain, "fp8_autocast"),
        (plain, "CudaRNGStatesTracker"),
    ),
    "transformer_engine.pytorch.attention": ((attention, "DotProductAttention"),),
    "transformer_engine.pytorch.attention.rope": ((attention, "apply_rotary_pos_emb"),),
    "transformer_engine.pytorch.distributed": (
        (plain, "CudaRNGStatesTracker"),
        (plain, "activation_recompute_forward"),
    ),
    "transformer_engine.pytorch.fp8": (
        *((plain, name) for name in ("FP8GlobalStateManager", "fp8_autocast", "fp8_model_init")),
    ),
    "transformer_engine.pytorch.module": _LAYERS,
    "transformer_engine.pytorch.module.base": ((plain, "get_dummy_wgrad"),),
    "transformer_engine.pytorch.ops": ((plain, "FusibleOperation"), (plain, "Sequential")),
    "transformer_engine.pytorch.optimizers": ((optimizers, "FusedAdam"), (plain, "FusedSGD")),
    "transformer_engine.pytorch.tensor": ((plain, "QuantizedTensor"),),
    "transformer_engine.pytorch.tensor.utils": (
        (plain, "cast_master_weights_to_fp8"),
        (plain, "replace_raw_data"),
    ),
    "transformer_engine.pytorch.router": (
        (plain, "fused_compute_score_for_moe_aux_loss"),
        (plain, "fused_moe_aux_loss"),
        (plain, "fused_topk_with_score_function"),
    ),
}


def install() -> None:
    """Make ``import transformer_engine`` find the stand-in, in this process, for good.

    Megatron looks for the library when it is imported, so it is forgotten if it was; nothing of
    ours may hold on to it by then.
    """
    there = sys.modules.get("transformer_engine")  # None also where it is kept from Megatron
    if there is not None:
        assert getattr(there, "runs_without_cuda", False)
        return
    held = [name for name, module in list(sys.modules.items()) if _holds_megatron(name, module)]
    assert not held, f"install before {held} are imported"
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    for name, content in MODULES.items():
        _add(name, content)
    top = sys.modules["transformer_engine"]
    top.__version__ = VERSION
    top.runs_without_cuda = True  # ``config.env`` asks
    if not torch.cuda.is_available():
        torch.cuda.Stream = plain.NoStream  # Megatron makes one for context parallelism


def _holds_megatron(name: str, module: ModuleType) -> bool:
    return name.startswith("qurl_megatron.") and any(
        getattr(value, "__module__", None) is not None
        and str(value.__module__).partition(".")[0] == "megatron"
        for value in vars(module).values()
    )


def _add(name: str, content: tuple) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
    module.__path__ = []
    for source, entry in content:
        setattr(module, entry, getattr(source, entry))
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
