"""Is this record slower than that one? Exit code 0: no, 1: yes, 3: no verdict.

Times, and rates, are first divided by the yardstick of their own repeat, which takes out what the
whole machine did at that moment. Then every new repeat is set against every old one; the median of
these ratios is the estimate (Hodges and Lehmann's), and those that the rank test of Mann and
Whitney cannot exclude are its confidence interval. It is exact, needs no shape of the noise, and
one outlier does not move it; with too few repeats it is endless, and there is no verdict.

A **regression** is at least ``SMALLEST`` worse, more than ``NOISE`` times the spread, and excludes
"no change" with confidence ``ALARM``, even when as many figures are looked at as there are
(Bonferroni's correction: twenty figures are twenty chances of a false alarm). What slows a machine
down comes in bursts, which neighbouring repeats share and the rank test takes for evidence; but it
leaves the quickest repeats alone, so a regression must show there, too. **Equal** excludes
``SMALLEST`` and more. In between nothing is claimed. Cases of one name are compared where all their
keys agree, and figures that are neither better high nor low are left out. Of times nothing is said
where the yardsticks, or the rates at which memory was read, show two different machines.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
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
guests of a host take of it what no process list and no yardstick shows."""

SECONDS = ("s", "ms", "us", "µs", "CPU s", "core s", "GPU s")

EXIT_CODES = {"equal or better": 0, "regression": 1, "no verdict": 3}


@dataclass(frozen=True)
class Compared:
    """One figure of one case: how many times as slow, or as large, the new one is."""

    case: str
    figure: str
    verdict: str  # "better", "equal", "regression", "no verdict"
    ratio: float | None = None  # above 1 is worse
    low: float | None = None  # of the confidence interval
    high: float | None = None
    why: str = ""  # no verdict


@dataclass(frozen=True)
class Comparison:
    """Of two records."""

    compared: tuple[Compared, ...]
    why: str = ""  # nothing was compared at all

    @property
    def looked_at(self) -> int:
        """Figures of which there are repeats on both sides."""
        return sum(each.ratio is not None for each in self.compared)

    @property
    def word(self) -> str:
        found = {each.verdict for each in self.compared}
        if "regression" in found:
            return "regression"
        if not self.looked_at or "no verdict" in found:
            return "no verdict"
        return "equal or better"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]

    def text(self) -> str:
        """For a terminal: a line per figure, and the verdict last."""
        width = max((len(f"{c.case}: {c.figure}") for c in self.compared), default=0)
        lines = [f"{f'{c.case}: {c.figure}':<{width}}  {_tell(c)}\n" for c in self.compared]
        count = f"{how_many(self.looked_at, 'figure')} compared"
        return "".join(lines) + f"{self.word}: {self.why or count}\n"


def _tell(found: Compared) -> str:
    if found.ratio is None:
        return f"{found.verdict}: {found.why}"
    interval = f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}] {found.verdict}"
    return f"{interval}: {found.why}" if found.why else interval


def compare(old: BenchRecord, new: BenchRecord) -> Comparison:
    """Every figure of every case; pure."""
    if old.benchmark != new.benchmark:
        return Comparison(
            (), f"one is of bench {old.benchmark}, the other of bench {new.benchmark}"
        )
    if differing := _differing(old.environment, new.environment):
        return Comparison((), f"they ran on different hardware ({', '.join(differing)})")
    before = {case.name: case for case in old.cases}
    after = {case.name: case for case in new.cases}
    looked_at = sum(
        len(_shared(before[name], case)) for name, case in after.items() if name in before
    )
    memories = _memories_differ(old.environment, new.environment)
    found: list[Compared] = []
    for name in dict.fromkeys([*before, *after]):
        if name not in after or name not in before:
            where = "the new" if name in before else "the old"
            found.append(Compared(name, "all", "no verdict", why=f"{where} record lacks it"))
        else:
            found += _cases(before[name], after[name], looked_at, memories)
    return Comparison(tuple(found))


def _differing(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [
        f"{key}: {old.get(key)} and {new.get(key)}"
        for key in HARDWARE
        if old.get(key) != new.get(key)
    ]


def _memories_differ(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Why times of one machine, measured at two moments, cannot be compared, or ""."""
    then, today = ((environment.get("limits") or {}).get(MEMORY) for environment in (old, new))
    if then is None or today is None or abs(math.log(today / then)) <= math.log(1 + READ):
        return ""
    return (
        f"the machine read {then} GB/s then and {today} now, so its host was busy once; "
        "measure both again, one after the other"
    )


def _judged(old: Case, new: Case) -> list[str]:
    """Names of all figures but those that are only reported, in either record."""
    every = [*old.figures, *new.figures]
    told = {figure.name for figure in every if figure.better is None}
    return [name for name in dict.fromkeys(figure.name for figure in every) if name not in told]


def _shared(old: Case, new: Case) -> list[str]:
    both = {figure.name for figure in old.figures} & {figure.name for figure in new.figures}
    return [name for name in _judged(old, new) if name in both]


def _settings_differ(old: Case, new: Case) -> str:
    """What was set otherwise, "tokens: 100 and 10000"; or ""."""
    names = dict.fromkeys([*old.keys, *new.keys])
    pairs = {name: (old.keys.get(name), new.keys.get(name)) for name in names}
    return ", ".join(f"{name}: {a} and {b}" for name, (a, b) in pairs.items() if a != b)


def _cases(old: Case, new: Case, looked_at: int, memories: str) -> list[Compared]:
    if not old.figures and not new.figures:  # neither could be run
        return []
    if settings := _settings_differ(old, new):
        why = f"it measured something else ({settings})"
        return [Compared(new.name, "all", "no verdict", why=why)]
    if reasons := sorted({*old.reasons, *new.reasons}):
        return [Compared(new.name, "all", "no verdict", why=", ".join(reasons))]
    shared = _shared(old, new)
    found = [
        Compared(new.name, name, "no verdict", why="one record lacks it")
        for name in _judged(old, new)
        if name not in shared
    ]
    differ = memories or _yardsticks_differ(old.yardsticks, new.yardsticks)
    for name in shared:
        one, other = old.figure(name), new.figure(name)
        if min(*one.repeats, *other.repeats) <= 0:
            found.append(_with_zeros(new.name, one, other))
            continue
        low, high = _scaled(one, old.yardsticks), _scaled(other, new.yardsticks)
        found.append(_figure(new.name, other, low, high, looked_at, differ))
    return found


def _yardsticks_differ(old: Sequence[float], new: Sequence[float]) -> str:
    """Why times beside them cannot be compared, or ""."""
    if not old or not new:
        return ""
    ratio = statistics.median(new) / statistics.median(old)
    if abs(math.log(ratio)) <= math.log(1 + YARDSTICK):
        return ""
    return f"the yardstick took {ratio:.2f} times as long: another load"


def _with_zeros(case: str, old: Figure, new: Figure) -> Compared:
    """Nothing is so many times as much as 0."""
    if not any((*old.repeats, *new.repeats)):
        return Compared(case, new.name, "equal", 1.0, 1.0, 1.0)
    return Compared(case, new.name, "no verdict", why="a repeat is 0")


def is_time(unit: str) -> bool:
    """Seconds and rates follow the speed of the machine; bytes and errors do not."""
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
    ratio, low, high = (math.exp(x) for x in shift(old, new, CONFIDENCE))
    surely = math.exp(shift(old, new, 1 - (1 - ALARM) / looked_at)[1])  # 0: too few for a verdict
    least = min(ratio, math.exp(_quickest(new) - _quickest(old)))
    noise = math.exp(NOISE * max(_spread(old), _spread(new)))
    why = differ if is_time(figure.unit) else ""
    if why:
        verdict = "no verdict"
    elif surely > 1 and least >= 1 + SMALLEST and ratio >= noise:
        verdict = "regression"
    elif high < 1 + SMALLEST:
        verdict = "better" if high < 1 else "equal"
    else:
        verdict = "no verdict"
        why = "too noisy" if surely else _too_few(min(len(old), len(new)), looked_at)
    return Compared(case, figure.name, verdict, ratio, low, high, why)


def _too_few(repeats: int, figures: int) -> str:
    enough = next(n for n in itertools.count(repeats + 1) if most_figures(n) >= figures)
    return (
        f"{repeats} repeats are too few for {how_many(figures, 'figure')}; "
        f"{enough} in both records are enough"
    )


def most_figures(repeats: int) -> int:
    """Of so many figures one can be a regression, where both records have ``repeats`` of each."""
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


def shift(
    old: Sequence[float], new: Sequence[float], confidence: float
) -> tuple[float, float, float]:
    """By how much ``new`` lies above ``old``: Hodges and Lehmann's estimate and its interval, which
    is endless where there are too few of them."""
    differences = sorted(b - a for a in old for b in new)
    tail = (1 - confidence) / 2
    # The interval leaves out as many of the smallest differences, and of the largest, as the rank
    # statistic stays below with a probability of no more than ``tail``.
    left_out = -1
    below = 0.0
    while (below := below + _probability(len(old), len(new), left_out + 1)) <= tail:
        left_out += 1
    middle = statistics.median(differences)
    if left_out < 0:
        return middle, -math.inf, math.inf
    return middle, differences[left_out], differences[-1 - left_out]


def _probability(m: int, n: int, statistic: int) -> float:
    """That Mann and Whitney's U of two like samples has this value."""
    return _ways(m, n)[statistic] / math.comb(m + n, m) if statistic <= m * n else 1.0


@cache
def _ways(m: int, n: int) -> tuple[int, ...]:
    """In how many orders of m and n values U is 0, 1, ..., m n."""
    if m == 0 or n == 0:
        return (1,)
    counts = [0] * (m * n + 1)
    # The largest value is one of the n, and stands above all m, or it is one of the m.
    for u, ways in enumerate(_ways(m, n - 1)):
        counts[u + m] += ways
    for u, ways in enumerate(_ways(m - 1, n)):
        counts[u] += ways
    return tuple(counts)
