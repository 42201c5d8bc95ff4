"""What runs took, as the cases of a record: phases, overlap, and what an accepted sample costs."""

import statistics
from collections.abc import Mapping, Sequence

from qurl_megatron.bench.energy import JouleCounter
from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.repeats import Repeats
from qurl_megatron.bench.step.forecast import Foretold, by_others, only_told
from qurl_megatron.bench.step.one_run import PHASES, Usual
from qurl_megatron.bench.step.settings import StepSetting
from qurl_megatron.bench.step.sizes import linear, sharing, smallest
from qurl_megatron.planning.own import Own


def told(counters: Sequence[JouleCounter], missing: Sequence[str]) -> str:
    """What a record notes of its joules."""
    why = "; ".join(missing)
    if not counters:
        return f"the machine reports no energy: {why}"
    return ", ".join(counter.name for counter in counters) + (f" ({why})" if why else "")


def case_of(
    setting: StepSetting,
    runs: Repeats[Usual],
    foretold: Foretold,
    energy: str,
    limits: Mapping[str, float] | None = None,
    limit_of: str = "the longer side",
) -> Case:
    """
    Args:
        limits: seconds by phase and "step"; None: of the step the longer side.
    """
    if limits is None:
        limits = {"step": statistics.median(map(_longer_side, runs.results))}

    def phase(name: str) -> Figure:
        return Figure(
            name=name,
            unit="s",
            better="lower",
            repeats=[run.seconds[name] for run in runs.results],
            limit=limits.get(name),
            limit_of=limit_of if name in limits else "",
            predicted=foretold.seconds.get(name),
        )

    names = [name for name in ("step", *PHASES) if name in runs.results[0].seconds]
    overlap = only_told("overlap", "%", [100 * run.overlap for run in runs.results])
    notes = {
        "accepted": round(statistics.fmean(run.accepted for run in runs.results), 1),
        "energy": next((f"no joules: {r.no_joules}" for r in runs.results if r.no_joules), energy),
    }
    if setting.sizes:
        notes["cores"] = sharing(setting.sizes, setting.own.gpu)
    if foretold.why_not:
        notes["no prediction"] = foretold.why_not
    return Case(
        name=setting.name,
        keys=setting.keys,
        figures=[*map(phase, names), overlap, *_costs(setting.own, runs.results)],
        yardsticks=runs.yardsticks,
        reasons=runs.reasons,
        notes={name: note for name, note in notes.items() if note != ""},
    )


def _longer_side(run: Usual) -> float:
    trainer = sum(run.seconds[p] for p in PHASES if p in run.seconds and p != "rollout")
    return max(run.engines, trainer)


def _costs(own: Own, runs: Sequence[Usual]) -> list[Figure]:
    """Of a response that is trained on, where any is; and joules, where the machine reports them.
    Costs of a response follow from the step's, so they are only reported."""
    device = "core" if own.gpu.cores else "GPU"
    found = []
    if all(run.accepted > 0 for run in runs):
        spent = [own.busy * run.seconds["step"] / run.accepted for run in runs]
        found.append(only_told("per accepted sample", f"{device} s", spent))
    joules = [run.joules for run in runs if run.joules is not None]
    if joules and len(joules) == len(runs):
        found.append(Figure(name="energy of a step", unit="J", better="lower", repeats=joules))
        if all(run.accepted > 0 for run in runs):
            shares = [j / run.accepted for j, run in zip(joules, runs, strict=True)]
            found.append(only_told("energy per accepted sample", "J", shares))
    return found


def scaling_cases(
    settings: Sequence[StepSetting],
    measured: Mapping[str, Repeats[Usual]],
    foretold: Mapping[str, Foretold],
    energy: str,
) -> list[Case]:
    """The layouts beside linear scaling, and beside a plan made of the other layouts' runs."""
    if not settings:
        return []
    base = smallest([setting.sizes for setting in settings if setting.sizes])
    first = next(s for s in settings if s.sizes == base)
    smallest_took = medians(measured[first.name].results)
    cases = []
    for setting in settings:
        here, sizes = setting.own.gpu, setting.sizes
        assert sizes is not None, "layouts have theirs"
        limits = linear(smallest_took, sizes, base, setting.work, here)
        cores = f", as far as {here.cores} cores multiply" if here.cores else ""
        case = case_of(
            setting,
            measured[setting.name],
            foretold[setting.name],
            energy,
            {} if setting is first else limits,
            f"linear from {base.name}{cores}",
        )
        others = [s for s in settings if s.sizes != sizes]  # neither its strong nor its weak runs
        case.figures.extend(by_others(setting, others, measured))
        cases.append(case)
    return cases


def medians(runs: Sequence[Usual]) -> dict[str, float]:
    return {
        phase: statistics.median(run.seconds[phase] for run in runs) for phase in runs[0].seconds
    }
