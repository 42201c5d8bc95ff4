"""Every preset of config.algorithms on a batch of a few tokens, worked by hand.

The settings come from the preset, the functions from ``algo``: a wrong number in either is seen.
Unless a test says otherwise the three policies agree, so that every ratio is 1.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from qurl_megatron.algo.advantages import ESTIMATES, BatchFacts, value_loss
from qurl_megatron.algo.aggregate import token_weights
from qurl_megatron.algo.kl import ESTIMATORS
from qurl_megatron.algo.objective import Limits, objective_terms
from qurl_megatron.algo.segments import owners_of
from qurl_megatron.config import CorrectionConfig
from qurl_megatron.config.algorithms import ALGORITHMS
from qurl_megatron.config.sections import AlgoConfig

# (1 - 0) rewarded twice: mean 1/2, sample deviation sqrt(1/2), so 1/sqrt(2) up to the epsilon.
A = 1 / math.sqrt(2)


def preset(name):
    values = ALGORITHMS[name].items()
    return AlgoConfig(
        **{key.removeprefix("algo."): value for key, value in values if key.startswith("algo.")}
    )


@dataclass
class Result:
    loss: float
    gradient: list[float]  # of the loss in log current
    returns: Tensor | None


def train_on(
    name,
    rewards,  # [prompts, group]
    lengths,
    *,
    ratio=None,  # current / proximal per token
    gaps=None,  # log(proximal / reference) per token
    values=None,
    kl_coef=0.0,
    max_new_tokens=10,
):
    """Loss and gradient of one minibatch that is the whole step."""
    algo, tokens = preset(name), sum(lengths)
    rewards = torch.tensor(rewards, dtype=torch.float64)
    owners, ones = owners_of(lengths), [1.0] * tokens
    proximal = torch.full((tokens,), -3.0, dtype=torch.float64)
    current = (proximal + torch.tensor(ratio or ones, dtype=torch.float64).log()).requires_grad_()
    reference = proximal - torch.tensor(gaps or [0.0] * tokens, dtype=torch.float64)
    penalise = ESTIMATORS[algo.kl_estimator]

    facts = BatchFacts(
        rewards_R=rewards.flatten(),
        group_size=rewards.shape[1],
        indices_r=torch.arange(len(lengths)),
        lengths_r=torch.tensor(lengths),
        penalty_N=kl_coef * (algo.kl_in == "reward") * penalise(proximal, reference),
        values_N=None if values is None else torch.tensor(values, dtype=torch.float64),
        gamma=algo.gamma,
        lam=algo.gae_lambda,
    )
    advantages, returns = ESTIMATES[algo.advantage](facts)
    value = objective_terms(
        *(current, proximal, proximal, advantages),  # nothing is quantized
        kind=algo.objective,
        limits=Limits.of(algo, CorrectionConfig()),
        ratio=algo.ratio,
        surrogate=algo.surrogate,
        owners=owners,
        responses=len(lengths),
    ).value
    value = value - kl_coef * (algo.kl_in == "loss") * penalise(current, reference)
    weights = token_weights(lengths, algo.aggregation, constant=max_new_tokens)
    loss = -(weights.double()[owners] * value).sum()
    loss.backward()
    return Result(loss.item(), current.grad.tolist(), returns)


def close(numbers):
    return pytest.approx(numbers, rel=1e-5, abs=1e-7)


def test_every_preset_has_its_test():
    for name in ALGORITHMS:
        assert f"test_{name}_by_hand" in globals(), name


def test_grpo_by_hand():
    # Advantages A | -A -A. Clip range [0.8, 1.2]: the first token counts 1.2, the last 0.8.
    # J = (1.2 A) / 2 + (-A - 0.8 A) / 2 / 2 = 0.15 A.
    result = train_on("grpo", [[1.0, 0.0]], (1, 2), ratio=[1.5, 1.0, 0.5])
    assert result.loss == close(-0.15 * A)
    assert result.gradient == close([0, A / 4, 0])  # clipped tokens have none


def test_grpo_has_its_kl_as_k3_in_the_loss():
    # current / reference = e: k3 = 1/e - 1 + 1 = 1/e, gradient 1 - 1/e; weights 1/2 | 1/4 1/4.
    result = train_on("grpo", [[1.0, 1.0]], (1, 2), gaps=[1.0, 0, 0], kl_coef=0.1)
    assert result.loss == close(0.1 / math.e / 2)
    assert result.gradient == close([0.1 * (1 - 1 / math.e) / 2, 0, 0])


def test_dapo_by_hand():
    # As for GRPO, but up to 1.28, and every token weighs 1/3: J = (1.28 - 1 - 0.8) A / 3.
    result = train_on("dapo", [[1.0, 0.0]], (1, 2), ratio=[1.5, 1.0, 0.5])
    assert result.loss == close(0.52 * A / 3)
    assert result.gradient == close([0, A / 3, 0])
    inside = train_on("dapo", [[1.0, 0.0]], (1, 2), ratio=[1.27, 1.0, 0.5])
    assert inside.gradient[0] == close(-1.27 * A / 3)
    settings = ALGORITHMS["dapo"]
    assert settings["algo.dynamic_sampling"] and settings["reward.overlong_fraction"] == 0.2
    assert preset("dapo").kl_coef == 0


def test_rloo_by_hand():
    # Penalties 0.1 * (1 | 2 1 | 0) off the rewards 1, 0, 0: 0.9, -0.3, 0. Minus the mean of the
    # others: 0.9 + 0.15 = 1.05, -0.3 - 0.45 = -0.75, 0 - 0.3 = -0.3. Sums over responses, a third
    # each: J = (1.05 - 2 * 0.75 - 0.3) / 3 = -0.25.
    result = train_on("rloo", [[1.0, 0.0, 0.0]], (1, 2, 1), gaps=[1.0, 2, 1, 0], kl_coef=0.1)
    assert result.loss == close(0.25)
    assert result.gradient == close([-0.35, 0.25, 0.25, 0.1])


def test_dr_grpo_by_hand():
    # Advantages 1/2 | -1/2 -1/2, no division by a deviation or by a length but that of 10:
    # J = (1/2 - 1) / (2 * 10).
    result = train_on("dr_grpo", [[1.0, 0.0]], (1, 2), max_new_tokens=10)
    assert result.loss == close(0.025)
    assert result.gradient == close([-0.025, 0.025, 0.025])


def test_reinforce_pp_by_hand():
    # Rewards per token, the penalty off: -0.1, 1 | -0.2; what is still to come: 0.9, 1 | -0.2.
    # Mean 1.7 / 3, variance (0.1111 + 0.1878 + 0.5878) / 2 = 0.44333, deviation 0.66583.
    result = train_on("reinforce_pp", [[1.0], [0.0]], (2, 1), gaps=[1.0, 0, 2], kl_coef=0.1)
    advantages = [0.500626, 0.650814, -1.151440]
    assert result.gradient == close([-a / 3 for a in advantages])
    assert result.loss == close(0.0)  # whitened advantages have the mean 0


def test_reinforce_pp_baseline_by_hand():
    # Minus the group's mean: 1/2 | -1/2 -1/2 || 0 | 0. Mean of the five tokens -0.1, variance
    # (0.36 + 0.16 + 0.16 + 0.01 + 0.01) / 4 = 0.175, deviation 0.41833.
    # KL as k2 in the loss: (1 + 4) / 2 * 0.1 / 5 = 0.05, with the gradient 0.1 * gap / 5.
    result = train_on(
        "reinforce_pp_baseline",
        [[1.0, 0.0], [1.0, 1.0]],
        (1, 2, 1, 1),
        gaps=[1.0, 0, 0, 0, 2],
        kl_coef=0.1,
    )
    advantages = [1.434274, -0.956183, -0.956183, 0.239046, 0.239046]
    assert result.loss == close(0.05)
    penalties = [0.1, 0, 0, 0, 0.2]
    expected = [(p - a) / 5 for p, a in zip(penalties, advantages, strict=True)]
    assert result.gradient == close(expected)


def test_gspo_by_hand():
    # s = sqrt(1.001 * 0.9996) = 1.0003 | 0.999; clip range [0.9997, 1.0004]: the second response is
    # clipped, and no token of the first, though 1.001 alone would be.
    # J = (s A) / 2 + (-0.9997 A) / 2.
    result = train_on("gspo", [[1.0, 0.0]], (2, 1), ratio=[1.001, 0.9996, 0.999])
    s = math.sqrt(1.001 * 0.9996)
    assert result.loss == pytest.approx(-(s - 0.9997) * A / 2, rel=1e-4)
    assert result.gradient == close([-s * A / 4, -s * A / 4, 0])
    beyond = train_on("gspo", [[1.0, 0.0]], (2, 1), ratio=[1.001, 0.9999, 0.999])
    assert beyond.gradient == [0, 0, 0]  # s = 1.00045


def test_cispo_by_hand():
    # The factors 6, 0.5 and 1 are kept in [0, 5]; log current = -3 + log R.
    # J = (5 A (-3 + log 6) - 0.5 A (-3 + log 0.5) + 3 A) / 3, and every token has its gradient.
    result = train_on("cispo", [[1.0, 0.0]], (1, 2), ratio=[6.0, 0.5, 1.0])
    expected = (5 * (-3 + math.log(6)) - 0.5 * (-3 + math.log(0.5)) + 3) * A / 3
    assert result.loss == close(-expected)
    assert result.gradient == close([-5 * A / 3, 0.5 * A / 3, A / 3])


def test_ppo_by_hand():
    # Rewards per token, the penalty off: -0.1, 1 | -0.2. gamma = lambda = 1: what is still to come
    # is 0.9, 1 | -0.2, minus the values 0.4, 0.75 | -0.7. Mean 0.15, variance
    # (0.0625 + 0.36 + 0.7225) / 2 = 0.5725, deviation 0.75664.
    result = train_on(
        "ppo",
        [[1.0], [0.0]],
        (2, 1),
        ratio=[1.0, 1.3, 1.0],
        gaps=[1.0, 0, 2],
        values=[0.5, 0.25, 0.5],
        kl_coef=0.1,
    )
    advantages = [0.330410, 0.792983, -1.123392]
    # The second token is clipped at 1.2.
    assert result.loss == close(-(advantages[0] + 1.2 * advantages[1] + advantages[2]) / 3)
    assert result.gradient == close([-advantages[0] / 3, 0, -advantages[2] / 3])
    # The critic learns the returns as they are: (0.16 + 0.5625 + 0.49) / 2.
    assert result.returns.tolist() == close([0.9, 1.0, -0.2])
    values = torch.tensor([0.5, 0.25, 0.5], dtype=torch.float64)
    loss, clipped = value_loss(values, values, result.returns, clip=0.2)
    assert loss.sum().item() == close(0.60625) and not clipped.any()
