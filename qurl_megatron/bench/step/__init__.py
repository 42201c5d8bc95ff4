"""Seconds and joules of a whole RL step: phases, overlap, scaling, and what a plan foretold.

A repeat is one run of a recipe for a few steps, and what stands for it is the median of its steps
but the first two (``one_run``). At every ``rollout.max_staleness`` that is asked for the recipe
runs in its own layout: 0 generates and trains in turn, 1 and more generate while the policy trains.
The limit of such a step is the longer of what engines and trainer do: all of the other one behind
it.

``--layouts`` adds strong and weak scaling, in turn, so that no phase hides behind another; their
limit is linear scaling from the smallest layout (``sizes``), so the share of it is the efficiency.

Before the first run ``qurl plan`` predicts each case from the machine's limits. Afterwards each
layout is predicted once more from what all others took, beside the error; and layouts twice as
large, which nobody has measured, from all of them.
"""

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from qurl_megatron.bench.energy import JouleCounter, Meter
from qurl_megatron.bench.energy import found as joule_counters
from qurl_megatron.bench.record import Case
from qurl_megatron.bench.repeats import interleaved, progress
from qurl_megatron.bench.step.cases import case_of, scaling_cases, told
from qurl_megatron.bench.step.forecast import foretell, larger
from qurl_megatron.bench.step.one_run import FIRST, Usual, read_run, train
from qurl_megatron.bench.step.settings import in_own_layout, machine_of, scaled
from qurl_megatron.bench.step.sizes import parse
from qurl_megatron.errors import ConfigError
from qurl_megatron.planning.own import Own


def run(options: argparse.Namespace) -> list[Case]:
    """A case per staleness, and per layout and kind of scaling.

    Raises:
        ConfigError: a layout does not fit the recipe, or a run failed.
    """
    if options.steps <= FIRST:
        raise ConfigError(f"--steps {options.steps}: the first {FIRST} do not count; give more")
    layouts = list(dict.fromkeys(map(parse, options.layouts)))
    here = machine_of(options)
    settings = [*in_own_layout(options, here), *scaled(options, here, layouts)]
    counters, missing = joule_counters()
    with tempfile.TemporaryDirectory(dir=options.work, prefix="bench-step-") as folder:
        runs = Runs(Path(folder), options.threads, counters)
        if not Path(settings[0].own.config.model.path).exists():
            progress(f"making {settings[0].own.config.model.path}")
            runs.train(settings[0].own, steps=1)
        foretold = {setting.name: foretell(setting.own) for setting in settings}
        calls = {s.name: partial(runs.once, s.own, steps=options.steps) for s in settings}
        measured = interleaved(
            calls,
            repeats=options.repeats,
            warm_up=0,
            seen=lambda name, usual: progress(f"{name}: {usual.seconds['step']:.2f} s a step"),
        )
    energy = told(counters, missing)
    own = [s for s in settings if s.sizes is None]
    others = [s for s in settings if s.sizes]
    return [
        *(case_of(s, measured[s.name], foretold[s.name], energy) for s in own),
        *scaling_cases(others, measured, foretold, energy),
        *larger(options, others, measured),
    ]


class Runs:
    """Runs, each in a folder of its own, with the joules beside them."""

    def __init__(self, folder: Path, threads: int, counters: Sequence[JouleCounter]) -> None:
        self._folder, self._threads, self._counters = folder, threads, counters
        self._count = 0

    def once(self, own: Own, *, steps: int) -> Usual:
        """What a run took."""
        return read_run(*self.train(own, steps=steps))

    def train(self, own: Own, *, steps: int) -> tuple[Path, Meter]:
        self._count += 1
        run_dir, meter = self._folder / f"run-{self._count}", Meter(self._counters)
        overrides = [*own.overrides, f"train.steps={steps}", f"train.run_dir={run_dir}"]
        with meter:
            train(str(own.recipe), overrides, threads=self._threads)
        return run_dir, meter
