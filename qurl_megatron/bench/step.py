"""Seconds of a whole RL step: phases, overlap, scaling.

A repeat is one run of a recipe for a few steps, and what stands for it is the median of its steps
but the first two. At every ``rollout.max_staleness`` that is asked for the recipe runs in its own
layout: 0 generates and trains in turn, 1 and more generate while the policy trains. The limit of
such a step is the longer of what engines and trainer do: all of the other one behind it.

``--layouts`` adds scaling, in turn, so that no phase hides behind another. **Strong**: the same
work for more ranks. **Weak**: as much work for each; prompts grow with data ranks or engines, so
layouts with neither have no such case. The limit is linear scaling from the smallest layout, so the
share of it is the efficiency: score and train by training ranks, rollout by engines. Reward is not
split, and grows with the prompts; publish, and what no phase counts, stay as they are. On a CPU
more ranks than cores gain nothing: there linear is level.
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
from qurl_megatron.observe.hours import accepted
from qurl_megatron.observe.sinks import METRICS_FILE, read_metrics
from qurl_megatron.observe.timeline import overlap, read_timeline

PHASES = ("rollout", "reward", "score", "train", "publish")
FIRST = 2  # steps that do not count: they wait for engines and caches

KEYS = {
    "tp": ("tensor", "parallel.tensor"),
    "pp": ("pipeline", "parallel.pipeline"),
    "dp": ("data", "parallel.data"),
    "engines": ("engines", "rollout.engines"),
}
"""By what a layout's name says: the field of ``Sizes``, and the recipe's key."""
SPLIT = {"rollout": "engines", "score": "trainer", "train": "trainer"}
"""By phase, whose number it goes by."""
UNSPLIT = "reward"
"""A phase that one process does for all responses."""


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

    def overrides(self, prompts: int) -> list[str]:
        """What turns a recipe into this layout, with so many prompts a step."""
        sizes = [f"{key}={getattr(self, name)}" for name, key in KEYS.values()]
        return [*sizes, f"data.prompts_per_step={prompts}"]


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """One thing to run."""

    name: str
    keys: dict[str, str | int]
    recipe: Path
    overrides: tuple[str, ...]
    model: Path
    busy: float  # GPUs, or cores of a CPU, that the layout keeps for itself
    cores: int | None  # that all ranks and engines share; None: each has a GPU
    threads: int = 0  # of each rank on a CPU; 0: its share of the cores
    sizes: Sizes | None = None  # None: the recipe's own layout
    work: float = 1.0  # times that of the smallest layout


@dataclass(frozen=True, kw_only=True)
class Usual:
    """Medians over the steps of a run that count."""

    seconds: dict[str, float]  # by phase, and "step"
    engines: float  # seconds of a step during which engines generate, waited for or not
    overlap: float  # share of them that lies behind other work
    accepted: float  # responses that a step trains on, mean


def run(options: argparse.Namespace) -> list[Case]:
    """A case per staleness, and per layout and kind of scaling.

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
    scaled = _scaled(options, layouts)
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
    options: argparse.Namespace, name: str, keys: dict, overrides: Sequence[str], **more
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
    ranks = (config.parallel.world_size, rollout.engines * rollout.engine_tensor)
    cores = None if environment.gpus() else len(os.sched_getaffinity(0))
    if cores is None:
        busy = max(ranks) if rollout.colocate else sum(ranks)
    else:
        sides = [used_cores(side, cores, options.threads) for side in ranks]
        # In turn one side waits for the other.
        busy = min(cores, sum(sides)) if rollout.max_staleness else max(sides)
    return StepSetting(
        name=f"{recipe.stem}, {name}",
        keys={**defaults, **keys},
        recipe=recipe,
        overrides=settings,
        model=Path(config.model.path),
        busy=busy,
        cores=cores,
        threads=options.threads,
        **more,
    )


def _scaled(options: argparse.Namespace, layouts: Sequence[Sizes]) -> list[StepSetting]:
    """Strong scaling of each layout, weak scaling of those that can have it.

    Raises:
        ConfigError: prompts do not come out whole.
    """
    if not layouts:
        return []
    base = smallest(layouts)
    works = [(sizes, 1.0, "strong") for sizes in layouts]
    for sizes in layouts:
        # As much for each rank that takes whole prompts.
        if (work := max(sizes.data / base.data, sizes.engines / base.engines)) > 1:
            works.append((sizes, work, "weak"))
    prompts = load(options.recipe, options.overrides).data.prompts_per_step
    settings = []
    for sizes, work, kind in works:
        if prompts * work != int(prompts * work):
            raise ConfigError(
                f"--layouts {sizes.name}: weak scaling needs {prompts * work:g} prompts a step; "
                "give another data.prompts_per_step"
            )
        settings.append(
            _setting(
                options,
                f"{sizes.name}, {kind}",
                {"staleness": 0, "layout": sizes.name, "scaling": kind},
                [*sizes.overrides(int(prompts * work)), "rollout.max_staleness=0"],
                sizes=sizes,
                work=work,
            )
        )
    return settings


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
        ConfigError: it failed; with what it said last.
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
    """Read what a run left.

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


def _longer_side(usual: Usual) -> float:
    trainer = sum(usual.seconds[p] for p in PHASES if p in usual.seconds and p != "rollout")
    return max(usual.engines, trainer)


def case_of(
    setting: StepSetting,
    repeats: Repeats[Usual],
    limits: Mapping[str, float],
    limit_of: str,
) -> Case:
    """The phases of all repeats, and what an accepted sample costs.

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
    # What follows from others would be compared with an older record twice, so it never is.
    shares = [100 * run.overlap for run in runs]
    figures.append(Figure(name="overlap", unit="%", better=None, repeats=shares))
    if all(run.accepted > 0 for run in runs):
        unit = "core s" if setting.cores else "GPU s"
        spent = [setting.busy * run.seconds["step"] / run.accepted for run in runs]
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
        if setting is not first:
            limits = linear(took, setting.sizes, base, setting.work, setting.cores, setting.threads)
        cores = f", up to {setting.cores} cores" if setting.cores else ""
        case = case_of(setting, measured[setting.name], limits, f"linear from {base.name}{cores}")
        if setting.cores:
            threads = setting.threads or "a share of the cores each"
            case.notes["cores"] = (
                f"{setting.sizes.trainer} training ranks and {setting.sizes.engines} engines on "
                f"{setting.cores} cores, threads: {threads}"
            )
        cases.append(case)
    return cases


def linear(
    phases: Mapping[str, float],
    sizes: Sizes,
    base: Sizes,
    work: float,
    cores: int | None,
    threads: int = 0,
) -> dict[str, float]:
    """Seconds of each phase and of the step at linear scaling.

    Args:
        phases: seconds of the smallest layout, by phase and "step".
        work: times that of the smallest layout.
        cores: that all ranks share; None: each has a GPU.
        threads: of each rank on a CPU; 0: its share of the cores.
    """
    scaled = {}
    for phase, seconds in phases.items():
        if side := SPLIT.get(phase):
            now, before = getattr(sizes, side), getattr(base, side)
            if cores is not None:
                now, before = (used_cores(ranks, cores, threads) for ranks in (now, before))
            scaled[phase] = seconds * work * before / now
        elif phase == UNSPLIT:
            scaled[phase] = seconds * work
    remainder = phases["step"] - sum(phases[phase] for phase in scaled)
    return {**scaled, "step": sum(scaled.values()) + remainder}


def used_cores(ranks: int, cores: int, threads: int) -> int:
    """Return how many of the cores so many ranks keep busy together."""
    return min(cores, ranks * threads) if threads else cores
