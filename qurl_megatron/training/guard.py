"""Notice a collapse by thresholds on every step's metrics, and decide on the action.

A threshold trips when it has been crossed ``guard.patience`` steps in a row, once per excursion: it
must be respected again before it can trip again. The counts are part of the training state, so a
run that was interrupted in the middle of an excursion trips at the step at which it would have.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from qurl_megatron.config import GuardConfig
from qurl_megatron.kit.errors import Foreseen


class Collapse(Foreseen, RuntimeError):
    """The run's own numbers end it: which metric or tensor, its value, at which step."""


@dataclass(frozen=True)
class Threshold:
    """One key of the guard section, and the metric that it is held against."""

    what: str  # its name in guard/<name>, which counts the steps in a row that crossed it
    key: str  # of GuardConfig
    metrics: tuple[str, ...]  # the first that the step has
    above: bool  # crossed above it, else below it

    def crossed(self, value: float, limit: float) -> bool:
        """A value that is not finite has crossed every threshold."""
        return not math.isfinite(value) or (value > limit if self.above else value < limit)


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

    counts: dict[str, int]  # to be remembered, for the next ``Guard``
    metrics: dict[str, float]
    why: str = ""  # a threshold tripped at this step
    halt: bool = False
    fall_back: bool = False  # rollouts are to be unquantized from the next version on


class Guard:
    """Counts the steps in a row at which each threshold was crossed."""

    def __init__(
        self, config: GuardConfig, counts: Mapping[str, int], *, own_engines: bool = True
    ) -> None:
        """
        Args:
            counts: of the last ``Verdict``; empty for a fresh run.
            own_engines: the run started its engines itself, and can start them again.
        """
        self.config, self.own_engines = config, own_engines
        # 0 is not watched; a threshold that is new, or was left alone meanwhile, begins at 0.
        self.watched = [t for t in THRESHOLDS if getattr(config, t.key)]
        self.counts = {t.what: counts.get(t.what, 0) for t in self.watched}

    def judge(self, step: int, metrics: Mapping[str, float], *, quantized: bool) -> Verdict:
        """Take in a step.

        Args:
            metrics: of all ranks; a threshold whose metric is missing stays as it is.
            quantized: rollouts are.
        """
        if not self.watched:
            return Verdict({}, {})
        action, patience = self.config.action, self.config.patience
        acts = action == "halt" or (action == "bf16" and quantized)
        reasons = []
        for threshold in self.watched:
            name = next((name for name in threshold.metrics if name in metrics), None)
            if name is None:
                continue
            value, limit = metrics[name], getattr(self.config, threshold.key)
            crossed = threshold.crossed(value, limit)
            count = self.counts[threshold.what] + 1 if crossed else 0
            self.counts[threshold.what] = count
            # Beyond it where the run was only warned, and then started again with another action.
            if count == patience or (acts and count > patience):
                reasons.append(self._reason(threshold, name, value, limit, step))
        tripped = any(count >= patience for count in self.counts.values())
        guard_metrics = {
            f"guard/{threshold_name}": float(count) for threshold_name, count in self.counts.items()
        }
        guard_metrics["guard/tripped"] = float(tripped)
        explanation = "; ".join(reasons)
        if not reasons or not acts:
            if reasons and action == "bf16":
                explanation += "; rollouts are unquantized already"
            return Verdict(dict(self.counts), guard_metrics, explanation)
        if action == "bf16" and not self.own_engines:
            explanation += (
                "; guard.action=bf16 cannot restart the engines that rollout.urls or "
                "rollout.rendezvous name: start them for unquantized weights"
            )
        # Later crossings count from 0: they have their own patience.
        self.counts = dict.fromkeys(self.counts, 0)
        halt = action == "halt" or not self.own_engines
        return Verdict(
            dict(self.counts), guard_metrics, explanation, halt=halt, fall_back=action == "bf16"
        )

    def _reason(
        self, threshold: Threshold, name: str, value: float, limit: float, step: int
    ) -> str:
        if math.isfinite(value):
            how = f"is {'above' if threshold.above else 'below'}"
        else:
            how = "is not a finite number, held against"
        rows = self.counts[threshold.what]
        when = f"at step {step}" if rows == 1 else f"{rows} steps in a row up to step {step}"
        return f"{name} = {value:.4g} {how} guard.{threshold.key} = {limit:g}, {when}"
