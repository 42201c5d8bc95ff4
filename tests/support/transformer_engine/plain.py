"""Names that Megatron imports for FP8, CUDA graphs and routers, where nothing of ours uses them."""

import contextlib
from collections.abc import Iterator

import torch


class Unused(torch.nn.Module):
    """A class that is here by name."""


LayerNorm = FusibleOperation = Sequential = QuantizedTensor = Unused
CudaRNGStatesTracker = DelayedScaling = FusedSGD = Unused


def unused(*_, **__):
    raise AssertionError("no model of ours asks for it")


get_dummy_wgrad = cast_master_weights_to_fp8 = replace_raw_data = unused
fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = unused
fused_topk_with_score_function = fp8_model_init = unused


class FP8GlobalStateManager:
    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, **_) -> Iterator[None]:
    assert not enabled, "there is no FP8 here"
    yield


def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


class NoStream:
    """Of a GPU that is not there; work is done when a call returns."""
