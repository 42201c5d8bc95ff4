"""The sharded loss of one microbatch: log-probs where the logits lie, then the objective per token.

Shapes: B = rows, S = padded length, s = this context-parallel rank's part of it, v = this tensor
rank's part of the vocabulary, N = tokens of the microbatch that the policy wrote. All others are
left out before any ratio is formed.
"""

import torch
from torch import Tensor

from qurl_megatron.actor.context import ContextPart
from qurl_megatron.actor.policy import Policy
from qurl_megatron.algo import Limits, LossInputs, k3, kl_penalty, objective_terms, token_log_probs
from qurl_megatron.algo.own_loss import own_objective
from qurl_megatron.config import AlgoConfig, CorrectionConfig
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.observe.metrics import Mean, Metric
from qurl_megatron.training.own_loss import find_loss
from qurl_megatron.training.sums import fetched_sums


class Scorer:
    """Log-probs of the tokens that follow, for one policy at one sampling temperature."""

    def __init__(self, policy: Policy, temperature: float) -> None:
        self.group = policy.ranks.tensor.group if policy.ranks.tensor.size > 1 else None
        self.context = policy.ranks.context
        self.vocab = policy.arch.vocab
        self.temperature = temperature

    def __call__(self, logits: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """[B, s, v] logits -> log-probs and entropies of the response tokens, [N] each.

        All context-parallel ranks get the scores of the whole sequences. The backward pass writes
        the gradient over the logits.
        """
        part = ContextPart.of(self.context, batch)
        scores = token_log_probs(
            logits.flatten(0, 1),
            part.cut(batch.targets).flatten(),
            group=self.group,
            temperature=self.temperature,
            vocab_size=self.vocab,
        )
        log_probs, entropy = (
            part.join(score.unflatten(0, logits.shape[:2]))[batch.mask] for score in scores
        )
        return log_probs, entropy


class PolicyLoss:
    """One microbatch's share of the loss, and its metrics."""

    def __init__(
        self,
        score: Scorer,
        algo: AlgoConfig,
        correction: CorrectionConfig = CorrectionConfig(),  # noqa: B008 - frozen
        *,
        weight_scale: float = 1.0,
    ) -> None:
        """
        Args:
            weight_scale: factor of importance weights, see ``attach_correction``.
        """
        self.score = score
        self.algo = algo
        self.correction = correction
        self.weight_scale = weight_scale

    def __call__(self, logits: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        algo = self.algo
        current, entropy = self.score(logits, batch)
        value, means = self._own(current, batch) if algo.function else self._value(current, batch)
        means |= {"policy/entropy": entropy}
        if algo.entropy_coef:
            value = value + algo.entropy_coef * entropy
        if algo.kl_coef and algo.kl_in == "loss":
            divergence = kl_penalty(
                current,
                batch.reference,
                algo.kl_estimator,
                highest=algo.kl_max,
                sampler=batch.behaviour if algo.kl_weighted else None,
            )
            value = value - algo.kl_coef * divergence
            means["reference/kl"] = divergence
        if batch.kept is not None:  # penalty and bonus leave a rejected response alone, too
            value = torch.where(batch.kept, value, 0.0)
        loss = -(batch.weights * value).sum()
        if not algo.bypass:  # else nothing is known of the policy before the update
            means["policy/kl_from_proximal"] = k3(batch.proximal, current.detach())
        # Fetched together: each fetch by itself would wait for the GPU, which then waits for work.
        total, *sums = fetched_sums(loss, *means.values())
        count = float(len(current))
        metrics = {name: Mean(s, count) for name, s in zip(means, sums, strict=True)}
        return loss, {"policy/loss": Mean(total, 0.0), **metrics}

    def _value(self, current: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the objective of each token, and its metrics per token."""
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
            weight_scale=self.weight_scale,
            keep=batch.kept,
            owners=batch.owners,
            responses=len(batch.lengths),
        )
        means = {
            "policy/clip_fraction": terms.clipped,
            "policy/ratio_mean": terms.ratio,
            "acr/active_fraction": terms.acr_active,
            "acr/rescued_fraction": terms.acr_rescued,
            "correction/weight_mean": terms.weight,
        }
        if algo.dual_clip:
            means["policy/dual_clip_fraction"] = terms.dual_clipped
        if algo.objective == "icepop":
            means["correction/banded_fraction"] = terms.banded
        return terms.value, means

    def _own(self, current: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the same of the user's own function."""
        algo = self.algo
        mask = torch.ones_like(current, dtype=torch.bool) if batch.kept is None else batch.kept
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
        ratio = (current.detach() - batch.proximal).exp()
        return value, {
            "policy/ratio_mean": ratio,
            **{f"loss/{name}": values for name, values in logged.items()},
        }
