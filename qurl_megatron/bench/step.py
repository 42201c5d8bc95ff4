"""Seconds of a whole RL step and of its phases, in turn and with rollouts ahead of the training.

A recipe is run for a few steps at every ``rollout.max_staleness`` that is asked for: 0 generates
and trains in turn, 1 and more generate while the policy trains. A repeat is one run, and what
stands for it is the median of its steps but the first, which wait for engines and caches. The limit
of a step is the longer of what engines and trainer do: all of the other one behind it.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.repeats import Repeats, interleaved, progress
from qurl_megatron.errors import ConfigError
from qurl_megatron.observe.lanes import overlap
from qurl_megatron.observe.plots import History
from qurl_megatron.observe.sinks import read_metrics
from qurl_megatron.observe.timeline import read_timeline

PHASES = ("rollout", "reward", "score", "train", "publish")
FIRST = 2  # steps that do not count


def run(options: argparse.Namespace) -> list[Case]:
    """A case per staleness."""
    if options.steps <= FIRST:
        raise ConfigError(f"--steps {options.steps}: the first {FIRST} do not count; give more")
    given = {
        "recipe": Path(options.recipe).stem,
        "steps": options.steps,
        "overrides": " ".join(options.overrides),
    }
    with tempfile.TemporaryDirectory(dir=options.work, prefix="bench-step-") as folder:
        work = Path(folder)
        numbers = iter(range(1 << 30))
        calls = {
            staleness: lambda staleness=staleness: train(
                work / f"run-{next(numbers)}", staleness, options
            )
            for staleness in dict.fromkeys(options.staleness)
        }
        measured = interleaved(calls, repeats=options.repeats, warm_up=0)
    return [
        case_of({**given, "staleness": staleness}, runs) for staleness, runs in measured.items()
    ]


def train(run_dir: Path, staleness: int, options: argparse.Namespace) -> dict[str, float]:
    """One run of the recipe, in a process of its own.

    Raises:
        ConfigError: it failed; with what it said last.
    """
    command = [sys.executable, "-m", "qurl_megatron.cli", "train", options.recipe]
    command += [f"train.run_dir={run_dir}", f"train.steps={options.steps}", "train.eval_prompts=0"]
    command += [f"rollout.max_staleness={staleness}", "checkpoint.every=0", *options.overrides]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = done.stdout.strip().splitlines()
        why = lines[-1] if lines else f"exit code {done.returncode}"
        raise ConfigError(f"bench step: {options.recipe} failed: {why}")
    found = read_run(run_dir)
    progress(f"staleness {staleness}: {found['step']:.2f} s a step")
    return found


def read_run(run_dir: Path) -> dict[str, float]:
    """Medians over the steps that count: seconds by phase, tokens/s and the share of the engines'
    time that lies behind other work."""
    history = History(read_metrics(run_dir / "metrics.jsonl"))

    def median(metric: str) -> float:
        steps, values = history.series(metric)
        return statistics.median(values[steps > FIRST].tolist())

    found = {
        name: median(f"time/{name}") for name in ("step", *PHASES) if f"time/{name}" in history
    }
    spans = [span for span in read_timeline(run_dir / "timeline.jsonl") if span.step > FIRST]
    return {**found, "overlap": overlap(spans), "engines": _generating(run_dir)}


def _generating(run_dir: Path) -> float:
    """Seconds of a step during which engines generate, whether the trainer waits or not."""
    spans = read_timeline(run_dir / "timeline.jsonl")
    found = [
        span.end - span.start
        for span in spans
        if (span.lane, span.name) == ("engines", "rollout") and span.step > FIRST
    ]
    return statistics.median(found) if found else 0.0


def case_of(keys: dict[str, str | int], runs: Repeats[dict[str, float]]) -> Case:
    """
    Args:
        keys: recipe and staleness, and what else was set.
    """

    def figure(phase: str, limit: float | None = None) -> Figure:
        return Figure(
            name=phase,
            unit="s",
            better="lower",
            repeats=[run[phase] for run in runs.results],
            limit=limit,
            limit_of="" if limit is None else "the longer side",
        )

    phases = [phase for phase in PHASES if phase in runs.results[0]]
    longer = statistics.median(
        max(run["engines"], sum(run[p] for p in phases if p != "rollout")) for run in runs.results
    )
    shares = [run["overlap"] for run in runs.results]
    return Case(
        name=f"{keys['recipe']}, staleness {keys['staleness']}",
        keys=keys,
        figures=[figure("step", longer), *map(figure, phases)],
        yardsticks=runs.yardsticks,
        reasons=runs.reasons,
        notes={"overlap": round(statistics.median(shares), 3)},
    )
