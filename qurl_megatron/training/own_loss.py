"""``algo.function``: the user's loss, found by its name and tried before models load."""

from functools import cache

import torch

from qurl_megatron.algo.objective import Limits
from qurl_megatron.algo.own_loss import LossFunction, LossInputs, own_objective
from qurl_megatron.config import AlgoConfig, CorrectionConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.rewards.own_code import find_named

KEY = "algo.function"


@cache
def find_loss(name: str) -> LossFunction:
    """Return the function that ``algo.function`` names; importing its module runs it.

    Raises:
        ConfigError: there is none.
    """
    return find_named(KEY, name, "function")


def check_loss(algo: AlgoConfig, correction: CorrectionConfig) -> None:
    """Try the user's loss on two made-up responses of five tokens.

    Raises:
        ConfigError: it cannot be found, fails, or returns an invalid value.
    """
    if not algo.function:
        return
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
        limits=Limits.of(algo, correction),
    )
    named = f"{KEY}={algo.function}"
    value, _ = own_objective(find_loss(algo.function), inputs, named)
    value.sum().backward()
    assert current.grad is not None, "its values have a gradient"
    if not (value.isfinite().all() and current.grad.isfinite().all()):
        raise ConfigError(
            f"{named} gives values or gradients that are not finite for ordinary log-probs; "
            "avoid logarithms of 0 and divisions by 0"
        )
