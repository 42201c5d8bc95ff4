"""Seconds of a whole RL step: its phases, and how far they overlap.

A repeat is one run of a recipe for a few steps, and counts as the median of its steps but the first
two. Each case is the recipe with some overrides: by default ``rollout.max_staleness`` of 0, which
generates and trains in turn, and of 1 and 2, which generate while the policy trains; or layouts of
ranks and engines to compare. The limit of a step is the longer of generating and training, with all
of the other behind it.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from qurl_megatron.bench.record import Case, Figure, in_turns, progress
from qurl_megatron.config import load
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.metrics import History
from qurl_megatron.observe.sinks import METRICS_FILE, read_metrics
from qurl_megatron.observe.timeline import Timeline, overlap

PHASES = ("rollout", "reward", "score", "train", "publish")
FIRST = 2  # steps that do not count: they wait for engines and caches
DEFAULT_CASES = tuple(f"rollout.max_staleness={staleness}" for staleness in range(3))


@dataclass(frozen=True, kw_only=True)
class UsualStep:
    """Medians over the steps of a run that count."""

    seconds: dict[str, float]  # by phase, and "step"
    engines: float  # seconds of a step during which engines generate, waited for or not
    overlap: float  # share of them that lies behind other work

    @property
    def longer_side(self) -> float:
        """Seconds of the engines' work, or of the trainer's where that is more."""
        trainer = sum(s for name, s in self.seconds.items() if name not in ("step", "rollout"))
        return max(self.engines, trainer)


def run(options: argparse.Namespace) -> list[Case]:
    """Measure the recipe with each case's overrides, in turns.

    Raises:
        ConfigError: the recipe does not take them, or a run failed.
    """
    if options.steps <= FIRST:
        raise ConfigError(f"--steps {options.steps}: the first {FIRST} do not count; give more")
    recipe = options.recipe
    numbers = itertools.count(1)
    with tempfile.TemporaryDirectory(prefix="qurl-bench-step-") as folder:

        def once(settings: Sequence[str]) -> UsualStep:
            run_dir = Path(folder) / f"run-{next(numbers)}"
            train(recipe, settings, options.steps, run_dir)
            return read_run(run_dir)

        cases = {
            name: (*options.overrides, *name.split()) for name in options.case or DEFAULT_CASES
        }
        # Loading all of them first refuses impossible settings before anything runs.
        models = {load(recipe, settings).model.path: settings for settings in cases.values()}
        for model, settings in models.items():
            if not Path(model).exists():
                progress(f"making {model}")
                train(recipe, settings, 1, Path(folder) / f"run-{next(numbers)}")
        measured = in_turns(
            {name: partial(once, settings) for name, settings in cases.items()},
            repeats=options.repeats,
            warm_up=0,
            seen=lambda name, usual: progress(f"{name}: {usual.seconds['step']:.2f} s a step"),
        )
    common = {
        "recipe": recipe.stem,
        "steps": options.steps,
        "overrides": " ".join(options.overrides),
    }
    return [case_of(name, common, usual_steps) for name, usual_steps in measured.items()]


def train(recipe: Path, overrides: Sequence[str], steps: int, run_dir: Path) -> None:
    """Run the recipe in a process of its own; if it fails, raise ``ConfigError`` with its last
    line."""
    command = [sys.executable, "-m", "qurl_megatron.cli", "train", str(recipe)]
    command += ["train.eval_prompts=0", "checkpoint.every=0", *overrides]
    command += [f"train.steps={steps}", f"train.run_dir={run_dir}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"bench step: {recipe} {' '.join(overrides)} failed: {lines[-1]}")


def read_run(run_dir: Path) -> UsualStep:
    """Read a finished run of more than ``FIRST`` steps."""
    history = History(read_metrics(run_dir / METRICS_FILE))
    seconds = {}
    for name in ("step", *PHASES):
        if f"time/{name}" in history:
            steps, values = history[f"time/{name}"]
            seconds[name] = statistics.median(values[steps > FIRST].tolist())
    spans = [span for span in Timeline.read(run_dir / "timeline.jsonl") if span.step > FIRST]
    generating = [s.end - s.start for s in spans if (s.lane, s.name) == ("engines", "rollout")]
    return UsualStep(
        seconds=seconds,
        engines=statistics.median(generating) if generating else 0.0,
        overlap=overlap(spans),
    )


def case_of(name: str, common: dict[str, str | int], runs: Sequence[UsualStep]) -> Case:
    """Return the phases of all repeats, and their overlap, which is not compared."""
    figures = []
    for phase in runs[0].seconds:
        values = [run.seconds[phase] for run in runs]
        figures.append(Figure(name=phase, unit="s", better="lower", repeats=values))
    longer_side = statistics.median(run.longer_side for run in runs)
    figures[0] = replace(figures[0], limit=longer_side, limit_of="the longer side")
    shares = [100 * run.overlap for run in runs]
    figures.append(Figure(name="overlap", unit="%", better=None, repeats=shares))
    return Case(name=name, keys={**common, "case": name}, figures=figures)
