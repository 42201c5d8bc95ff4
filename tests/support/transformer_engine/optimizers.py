"""FusedAdam, which makes its state in its first step."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW with one step count per group; moments exist from a parameter's first step on."""

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
    ) -> None:
        assert not (amsgrad or capturable or master_weights or use_decoupled_grad), "not built here"
        assert adam_w_mode and bias_correction, "not built here"
        defaults = dict(
            lr=lr, bias_correction=True, betas=betas, eps=eps, weight_decay=weight_decay
        )
        super().__init__(params, defaults)
        self.capturable, self.master_weights = capturable, master_weights

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_to_none=set_to_none is not False)

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self._initialize_state(param, name, zero_buffer=True)

    def _initialize_state(
        self,
        param: Tensor,
        state_name: str,
        zero_buffer: bool,
        store_param_remainders: bool = False,
    ) -> None:
        self.state[param][state_name] = torch.empty(
            param.shape, dtype=torch.float32, device=param.device
        )
        if zero_buffer:
            self.state[param][state_name].zero_()

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        return self.state[param][state_name]

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        if state_name not in self.state[param]:
            self._initialize_state(param, state_name, zero_buffer=False)
        self.state[param][state_name].copy_(unscaled_state)

    def load_state_dict(self, state_dict: dict) -> None:
        """torch would cast moments to the parameters' dtype; the library copies them in FP32."""
        super().load_state_dict(state_dict)
        saved = [i for group in deepcopy(state_dict["param_groups"]) for i in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        by_number = dict(zip(saved, own, strict=True))
        for number, moments in state_dict["state"].items():
            param = by_number.get(number)
            if param is None:
                continue
            self.state[param] = {}
            for name, value in moments.items():
                if value is not None:
                    self.set_scaled_state(param, name, value.float())

    # The arguments of TransformerEngine's, which are more than those of torch's.
    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, False)
                if param.grad is not None:
                    _update(param, self.state[param], group)


def _update(param: Tensor, state: dict[str, Tensor], group: dict) -> None:
    beta1, beta2 = group["betas"]
    assert param.grad is not None
    grad = param.grad.float()
    state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    first = state["exp_avg"] / (1 - beta1 ** group["step"])
    second = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
    param.sub_(group["lr"] * (first / second + group["weight_decay"] * param))
