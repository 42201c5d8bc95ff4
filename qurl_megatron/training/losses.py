"""The losses of one microbatch: the policy's, from logits where they lie, and the critic's.

Only tokens that the policy wrote take part; all others are left out before any ratio is formed.
The value of a token is the value of the state before it, so it is read at the same position as
the token's log-prob.

Shapes: B = rows, S = padded length, s = this context-parallel rank's part of it, v = this tensor
rank's part of the vocabulary, N = tokens of the microbatch that the policy wrote.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.actor.context import ContextPart
from qurl_megatron.actor.critic import Critic
from qurl_megatron.actor.megatron import Axis
from qurl_megatron.actor.policy import Policy
from qurl_megatron.algo import LossInputs, token_log_probs
from qurl_megatron.algo.advantages import value_loss
from qurl_megatron.algo.kl import k3, kl_penalty
from qurl_megatron.algo.objective import Limits, objective_terms
from qurl_megatron.algo.own_loss import own_objective
from qurl_megatron.config import AlgoConfig, CorrectionConfig
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.observe.metrics import ExplainedVariance, Mean, Metric
from qurl_megatron.training.inputs import find_loss
from qurl_megatron.training.mismatch import batch_mismatch


@dataclass(frozen=True)
class Scorer:
    """Log-probs of response tokens under one policy, at one sampling temperature."""

    policy: Policy
    temperature: float

    def __call__(self, logits: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the response tokens, [N] each, from [B, s, v] logits.

        All context-parallel ranks get the scores of the whole sequences. The backward pass writes
        the gradient over the logits.
        """
        ranks = self.policy.ranks
        part = ContextPart.of(ranks.context, batch)
        log_probs, entropy = token_log_probs(
            logits.flatten(0, 1),
            part.cut(batch.targets).flatten(),
            group=ranks.tensor.group,
            temperature=self.temperature,
            vocab_size=self.policy.arch.vocab,
        )
        rows = logits.shape[:2]
        log_probs = part.join(log_probs.unflatten(0, rows))[batch.mask]
        entropy = part.join(entropy.unflatten(0, rows))[batch.mask]
        return log_probs, entropy


@dataclass(frozen=True)
class PolicyLoss:
    """One microbatch's share of the policy's loss, and its metrics.

    A microbatch without proximal log-probs belongs to the first update, and uses its own.
    """

    score: Scorer
    algo: AlgoConfig
    correction: CorrectionConfig = CorrectionConfig()

    def __call__(self, logits: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        algo = self.algo
        current, entropy = self.score(logits, batch)
        measured: dict[str, Metric] = {}
        if batch.proximal is None:  # there has been no update since the rollouts
            batch = replace(batch, proximal=current.detach())
            measured = batch_mismatch(batch, algo.cap)
        denominators: dict[str, Tensor] = {}  # of shares that are not of all tokens
        if algo.function:
            value, means = self._from_user(current, batch)
        else:
            value, means, denominators = self._objective(current, batch)
        means["policy/entropy"] = entropy
        if algo.entropy_coef:
            value = value + algo.entropy_coef * entropy
        if algo.kl_coef and algo.kl_in == "loss":
            divergence = kl_penalty(
                current, batch.reference, algo.kl_estimator, highest=algo.kl_max
            )
            value = value - algo.kl_coef * divergence
            means["reference/kl"] = divergence
        if batch.kept is not None:  # penalty and bonus leave a rejected response alone, too
            value = torch.where(batch.kept, value, 0.0)
        loss = -(batch.weights * value).sum()
        means["policy/kl_from_proximal"] = k3(batch.proximal, current.detach())
        total, *sums = _fetched_sums(loss, *means.values(), *denominators.values())
        counts = dict.fromkeys(means, float(len(current)))
        counts |= zip(denominators, sums[len(means) :], strict=True)
        metrics: dict[str, Metric] = {"policy/loss": Mean(total, 0.0)}
        for name, numerator in zip(means, sums, strict=False):
            if counts[name] or name not in denominators:  # no share of nothing
                metrics[name] = Mean(numerator, counts[name])
        return loss, metrics | measured

    def _objective(
        self, current: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return the objective of each token, its metrics per token, and denominators of shares."""
        algo, correction = self.algo, self.correction
        terms = objective_terms(
            current,
            batch.proximal,
            batch.behaviour,
            batch.advantages,
            kind=algo.objective,
            surrogate=algo.surrogate,
            ratio=algo.ratio,
            limits=Limits.of(algo, correction),
            level=correction.level,
            keep=batch.kept,
            owners=batch.owners,
            responses=len(batch.lengths),
        )
        means = {
            "policy/clip_fraction": terms.clipped,
            "policy/ratio_mean": terms.ratio,
            "acr/active_fraction": terms.acr_active,
            "acr/rescued_fraction": terms.acr_rescued,
            "acr/gradient_share": torch.where(terms.acr_rescued, terms.gradient, 0.0),
            "correction/weight_mean": terms.weight,
        }
        if algo.dual_clip:
            means["policy/dual_clip_fraction"] = terms.dual_clipped
        if algo.objective == "icepop":
            means["correction/banded_fraction"] = terms.banded
        return terms.value, means, {"acr/gradient_share": terms.gradient}

    def _from_user(self, current: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the user's objective of each token, and its metrics per token."""
        algo = self.algo
        mask = batch.kept
        if mask is None:
            mask = torch.ones_like(current, dtype=torch.bool)
        inputs = LossInputs(
            current=current,
            proximal=batch.proximal,
            behaviour=batch.behaviour,
            advantages=batch.advantages,
            mask=mask,
            owners=batch.owners,
            responses=len(batch.lengths),
            limits=Limits.of(algo, self.correction),
        )
        function = find_loss(algo.function)
        value, logged = own_objective(function, inputs, f"algo.function={algo.function}")
        means = {"policy/ratio_mean": (current.detach() - batch.proximal).exp()}
        for name, values in logged.items():
            means[f"loss/{name}"] = values
        return value, means


def read_values(output: Tensor, batch: TokenBatch, *, context: Axis) -> Tensor:
    """Return the values of the response tokens, [N] float32, from a critic's output [B, s, 1]."""
    return ContextPart.of(context, batch).join(output)[..., 0][batch.mask]


def attach_values(critic: Critic, batches: Sequence[TokenBatch]) -> list[TokenBatch]:
    """Return the microbatches with values, [N]."""
    read = partial(read_values, context=critic.ranks.context)
    return with_scores(batches, "values", critic.score(batches, read))


def with_scores(
    batches: Sequence[TokenBatch], name: str, scores: Sequence[Tensor]
) -> list[TokenBatch]:
    """Return the microbatches with a score each; only the last stage has and reads them."""
    if not scores:
        return list(batches)
    scored = []
    for batch, score in zip(batches, scores, strict=True):
        field: dict[str, Any] = {name: score}
        scored.append(replace(batch, **field))
    return scored


@dataclass(frozen=True)
class ValueLoss:
    """One microbatch's share of the critic's loss, and its metrics.

    The metrics describe the values before the update, from which the advantages were made: they
    tell how good that baseline was.
    """

    context: Axis
    clip: float  # how far a value may move from before the update; 0 does not clip

    def __call__(self, output: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        """Return share and metrics from [B, s, 1]; the microbatch has values and returns."""
        current = read_values(output, batch, context=self.context)
        terms, clipped = value_loss(current, batch.values, batch.returns, clip=self.clip)
        loss = (batch.weights * terms).sum()
        returns, errors = batch.returns.double(), batch.returns.double() - batch.values.double()
        count = float(len(returns))
        total, value, clipped_count, target, target_squares, error, error_squares = _fetched_sums(
            *(loss, batch.values, clipped), *(returns, returns.square(), errors, errors.square())
        )
        return loss, {
            "critic/loss": Mean(total, 0.0),
            "critic/value_mean": Mean(value, count),
            "critic/return_mean": Mean(target, count),
            "critic/clip_fraction": Mean(clipped_count, count),
            "critic/explained_variance": ExplainedVariance(
                target, target_squares, error, error_squares, count
            ),
        }


def _fetched_sums(*values: Tensor) -> list[float]:
    """Return the sum of each tensor, in float64.

    All are fetched together: each number that Python reads by itself waits for the GPU, which then
    waits for more work.
    """
    return torch.stack([value.detach().sum(dtype=torch.float64) for value in values]).tolist()
