"""Where the GPU-hours of a run went, over all of its attempts.

Every second of an attempt, from the start of its supervisor to its end, is one of five things:

    set up     until the first step begins: models, engines, the first version, an evaluation
    trained    in steps that count, as long as the median step at most ``STALLED`` times
    saved      between such steps, and behind the last: checkpoints, evaluations, the report
    stalled    what a step took beyond that
    lost       steps behind the newest checkpoint of an attempt that failed, which are done again

so that they add up to it. Time in the queue holds no GPU, and counts nowhere. On machines without
GPUs the hours count the GPUs that the job asked for.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from qurl_megatron.observe.attempts import Step, Tried, run_metrics, tried
from qurl_megatron.observe.sinks import Record

STALLED = 3.0
"""Times the median step, beyond which a step has stalled."""
KINDS = ("set_up", "trained", "saved", "stalled", "lost")


@dataclass(frozen=True)
class Spent:
    """Of one attempt or several; seconds, or GPU-hours."""

    set_up: float = 0.0
    trained: float = 0.0
    saved: float = 0.0
    stalled: float = 0.0
    lost: float = 0.0

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    def times(self, factor: float) -> "Spent":
        return Spent(**{kind: factor * value for kind, value in asdict(self).items()})

    def plus(self, other: "Spent") -> "Spent":
        return Spent(**{kind: getattr(self, kind) + getattr(other, kind) for kind in KINDS})


@dataclass(frozen=True)
class AttemptRow:
    """One attempt."""

    number: int
    gpus: int
    hours: Spent  # GPU-hours


@dataclass(frozen=True)
class Hours:
    """A run."""

    rows: list[AttemptRow]
    samples: float  # that were trained on, in steps that count; 0 where that is not known

    @property
    def total(self) -> Spent:
        total_hours = Spent()
        for row in self.rows:
            total_hours = total_hours.plus(row.hours)
        return total_hours

    @property
    def per_sample(self) -> float | None:
        """GPU-hours of an accepted sample, of all that was spent."""
        return self.total.total / self.samples if self.samples else None


def hours_of(run_dir: Path) -> Hours:
    """
    Raises:
        ConfigError: a record of the run is damaged.
    """
    attempts = tried(run_dir)
    rows = [
        AttemptRow(
            attempt.number,
            attempt.began.gpus,
            _spent(attempt, after).times(attempt.began.gpus / 3600),
        )
        for attempt, after in zip(attempts, [*attempts[1:], None], strict=False)
    ]
    # What the newest attempt has lost is in metrics.jsonl until the next one begins.
    newest = attempts[-1].ended if attempts else None
    counts = newest.step_after if newest else float("inf")
    records = [record for record in run_metrics(run_dir) if record.step <= counts]
    return Hours(rows, accepted(records, _recipe(run_dir)))


def split(
    began: float, ended: float, steps: Sequence[Step], saved: float, *, failed: bool, runs: bool
) -> Spent:
    """The seconds of one attempt.

    Args:
        saved: step of its newest checkpoint; what is behind it is lost. Infinity while it runs.
        failed: it did not end by itself, so that its last seconds are lost, too.
        runs: it has not ended, and is in a step.
    """
    long = STALLED * median(step.seconds for step in steps) if steps else 0.0
    spent, at = dict.fromkeys(KINDS, 0.0), began
    for index, step in enumerate(steps):
        # Clocks of two nodes: nothing may end before it began, or behind the end.
        done = min(max(step.ended_at, at), ended)
        start = min(max(step.ended_at - step.seconds, at), done)
        counts = step.step <= saved
        before = "saved" if index and counts else "lost" if index else "set_up"
        spent[before] += start - at
        _add_step(spent, done - start, long if counts else None)
        at = done
    remainder = max(ended - at, 0.0)
    if not steps:
        spent["set_up"] += remainder
    elif runs:
        _add_step(spent, remainder, long)
    else:
        spent["lost" if failed or steps[-1].step > saved else "saved"] += remainder
    return Spent(**spent)


def _add_step(spent: dict[str, float], seconds: float, long: float | None) -> None:
    """Add a step's seconds; ``long``: from when on it stalls, None for one that is lost."""
    if long is None:
        spent["lost"] += seconds
        return
    spent["trained"] += min(seconds, long)
    spent["stalled"] += max(seconds - long, 0.0)


def accepted(records: Sequence[Record], recipe: Mapping) -> float:
    """Samples that the steps of metrics.jsonl trained on: without groups that only filled up the
    batch, those that the correction rejected, and those cut off, where they are masked.

    The shares of rejected and of cut-off ones are of the whole batch, so each is taken to be the
    same among what the others leave.

    Args:
        recipe: config.toml of the run; what it lacks counts as nothing.
    """
    group = recipe.get("rollout", {}).get("samples_per_prompt", 0)
    prompts = recipe.get("data", {}).get("prompts_per_step", 0)
    masked = recipe.get("algo", {}).get("mask_truncated", False)
    return sum(
        group
        * (prompts - metrics.get("sampling/unfilled", 0.0))
        * (1 - metrics.get("correction/rejected_responses", 0.0))
        * (1 - (metrics.get("response/truncated", 0.0) if masked else 0.0))
        for record in records
        if "time/step" in (metrics := record.metrics)
    )


def _spent(one: Tried, after: Tried | None) -> Spent:
    if one.ended:
        end, saved = one.ended.ended_at, float(one.ended.step_after)
    else:
        end, saved = one.last_sign, float(after.began.step_before) if after else float("inf")
    failed = bool(one.ended.code) if one.ended else after is not None
    began = one.began.began_at
    return split(
        began,
        max(end, began),
        one.steps,
        saved,
        failed=failed,
        runs=one.ended is None and after is None,
    )


def _recipe(run_dir: Path) -> dict:
    path = run_dir / "config.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except tomllib.TOMLDecodeError:  # the hours are known all the same
        return {}
