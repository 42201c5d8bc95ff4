"""Detect a collapse before it spreads: numbers that are not finite, and crossed thresholds.

Every rank looks at its own masters after a step: one pass and one word to the host, which goes to
the other ranks with the step's metrics. So nothing is published or saved that no forward pass can
compute with, and the newest checkpoint stays one that a run can go on from.

A threshold trips when it has been crossed ``guard.patience`` steps in a row, once per excursion: it
must be respected again before it can trip again. The counts are part of the training state, so a
run that was interrupted in the middle of an excursion trips at the step at which it would have.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qurl_megatron.actor.megatron import together
from qurl_megatron.config import GuardConfig
from qurl_megatron.kit.errors import Foreseen

if TYPE_CHECKING:  # a rank imports this module before Megatron
    from qurl_megatron.actor.trained import Trained

LARGEST = 1e7
"""Root mean square of a tensor beyond which products of a few weights overflow FP32."""


class Collapse(Foreseen, RuntimeError):
    """The run's own numbers end it; the message names the culprit, its value, and the step."""


class NotFinite(Foreseen, RuntimeError):
    """Losses, gradients or weights are not finite."""


@torch.no_grad()
def examine(models: "Sequence[Trained]") -> float:
    """Return the sum of squares of this rank's masters; over all ranks each weight counts once.

    Raises:
        NotFinite: one is not finite, or too large.
    """
    squares = 0.0
    for model in models:
        masters = list(model.masters())
        if not masters:
            continue
        norms_N = torch.stack(torch._foreach_norm([master for _, master, _ in masters]))
        sizes_N = norms_N.new_tensor([max(1, master.numel()) for _, master, _ in masters])
        once_N = norms_N.new_tensor([float(counts) for _, _, counts in masters])
        rms_N = norms_N / sizes_N.sqrt()
        total = (norms_N.double() * once_N).square().sum()
        total, largest = torch.stack([total, rms_N.max().double()]).tolist()
        squares += total
        if largest <= LARGEST:  # NaN is not
            continue
        for (name, master, _), rms in zip(masters, rms_N.tolist(), strict=True):
            if not rms <= LARGEST:
                raise NotFinite(
                    "weights are not finite, or too large to compute with: "
                    f"{name} on rank {model.ranks.rank} {_how_bad(master)}"
                )
    return squares


def check_gradient(model: "Trained", norm: float) -> None:
    """Raise ``NotFinite`` where the norm, the same on every rank, is not finite; all call it."""
    if math.isfinite(norm):
        return

    def look() -> None:
        for name, parameter in model.gpt.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None and not bool(gradient.isfinite().all()):
                raise NotFinite(
                    "the gradient is not finite: "
                    f"{name} on rank {model.ranks.rank} {_how_bad(gradient)}"
                )

    together(look)
    raise NotFinite(
        "the gradient is not finite: each tensor is, but not the sum of their squares in FP32"
    )


def check_losses(metrics: dict[str, float]) -> None:
    """Raise ``NotFinite`` where a loss, merged over all ranks, is not finite."""
    for name, value in metrics.items():
        if name.endswith("/loss") and not math.isfinite(value):
            raise NotFinite(f"{name} is {value}")


def _how_bad(tensor: Tensor) -> str:
    if bool(tensor.isnan().any()):
        return "has NaN"
    if bool(tensor.isinf().any()):
        return "has infinity"
    return f"has values up to {tensor.abs().max().item():.3g}"


@dataclass(frozen=True)
class Threshold:
    """One key of the guard section, and the metric that it is compared with."""

    name: str  # in guard/<name>, which counts the steps in a row that crossed it
    key: str  # of GuardConfig
    metrics: tuple[str, ...]  # the first one present is compared
    above: bool  # crossed above it, else below it

    def crossed(self, value: float, limit: float) -> bool:
        """Return whether a value crossed the threshold; one that is not finite crosses every."""
        if not math.isfinite(value):
            return True
        return value > limit if self.above else value < limit


THRESHOLDS = (
    Threshold("kl", "kl_above", ("rollout/kl_k3",), above=True),
    Threshold("rho", "rho_above", ("rollout/rho_max",), above=True),
    # Dynamic sampling trains on groups of mixed success, however bad the policy is.
    Threshold("reward", "reward_below", ("reward/mean_generated", "reward/mean"), above=False),
    Threshold("entropy_low", "entropy_below", ("policy/entropy",), above=False),
    Threshold("entropy_high", "entropy_above", ("policy/entropy",), above=True),
)


@dataclass(frozen=True)
class Verdict:
    """Judgement of one step's metrics; the same on every rank."""

    counts: dict[str, int]  # steps in a row, by watched threshold, for the next judgement
    metrics: dict[str, float]
    reason: str = ""  # a threshold tripped at this step
    halt: bool = False


def judge(
    config: GuardConfig, counts: Mapping[str, int], step: int, metrics: Mapping[str, float]
) -> Verdict:
    """Count a step's crossings, and decide.

    Args:
        counts: of the last ``Verdict``; empty for a fresh run.
        metrics: of all ranks; a threshold whose metric is missing stays as it is.
    """
    halts = config.action == "halt"
    new_counts: dict[str, int] = {}
    reasons = []
    for threshold in THRESHOLDS:
        limit = getattr(config, threshold.key)
        if not limit:  # not watched
            continue
        # A threshold that is new, or was left alone meanwhile, begins at 0.
        count = counts.get(threshold.name, 0)
        name = next((name for name in threshold.metrics if name in metrics), None)
        if name is not None:
            value = metrics[name]
            count = count + 1 if threshold.crossed(value, limit) else 0
            # The count is beyond it if the run was only warned, then restarted with another action.
            if count == config.patience or (halts and count > config.patience):
                reasons.append(_reason(threshold, name, value, limit, step, count))
        new_counts[threshold.name] = count
    if not new_counts:
        return Verdict({}, {})
    guard_metrics = {f"guard/{name}": float(count) for name, count in new_counts.items()}
    guard_metrics["guard/tripped"] = float(max(new_counts.values()) >= config.patience)
    halt = halts and bool(reasons)
    if halt:  # started again, the run has all of its patience
        new_counts = dict.fromkeys(new_counts, 0)
    return Verdict(new_counts, guard_metrics, "; ".join(reasons), halt)


def _reason(
    threshold: Threshold, name: str, value: float, limit: float, step: int, count: int
) -> str:
    how = "is below"
    if not math.isfinite(value):
        how = "is not a finite number, held against"
    elif threshold.above:
        how = "is above"
    when = f"at step {step}"
    if count > 1:
        when = f"{count} steps in a row up to step {step}"
    return f"{name} = {value:.4g} {how} guard.{threshold.key} = {limit:g}, {when}"
