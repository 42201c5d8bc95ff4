"""Is this record slower than that one? Exit code 0: no, 1: yes, 2: they are no records, 3: unknown.

    python -m benchmarks.against OLD.json NEW.json

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

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import iqr, mannwhitneyu

from benchmarks.harness import read
from qurl_megatron.bench.record import BenchRecord, Case, Figure
from qurl_megatron.kit.errors import ConfigError

SMALLEST = 0.05
"""A change that matters."""
CONFIDENCE = 0.95
ALARM = 0.99
"""Confidence that a regression takes, of all figures together: who is alarmed stops working."""
NOISE = 3
"""So many times the spread of the repeats a regression must be."""
YARDSTICK = 0.10
"""By so much the yardsticks of two cases may differ; beyond, they saw two different machines."""
READ = 0.15
"""By so much the rates may differ at which two records saw the machine read its memory. Other
guests of a host use it, too, which no process list and no yardstick shows."""

HARDWARE = ("cpu", "cores", "instructions", "gpus")
"""Facts of the machine that two records must share."""
SECONDS = ("s", "ms", "us", "µs", "CPU s", "core s", "GPU s")
EXIT_CODES = {"equal or better": 0, "regression": 1, "no verdict": 3}


@dataclass(frozen=True)
class Compared:
    """One figure of one case: how many times as slow, or as large, the new one is."""

    name: str
    verdict: str  # "better", "equal", "regression", "no verdict"
    ratio: float | None = None  # above 1 is worse
    why: str = ""  # no verdict

    def line(self) -> str:
        ratio = "" if self.ratio is None else f"{self.ratio:.3f} "
        return f"{self.name}  {ratio}{self.verdict}" + (f": {self.why}" if self.why else "")


def compare(old: BenchRecord, new: BenchRecord) -> list[Compared]:
    """Compare every figure of every case that both records have."""
    if old.benchmark != new.benchmark:
        return [Compared("all", "no verdict", why=f"{old.benchmark} and {new.benchmark}")]
    if differing := _different(old.environment, new.environment, HARDWARE):
        return [Compared("all", "no verdict", why=f"different hardware ({differing})")]
    before = {case.name: case for case in old.cases}
    pairs = []
    compared = []
    for case in new.cases:
        other = before.pop(case.name, None)
        if other is None:
            compared.append(Compared(case.name, "no verdict", why="the old record lacks it"))
        elif why := _no_pair(other, case):
            compared.append(Compared(case.name, "no verdict", why=why))
        else:
            pairs += [(case.name, other, case, name) for name in _shared(other, case)]
    for name in before:
        compared.append(Compared(name, "no verdict", why="the new record lacks it"))
    memories = _memories_differ(old.environment, new.environment)
    for case_name, other, case, name in pairs:
        differ = memories or _yardsticks_differ(other.yardsticks, case.yardsticks)
        compared.append(_figure(f"{case_name}: {name}", other, case, name, len(pairs), differ))
    return compared


def verdict_of(compared: Sequence[Compared]) -> str:
    """Return the one word for all figures, a key of ``EXIT_CODES``."""
    verdicts = {each.verdict for each in compared}
    if "regression" in verdicts:
        return "regression"
    return "no verdict" if not verdicts or "no verdict" in verdicts else "equal or better"


def _different(old: Any, new: Any, names: Sequence[str]) -> str:
    """Return the differences, as "tokens: 100 and 10000"; or ""."""
    pairs = [(name, old.get(name), new.get(name)) for name in names]
    return ", ".join(f"{name}: {a} and {b}" for name, a, b in pairs if a != b)


def _no_pair(old: Case, new: Case) -> str:
    """Return why two cases of one name cannot be compared, or ""."""
    if settings := _different(old.keys, new.keys, list({**old.keys, **new.keys})):
        return f"it measured something else ({settings})"
    return ", ".join(sorted({*old.reasons, *new.reasons}))


def _shared(old: Case, new: Case) -> list[str]:
    """Return the names of the figures that both have and neither only reports."""
    figures = [*old.figures, *new.figures]
    reported = {figure.name for figure in figures if figure.better is None}
    both = {figure.name for figure in old.figures} & {figure.name for figure in new.figures}
    return [figure.name for figure in new.figures if figure.name in both - reported]


def _memories_differ(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return why times of one machine, measured at two moments, cannot be compared, or ""."""
    then, today = ((each.get("limits") or {}).get("read_gb_s") for each in (old, new))
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


def is_time(unit: str) -> bool:
    """Return whether figures of this unit follow the machine's speed: seconds and rates do."""
    return unit in SECONDS or unit.endswith("/s")


def _scaled(figure: Figure, yardsticks: Sequence[float]) -> list[float]:
    """Return the logarithms of repeats above 0, larger ones worse, relative to the yardsticks."""
    worse = 1 if figure.better == "lower" else -1
    logs = [worse * math.log(value) for value in figure.repeats]
    if is_time(figure.unit) and len(yardsticks) == len(logs):
        logs = [log - math.log(y) for log, y in zip(logs, yardsticks, strict=True)]
    return logs


def _figure(
    name: str, old_case: Case, new_case: Case, figure: str, count: int, differ: str
) -> Compared:
    """Judge one of ``count`` figures; ``differ``: why times cannot be compared."""
    before, after = old_case.figure(figure), new_case.figure(figure)
    repeats = [*before.repeats, *after.repeats]
    if not any(repeats):
        return Compared(name, "equal", 1.0)
    if min(repeats) <= 0:  # nothing is so many times as much as 0
        return Compared(name, "no verdict", why="a repeat is 0")
    old, new = _scaled(before, old_case.yardsticks), _scaled(after, new_case.yardsticks)
    difference = statistics.median(b - a for a in old for b in new)
    ratio = math.exp(difference)
    if differ and is_time(after.unit):
        return Compared(name, "no verdict", ratio, differ)

    def chance(alternative: str, shift: float = 0.0) -> float:
        """Return the chance of ranks as far to one side if speeds differ by ``shift`` alone."""
        shifted = [log - shift for log in new]
        return mannwhitneyu(shifted, old, alternative=alternative, method="exact").pvalue

    smallest, doubt = math.log(1 + SMALLEST), (1 - CONFIDENCE) / 2
    noise = NOISE * max(iqr(old), iqr(new)) / 2
    large = min(difference, _quickest(new) - _quickest(old)) >= smallest and difference >= noise
    if large and chance("greater") <= (1 - ALARM) / 2 / count:
        return Compared(name, "regression", ratio)
    if chance("less", smallest) <= doubt:
        return Compared(name, "better" if chance("less") <= doubt else "equal", ratio)
    fewest = min(len(old), len(new))
    if most_figures(fewest) < count:
        why = f"{fewest} repeats are too few for {count} figures"
        return Compared(name, "no verdict", ratio, why)
    return Compared(name, "no verdict", ratio, "too noisy")


def most_figures(repeats: int) -> int:
    """Return of how many figures one can be a regression, with ``repeats`` of each in both records.

    No ranks are less likely than all new repeats above all old ones, 1 in so many orders of them.
    """
    return math.floor((1 - ALARM) / 2 * math.comb(2 * repeats, repeats))


def _quickest(logs: Sequence[float]) -> float:
    """Return the lower quartile; of four or fewer, the least."""
    return sorted(logs)[(len(logs) - 1) // 4]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.against", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args(words)
    try:
        compared = compare(read(options.old), read(options.new))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for each in compared:
        print(each.line())
    verdict = verdict_of(compared)
    print(verdict)
    return EXIT_CODES[verdict]


if __name__ == "__main__":
    sys.exit(main())
