"""Names that Megatron imports for FP8, CUDA graphs and random numbers, where nothing uses them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


class FP8GlobalStateManager:
    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> None:
        return None

    @classmethod
    def get_fp8_group(cls) -> None:
        return None


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, **_) -> Iterator[None]:
    assert not enabled, "there is no FP8 here"
    yield


fp8_model_init = fp8_autocast


@dataclass
class DelayedScaling:
    margin: int = 0


class CudaRNGStatesTracker:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        assert seed not in self.seeds_ and name not in self.states_
        self.seeds_.add(seed)
        before = torch.get_rng_state()
        torch.manual_seed(seed)
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)


class activation_recompute_forward(contextlib.AbstractContextManager):  # the library's name
    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass


def get_all_rng_states() -> dict[str, Tensor]:
    return {}


def checkpoint(function: Callable, *args, **kwargs):
    raise AssertionError("Megatron recomputes FP8 layers alone through Transformer Engine")


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    return torch.zeros(shape, dtype=dtype) if zero else torch.empty(shape, dtype=dtype)


def fused_topk_with_score_function(*_, **__):
    raise AssertionError("no model of ours asks for a fused router")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function


class FusibleOperation(torch.nn.Module):
    """Here by name."""


class Sequential(torch.nn.Module):
    """Here by name."""


class QuantizedTensor(Tensor):
    """Here by name: no tensor is one."""


def cast_master_weights_to_fp8(*_, **__):
    raise AssertionError("there is no FP8 here")


replace_raw_data = cast_master_weights_to_fp8


class NoStream:
    """Of a GPU that is not there; work is done when a call returns."""
