"""Seconds of a whole RL step: phases, overlap, scaling.

A repeat is one run of a recipe for a few steps, and counts as the median of its steps but the first
two. At every ``rollout.max_staleness`` that is asked for the recipe runs in its own layout: 0
generates and trains in turn, 1 and more generate while the policy trains. The limit of such a step
is the longer of the two, with all of the other behind it.

``--layouts`` adds strong scaling, the same work on more ranks, in turn, so that no phase hides
behind another. On GPUs the limit is linear scaling from the smallest layout, so the share of it is
the efficiency: score and train by training ranks, rollout by engines; all else stays as it is.
"""

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qurl_megatron.bench import environment
from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.repeats import Repeats, interleaved, progress
from qurl_megatron.config import load
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.history import History
from qurl_megatron.observe.sinks import METRICS_FILE, Record, read_metrics
from qurl_megatron.observe.timeline import overlap, read_timeline

PHASES = ("rollout", "reward", "score", "train", "publish")
FIRST = 2  # steps that do not count: they wait for engines and caches

KEYS = {
    "tp": ("tensor", "parallel.tensor"),
    "pp": ("pipeline", "parallel.pipeline"),
    "dp": ("data", "parallel.data"),
    "engines": ("engines", "rollout.engines"),
}
"""By the prefix in a layout's name: the field of ``Sizes``, and the recipe's key."""
SPLIT = {"rollout": "engines", "score": "trainer", "train": "trainer"}
"""By phase, whose number it goes by."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A layout to scale over."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    engines: int = 1

    @property
    def trainer(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def name(self) -> str:
        """As it is read: "tp2+engines2"; sizes of 1 are left out."""
        parts = [f"{n}{size}" for n, (key, _) in KEYS.items() if (size := getattr(self, key)) > 1]
        return "+".join(parts) or "tp1"

    def overrides(self) -> list[str]:
        """Return the settings that turn a recipe into this layout."""
        return [f"{key}={getattr(self, name)}" for name, key in KEYS.values()]


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """One thing to run."""

    name: str
    keys: dict[str, str | int]
    recipe: Path
    overrides: tuple[str, ...]
    model: Path
    devices: int  # GPUs of the layout, or cores of this machine
    on_gpus: bool
    threads: int = 0  # of each rank on a CPU; 0: its share of the cores
    sizes: Sizes | None = None  # None: the recipe's own layout


@dataclass(frozen=True, kw_only=True)
class Usual:
    """Medians over the steps of a run that count."""

    seconds: dict[str, float]  # by phase, and "step"
    engines: float  # seconds of a step during which engines generate, waited for or not
    overlap: float  # share of them that lies behind other work
    accepted: float  # responses that a step trains on, mean


def run(options: argparse.Namespace) -> list[Case]:
    """Measure a case per staleness, and one per layout.

    Raises:
        ConfigError: a layout does not fit the recipe, or a run failed.
    """
    if options.steps <= FIRST:
        raise ConfigError(f"--steps {options.steps}: the first {FIRST} do not count; give more")
    layouts = list(dict.fromkeys(map(parse, options.layouts)))
    unscaled = [
        _setting(
            options,
            f"staleness {staleness}",
            {"staleness": staleness},
            [f"rollout.max_staleness={staleness}"],
        )
        for staleness in dict.fromkeys(options.staleness)
    ]
    scaled = [
        _setting(
            options,
            f"{sizes.name}, strong",
            {"staleness": 0, "layout": sizes.name, "scaling": "strong"},
            [*sizes.overrides(), "rollout.max_staleness=0"],
            sizes,
        )
        for sizes in layouts
    ]
    with tempfile.TemporaryDirectory(dir=options.work, prefix="bench-step-") as folder:
        run_dirs = (Path(folder) / f"run-{number}" for number in itertools.count(1))

        def once(setting: StepSetting) -> Usual:
            run_dir = next(run_dirs)
            train(setting, options.steps, run_dir)
            return read_run(run_dir)

        settings = [*unscaled, *scaled]
        model = settings[0].model
        if not model.exists():
            progress(f"making {model}")
            train(settings[0], 1, next(run_dirs))
        measured = interleaved(
            {setting.name: partial(once, setting) for setting in settings},
            repeats=options.repeats,
            warm_up=0,
            seen=lambda name, usual: progress(f"{name}: {usual.seconds['step']:.2f} s a step"),
        )
    cases = []
    for setting in unscaled:
        repeats = measured[setting.name]
        limits = {"step": statistics.median(map(_longer_side, repeats.results))}
        cases.append(case_of(setting, repeats, limits, "the longer side"))
    return cases + _scaling_cases(scaled, measured)


def _setting(
    options: argparse.Namespace,
    name: str,
    keys: dict,
    overrides: Sequence[str],
    sizes: Sizes | None = None,
) -> StepSetting:
    """
    Raises:
        ConfigError: the recipe cannot be run so.
    """
    recipe = Path(options.recipe)
    threads = [f"rollout.engine_threads={options.threads}"] if options.threads else []
    defaults = {
        "recipe": recipe.stem,
        "steps": options.steps,
        "overrides": " ".join(options.overrides),
        "threads": options.threads,
    }
    settings = (*options.overrides, *threads, *overrides)
    config = load(recipe, settings)
    rollout = config.rollout
    on_gpus = bool(environment.gpus())
    trainer, engines = config.parallel.world_size, rollout.engines * rollout.engine_tensor
    gpus = max(trainer, engines) if rollout.colocate else trainer + engines
    return StepSetting(
        name=f"{recipe.stem}, {name}",
        keys={**defaults, **keys},
        recipe=recipe,
        overrides=settings,
        model=Path(config.model.path),
        devices=gpus if on_gpus else len(os.sched_getaffinity(0)),
        on_gpus=on_gpus,
        threads=options.threads,
        sizes=sizes,
    )


def parse(name: str) -> Sizes:
    """Read a layout's name.

    Raises:
        ConfigError: it is not the name of a layout.
    """
    sizes: dict[str, int] = {}
    for part in name.split("+"):
        match = re.fullmatch(rf"({'|'.join(KEYS)})([1-9]\d*)", part)
        if not match or KEYS[match[1]][0] in sizes:
            raise ConfigError(
                f"--layouts {name} is not a layout; join {', '.join(KEYS)} with a number each, "
                "e.g. tp2+engines2"
            )
        sizes[KEYS[match[1]][0]] = int(match[2])
    return Sizes(**sizes)


def smallest(layouts: Sequence[Sizes]) -> Sizes:
    return min(layouts, key=lambda sizes: sizes.trainer + sizes.engines)


def train(setting: StepSetting, steps: int, run_dir: Path) -> None:
    """Run the recipe in a process of its own.

    Raises:
        ConfigError: it failed; quotes its last line.
    """
    command = [sys.executable, "-m", "qurl_megatron.cli", "train", str(setting.recipe)]
    command += ["train.eval_prompts=0", "checkpoint.every=0", *setting.overrides]
    command += [f"train.steps={steps}", f"train.run_dir={run_dir}"]
    env = dict(os.environ)
    if setting.threads:
        env["OMP_NUM_THREADS"] = str(setting.threads)
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    if done.returncode:
        lines = done.stdout.strip().splitlines()
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise ConfigError(f"bench step: {setting.recipe} failed: {reason}")


def read_run(run_dir: Path) -> Usual:
    """Read a finished run.

    Raises:
        ConfigError: it has no step that counts.
    """
    records = read_metrics(run_dir / METRICS_FILE)
    history = History(records)

    def counted(metric: str) -> list[float]:
        if metric not in history:
            return []
        steps, values = history.series(metric)
        return values[steps > FIRST].tolist()

    if not counted("time/step"):
        raise ConfigError(f"{run_dir}: no step after step {FIRST}; give more --steps")
    spans = [span for span in read_timeline(run_dir / "timeline.jsonl") if span.step > FIRST]
    generating = [s.end - s.start for s in spans if (s.lane, s.name) == ("engines", "rollout")]
    counts = [r for r in records if "time/step" in r.metrics and r.step > FIRST]
    recipe = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
    seconds = {name: counted(f"time/{name}") for name in ("step", *PHASES)}
    return Usual(
        seconds={name: statistics.median(values) for name, values in seconds.items() if values},
        engines=statistics.median(generating) if generating else 0.0,
        overlap=overlap(spans),
        accepted=accepted(counts, recipe) / len(counts),
    )


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


def _longer_side(usual: Usual) -> float:
    trainer = sum(usual.seconds[p] for p in PHASES if p in usual.seconds and p != "rollout")
    return max(usual.engines, trainer)


def case_of(
    setting: StepSetting,
    repeats: Repeats[Usual],
    limits: Mapping[str, float],
    limit_of: str,
) -> Case:
    """Return the phases of all repeats, and the cost of an accepted sample.

    Args:
        limits: seconds by phase and "step".
    """
    runs = repeats.results
    figures = [
        Figure(
            name=name,
            unit="s",
            better="lower",
            repeats=[run.seconds[name] for run in runs],
            limit=limits.get(name),
            limit_of=limit_of if name in limits else "",
        )
        for name in ("step", *PHASES)
        if name in runs[0].seconds
    ]
    # Figures that follow from others would be compared twice, so they never are.
    shares = [100 * run.overlap for run in runs]
    figures.append(Figure(name="overlap", unit="%", better=None, repeats=shares))
    if all(run.accepted > 0 for run in runs):
        unit = "GPU s" if setting.on_gpus else "core s"
        spent = [setting.devices * run.seconds["step"] / run.accepted for run in runs]
        figures.append(Figure(name="per accepted sample", unit=unit, better=None, repeats=spent))
    notes: dict[str, object] = {
        "accepted": round(statistics.fmean(run.accepted for run in runs), 1)
    }
    return Case(
        name=setting.name,
        keys=setting.keys,
        figures=figures,
        yardsticks=repeats.yardsticks,
        reasons=repeats.reasons,
        notes=notes,
    )


def _scaling_cases(
    settings: Sequence[StepSetting],
    measured: Mapping[str, Repeats[Usual]],
) -> list[Case]:
    """The layouts beside linear scaling from the smallest one."""
    if not settings:
        return []
    base = smallest([setting.sizes for setting in settings if setting.sizes])
    first = next(setting for setting in settings if setting.sizes == base)
    runs = measured[first.name].results
    took = {
        phase: statistics.median(run.seconds[phase] for run in runs) for phase in runs[0].seconds
    }
    cases = []
    for setting in settings:
        assert setting.sizes is not None, "layouts have theirs"
        limits = {}
        if setting is not first and setting.on_gpus:
            limits = linear(took, setting.sizes, base)
        cases.append(case_of(setting, measured[setting.name], limits, f"linear from {base.name}"))
    return cases


def linear(phases: Mapping[str, float], sizes: Sizes, base: Sizes) -> dict[str, float]:
    """Return the seconds of each phase that ranks share, and of the step, at linear scaling.

    Args:
        phases: seconds of the smallest layout, by phase and "step".
    """
    scaled = {}
    for phase, side in SPLIT.items():
        if phase in phases:
            scaled[phase] = phases[phase] * getattr(base, side) / getattr(sizes, side)
    remainder = phases["step"] - sum(phases[phase] for phase in scaled)
    return {**scaled, "step": sum(scaled.values()) + remainder}
