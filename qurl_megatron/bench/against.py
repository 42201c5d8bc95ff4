"""Is this record slower than that one? Exit code 0: no, 1: yes, 3: no verdict.

Times and rates are first divided by the yardstick of their own repeat, which takes out the state of
the whole machine at that moment. Then the new repeats are set against the old ones by the rank test
of Mann and Whitney (scipy's, exact), which needs no shape of the noise. The ratio is the median of
every new repeat over every old one.

A **regression** is at least ``SMALLEST`` worse, more than ``NOISE`` times the spread, and no chance
with confidence ``ALARM``, even among as many figures as there are (Bonferroni's correction: twenty
figures are twenty chances of a false alarm). Disturbances come in bursts, which neighbouring
repeats share and the test takes for evidence; but they leave the quickest repeats alone, so a
regression must show there, too. **Equal** excludes ``SMALLEST`` and more. In between nothing is
claimed. Cases of one name are compared where all their keys agree; figures that are neither better
high nor low are left out. Nothing is said of times where the yardsticks, or the rates at which
memory was read, show two different machines.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qurl_megatron.bench.environment import HARDWARE
from qurl_megatron.bench.record import BenchRecord, Case, Figure
from qurl_megatron.observe.text import how_many

SMALLEST = 0.05
"""A change that matters."""
CONFIDENCE = 0.95
ALARM = 0.99
"""Confidence that a regression takes, of all figures together: who is alarmed stops working."""
NOISE = 3
"""So many times the spread of the repeats a regression must be."""
YARDSTICK = 0.10
"""By so much the yardsticks of two cases may differ; beyond, they saw two different machines."""

MEMORY = "read_gb_s"
READ = 0.15
"""By so much the rates may differ at which two records saw the machine read its memory. Other
guests of a host use it, too, which no process list and no yardstick shows."""

SECONDS = ("s", "ms", "us", "µs", "CPU s", "core s", "GPU s")

EXIT_CODES = {"equal or better": 0, "regression": 1, "no verdict": 3}


@dataclass(frozen=True)
class Compared:
    """One figure of one case: how many times as slow, or as large, the new one is."""

    case: str
    figure: str
    verdict: str  # "better", "equal", "regression", "no verdict"
    ratio: float | None = None  # above 1 is worse
    why: str = ""  # no verdict


@dataclass(frozen=True)
class Comparison:
    """All figures of two records."""

    compared: tuple[Compared, ...]
    why: str = ""  # nothing was compared at all

    @property
    def looked_at(self) -> int:
        """Figures of which there are repeats on both sides."""
        return sum(each.ratio is not None for each in self.compared)

    @property
    def word(self) -> str:
        verdicts = {each.verdict for each in self.compared}
        if "regression" in verdicts:
            return "regression"
        if not self.looked_at or "no verdict" in verdicts:
            return "no verdict"
        return "equal or better"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]

    def text(self) -> str:
        """For a terminal: a line per figure, and the verdict last."""
        width = max((len(f"{c.case}: {c.figure}") for c in self.compared), default=0)
        lines = []
        for each in self.compared:
            ratio = "" if each.ratio is None else f"{each.ratio:.3f} "
            reason = f": {each.why}" if each.why else ""
            lines.append(
                f"{f'{each.case}: {each.figure}':<{width}}  {ratio}{each.verdict}{reason}\n"
            )
        count = f"{how_many(self.looked_at, 'figure')} compared"
        return "".join(lines) + f"{self.word}: {self.why or count}\n"


def compare(old: BenchRecord, new: BenchRecord) -> Comparison:
    """Compare every figure of every case."""
    if old.benchmark != new.benchmark:
        reason = f"one is of bench {old.benchmark}, the other of bench {new.benchmark}"
        return Comparison((), reason)
    if differing := _different(old.environment, new.environment, HARDWARE):
        return Comparison((), f"they ran on different hardware ({differing})")
    before = {case.name: case for case in old.cases}
    after = {case.name: case for case in new.cases}
    both = [name for name in after if name in before]
    looked_at = sum(len(_shared(before[name], after[name])) for name in both)
    memories = _memories_differ(old.environment, new.environment)
    compared: list[Compared] = []
    for name in dict.fromkeys([*before, *after]):
        if name in both:
            compared += _cases(before[name], after[name], looked_at, memories)
        else:
            lacking = "the new" if name in before else "the old"
            compared.append(Compared(name, "all", "no verdict", why=f"{lacking} record lacks it"))
    return Comparison(tuple(compared))


def _different(old: Any, new: Any, names: Sequence[str]) -> str:
    """Return the differences, as "tokens: 100 and 10000"; or ""."""
    pairs = {name: (old.get(name), new.get(name)) for name in names}
    return ", ".join(f"{name}: {a} and {b}" for name, (a, b) in pairs.items() if a != b)


def _memories_differ(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return why times of one machine, measured at two moments, cannot be compared, or ""."""
    then, today = ((environment.get("limits") or {}).get(MEMORY) for environment in (old, new))
    if then is None or today is None or abs(math.log(today / then)) <= math.log(1 + READ):
        return ""
    return (
        f"the machine read {then} GB/s then and {today} now, so its host was busy once; "
        "measure both again, one after the other"
    )


def _yardsticks_differ(old: Sequence[float], new: Sequence[float]) -> str:
    """Return why times beside them cannot be compared, or ""."""
    if not old or not new:
        return ""
    ratio = statistics.median(new) / statistics.median(old)
    if abs(math.log(ratio)) <= math.log(1 + YARDSTICK):
        return ""
    return f"the yardstick took {ratio:.2f} times as long: another load"


def _judged(old: Case, new: Case) -> list[str]:
    """Names of all figures but those that are only reported, in either record."""
    figures = [*old.figures, *new.figures]
    reported = {figure.name for figure in figures if figure.better is None}
    return [n for n in dict.fromkeys(figure.name for figure in figures) if n not in reported]


def _shared(old: Case, new: Case) -> list[str]:
    both = {figure.name for figure in old.figures} & {figure.name for figure in new.figures}
    return [name for name in _judged(old, new) if name in both]


def _cases(old: Case, new: Case, looked_at: int, memories: str) -> list[Compared]:
    if not old.figures and not new.figures:  # neither could be run
        return []
    settings = _different(old.keys, new.keys, list(dict.fromkeys([*old.keys, *new.keys])))
    reason = f"it measured something else ({settings})" if settings else ""
    if reason := reason or ", ".join(sorted({*old.reasons, *new.reasons})):
        return [Compared(new.name, "all", "no verdict", why=reason)]
    shared = _shared(old, new)
    compared = [
        Compared(new.name, name, "no verdict", why="one record lacks it")
        for name in _judged(old, new)
        if name not in shared
    ]
    differ = memories or _yardsticks_differ(old.yardsticks, new.yardsticks)
    for name in shared:
        before, after = old.figure(name), new.figure(name)
        repeats = [*before.repeats, *after.repeats]
        if not any(repeats):
            compared.append(Compared(new.name, name, "equal", 1.0))
        elif min(repeats) <= 0:  # nothing is so many times as much as 0
            compared.append(Compared(new.name, name, "no verdict", why="a repeat is 0"))
        else:
            logs = _scaled(before, old.yardsticks), _scaled(after, new.yardsticks)
            compared.append(_figure(new.name, after, *logs, looked_at, differ))
    return compared


def is_time(unit: str) -> bool:
    """Whether it follows the speed of the machine, as seconds and rates do; bytes do not."""
    return unit in SECONDS or unit.endswith("/s")


def _scaled(figure: Figure, yardsticks: Sequence[float]) -> list[float]:
    """Logarithms of repeats above 0, larger is worse."""
    worse = 1 if figure.better == "lower" else -1
    logs = [worse * math.log(value) for value in figure.repeats]
    if is_time(figure.unit) and len(yardsticks) == len(logs):
        logs = [log - math.log(y) for log, y in zip(logs, yardsticks, strict=True)]
    return logs


def _figure(
    case: str, figure: Figure, old: list[float], new: list[float], looked_at: int, differ: str
) -> Compared:
    from scipy.stats import mannwhitneyu  # half a second, which no help should wait for

    def chance(alternative: str, shift: float = 0.0) -> float:
        """That equal speeds, but for ``shift``, give ranks as far on one side as these."""
        shifted = [log - shift for log in new]
        return mannwhitneyu(shifted, old, alternative=alternative, method="exact").pvalue

    smallest = math.log(1 + SMALLEST)
    difference = statistics.median(b - a for a in old for b in new)
    quickest = _quickest(new) - _quickest(old)
    noise = NOISE * max(_spread(old), _spread(new))
    accident = (1 - ALARM) / 2 / looked_at
    doubt = (1 - CONFIDENCE) / 2
    repeats = min(len(old), len(new))
    reason = differ if is_time(figure.unit) else ""
    if reason:
        verdict = "no verdict"
    elif (
        chance("greater") <= accident
        and min(difference, quickest) >= smallest
        and difference >= noise
    ):
        verdict = "regression"
    elif chance("less", smallest) <= doubt:
        verdict = "better" if chance("less") <= doubt else "equal"
    else:
        verdict = "no verdict"
        enough = most_figures(repeats) >= looked_at
        reason = "too noisy" if enough else _too_few(repeats, looked_at)
    return Compared(case, figure.name, verdict, math.exp(difference), reason)


def _too_few(repeats: int, figures: int) -> str:
    enough = next(n for n in itertools.count(repeats + 1) if most_figures(n) >= figures)
    return (
        f"{repeats} repeats are too few for {how_many(figures, 'figure')}; "
        f"{enough} in both records are enough"
    )


def most_figures(repeats: int) -> int:
    """Return of how many figures one can be a regression, with ``repeats`` of each in both records.

    No ranks are less likely than all new repeats above all old ones, 1 in so many orders of them.
    """
    return math.floor((1 - ALARM) / 2 * math.comb(2 * repeats, repeats))


def _spread(logs: Sequence[float]) -> float:
    """Half of the interquartile range."""
    if len(logs) < 2:
        return math.inf
    low, _, high = statistics.quantiles(logs, n=4, method="inclusive")
    return (high - low) / 2


def _quickest(logs: Sequence[float]) -> float:
    """The lower quartile; of so few as four, the least."""
    return sorted(logs)[(len(logs) - 1) // 4]
