"""What ``qurl plan`` says of a step: before anything has run, and from what other layouts took."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.repeats import Repeats
from qurl_megatron.bench.step.one_run import Usual
from qurl_megatron.bench.step.settings import StepSetting, scaling_setting
from qurl_megatron.bench.step.sizes import Sizes, doubled, sharing
from qurl_megatron.errors import ConfigError
from qurl_megatron.planning.measured import Measured
from qurl_megatron.planning.own import Own, extrapolated

BY_OTHERS, ERROR = "step, planned from the others", "error of that"


@dataclass(frozen=True)
class Foretold:
    """Seconds by phase that a plan gave before the run, or why it gave none."""

    seconds: dict[str, float] = field(default_factory=dict)
    why_not: str = ""


def foretell(own: Own) -> Foretold:
    try:
        logged = own.predict().logged
    except ConfigError as error:  # of another kind of engine, or of a model without a shape
        return Foretold(why_not=str(error))
    return Foretold({name.removeprefix("time/"): value for name, value in logged.items()})


def larger(
    options: argparse.Namespace,
    settings: Sequence[StepSetting],
    measured: Mapping[str, Repeats[Usual]],
) -> list[Case]:
    """Layouts twice as large as those that were run."""
    sizes = doubled([setting.sizes for setting in settings if setting.sizes])
    return [next_case(options, settings, one, measured) for one in sizes]


def by_others(
    setting: StepSetting, others: Sequence[StepSetting], measured: Mapping[str, Repeats[Usual]]
) -> list[Figure]:
    """The step that a plan expects from what other layouts took, and by how much it was wrong;
    round by round. Nothing where there is no other layout, or no plan."""
    try:
        planned = extrapolations(setting.own, others, measured)
    except ConfigError:  # foretell has noted why
        return []
    if not planned:
        return []
    took = [run.seconds["step"] for run in measured[setting.name].results]
    errors = [100 * (plan / real - 1) for plan, real in zip(planned, took, strict=True)]
    return [only_told(BY_OTHERS, "s", planned), only_told(ERROR, "%", errors)]


def extrapolations(
    target: Own, others: Sequence[StepSetting], measured: Mapping[str, Repeats[Usual]]
) -> list[float]:
    """Seconds of a step of ``target``, by round."""
    if not others:
        return []
    return [
        extrapolated(
            target, [(s.own, as_measured(measured[s.name].results[i])) for s in others]
        ).step
        for i in range(len(measured[others[0].name].results))
    ]


def as_measured(run: Usual) -> Measured:
    seconds = run.seconds
    return Measured(
        rollout=seconds["rollout"],
        score=seconds["score"],
        train=seconds["train"],
        publish=seconds["publish"],
        length=run.length,
    )


def next_case(
    options: argparse.Namespace,
    settings: Sequence[StepSetting],
    sizes: Sizes,
    measured: Mapping[str, Repeats[Usual]],
) -> Case:
    """A layout that nobody has run, from all that were."""
    name = f"{Path(options.recipe).stem}, {sizes.name}, not measured"
    keys = {**settings[0].keys, "layout": sizes.name, "scaling": "not measured"}
    try:
        setting = scaling_setting(options, settings[0].own.gpu, sizes, 1.0, "not measured")
        planned = extrapolations(setting.own, settings, measured)
    except ConfigError as error:
        return Case(name=name, keys=keys, reasons=["not run"], notes={"not run": str(error)})
    cores = sharing(sizes, setting.own.gpu)
    return Case(
        name=name,
        keys=keys,
        figures=[only_told(BY_OTHERS, "s", planned)],
        notes={"cores": cores} if cores else {},
    )


def only_told(name: str, unit: str, repeats: list[float]) -> Figure:
    """What follows from other figures, and would be compared with an older record twice."""
    return Figure(name=name, unit=unit, better=None, repeats=repeats)
