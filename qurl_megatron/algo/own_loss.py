"""A loss of the user's own: one function from the log-probs of three policies to the objective.

It takes the place of ``objective_terms``. All else of a step stays: advantages, rejected responses,
how tokens are averaged, KL penalty and entropy bonus, and the sharding: whatever the layout, the
function sees whole responses.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.algo.objective import Limits
from qurl_megatron.kit.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The N response tokens of one microbatch. Log-probs are natural logarithms, [N] float32."""

    current: Tensor
    """Of the actor being optimised; the only tensor that is differentiated."""

    proximal: Tensor
    """Of the full-precision actor before this step's updates."""

    behaviour: Tensor
    """Of the quantized engine, which sampled the tokens."""

    advantages: Tensor
    """[N]."""

    mask: Tensor
    """[N] bool: True for tokens that train; the value of others is ignored."""

    owners: Tensor
    """[N] int64: the response of each token, from 0 to ``responses - 1``."""

    responses: int

    limits: Limits
    """The recipe's clip_low, clip_high, cap and their like."""


LossFunction = Callable[[LossInputs], Any]
"""Returns J per token, [N], to be maximised; or that and a dict of detached values per token, [N],
whose means over all tokens are logged as ``loss/NAME``."""


def own_objective(
    function: LossFunction, inputs: LossInputs, named: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call the user's function, and check its result.

    Args:
        named: the setting that names it, for messages.

    Returns:
        The objective per token, [N], 0 where the mask is False, and the values to be logged.

    Raises:
        ConfigError: the function raised, or returned something else than ``LossFunction`` says.
    """
    try:
        returned = function(inputs)
    except Exception as error:  # whatever the user's code does
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{named} raised {type(error).__name__}: {error} "
            f"({Path(frame.filename).name}, line {frame.lineno})"
        ) from error
    value, logged = returned if isinstance(returned, tuple) else (returned, {})
    shape = inputs.current.shape
    if not isinstance(value, Tensor) or value.shape != shape:
        raise ConfigError(
            f"{named} returned {_described(value)}; it must return the objective of each of the "
            f"{len(inputs.current)} tokens, a tensor of shape {list(shape)}"
        )
    if not value.requires_grad:
        raise ConfigError(
            f"{named} returned values without a gradient; compute them from inputs.current, "
            "without detach() or no_grad()"
        )
    if not isinstance(logged, dict):
        raise ConfigError(
            f"{named} returned {_described(logged)} as values to log; return a dict of tensors, "
            "one value per token"
        )
    for name, tensor in logged.items():
        if not isinstance(tensor, Tensor) or tensor.shape != shape:
            raise ConfigError(
                f"{named} returned {_described(tensor)} as {name}; values to log must be tensors "
                f"of shape {list(shape)}, one value per token"
            )
    detached = {str(name): tensor.detach() for name, tensor in logged.items()}
    return torch.where(inputs.mask, value, 0.0), detached


def try_loss(function: LossFunction, limits: Limits, named: str) -> None:
    """Try a loss on two made-up responses of five tokens.

    Raises:
        ConfigError: it fails, or returns an invalid value.
    """
    current = torch.tensor([-1.0, -0.5, -2.0, -0.1, -3.0], requires_grad=True)
    before = current.detach() - torch.tensor([0.0, 0.1, -0.1, 0.0, 0.2])
    inputs = LossInputs(
        current=current,
        proximal=before,
        behaviour=before + 0.01,
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        mask=torch.ones(5, dtype=torch.bool),
        owners=torch.tensor([0, 0, 0, 1, 1]),
        responses=2,
        limits=limits,
    )
    value, _ = own_objective(function, inputs, named)
    value.sum().backward()
    assert current.grad is not None, "its values have a gradient"
    if not (value.isfinite().all() and current.grad.isfinite().all()):
        raise ConfigError(
            f"{named} gives values or gradients that are not finite for ordinary log-probs; "
            "avoid logarithms of 0 and divisions by 0"
        )


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"
