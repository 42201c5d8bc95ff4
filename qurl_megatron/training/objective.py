"""The sharded loss of one microbatch: log-probs where the logits lie, then the objective per token.

Shapes: B = responses, S = padded length, v = this tensor rank's part of the vocabulary,
N = response tokens of the microbatch. Prompts and padding are dropped before any ratio is formed.
"""

import torch
from torch import Tensor

from qurl_megatron.algo import k1, k3, objective_terms, token_log_probs
from qurl_megatron.config import AlgoConfig
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.model.policy import Policy
from qurl_megatron.observe.metrics import EffectiveSampleSize, Max, Mean, Metric


class Scorer:
    """Log-probs of the tokens that follow, for one policy at one sampling temperature."""

    def __init__(self, policy: Policy, temperature: float) -> None:
        self.group = policy.ranks.tensor.group if policy.ranks.tensor.size > 1 else None
        self.vocab = policy.arch.vocab
        self.temperature = temperature

    def __call__(self, logits: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """[B, S, v] logits -> log-probs and entropies of the response tokens, [N] each.

        The backward pass writes the gradient over the logits.
        """
        log_probs, entropy = token_log_probs(
            logits.flatten(0, 1),
            batch.targets.flatten(),
            group=self.group,
            temperature=self.temperature,
            vocab_size=self.vocab,
        )
        rows = batch.mask.flatten()
        return log_probs[rows], entropy[rows]


class PolicyLoss:
    """One microbatch's share of the loss, and what is to be seen of it."""

    def __init__(self, score: Scorer, algo: AlgoConfig) -> None:
        self.score = score
        self.algo = algo

    def __call__(self, logits: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        algo = self.algo
        current, entropy = self.score(logits, batch)
        terms = objective_terms(
            current,
            batch.proximal,
            batch.behaviour,
            batch.advantages,
            kind=algo.objective,
            clip_low=algo.clip_low,
            clip_high=algo.clip_high,
            cap=algo.cap,
        )
        value = terms.value
        if algo.entropy_coef:
            value = value + algo.entropy_coef * entropy
        metrics: dict[str, Metric] = {}
        if algo.kl_coef:
            divergence = k3(current, batch.reference)
            value = value - algo.kl_coef * divergence
            metrics["reference/kl"] = _mean(divergence)
        loss = -(batch.weights * value).sum()
        metrics |= {
            "policy/loss": Mean(loss.item(), 0.0),
            "policy/clip_fraction": _mean(terms.clipped),
            "policy/ratio_mean": _mean(terms.ratio),
            "policy/entropy": _mean(entropy),
            "acr/active_fraction": _mean(terms.acr_active),
            "acr/rescued_fraction": _mean(terms.acr_rescued),
        }
        return loss, metrics


def mismatch(batch: TokenBatch, cap: float) -> dict[str, Metric]:
    """How far the quantized behaviour policy is from the full-precision one it was made from."""
    behaviour, proximal = batch.behaviour, batch.proximal
    log_rho = proximal.double() - behaviour.double()
    rho = log_rho.exp()
    return {
        "rollout/kl_k1": _mean(k1(behaviour, proximal)),
        "rollout/kl_k3": _mean(k3(behaviour, proximal)),
        "rollout/rho_mean": _mean(rho),
        "rollout/rho_max": Max(rho.max().item() if len(rho) else 0.0),
        "rollout/ess": EffectiveSampleSize(
            rho.sum().item(), rho.square().sum().item(), float(len(rho))
        ),
        "rollout/truncated_weight_fraction": _mean(rho > cap),
    }


def _mean(values: Tensor) -> Mean:
    """A mean over response tokens, to be merged over microbatches and ranks."""
    return Mean(values.detach().to(torch.float64).sum().item(), float(values.numel()))
