"""Results of a benchmark: figures by case.

A **figure** is one measured quantity, all its repeats kept, some beside the limit of the machine. A
**case** is one setting (a scheme, a layout) with its figures. A **record** is one run of one
benchmark on one machine, and the JSON file that it leaves. Repeat i of every case was measured in
the same round.
"""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

from qurl_megatron.kit.clock import now
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.observe.text import NARROW_SPACE, aligned, number

SCHEMA = "qurl-bench/1"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    unit: str
    better: Literal["higher", "lower"] | None  # None: only reported, never compared
    repeats: list[float]
    limit: float | None = None  # of the machine, in the same unit
    limit_of: str = ""  # its source: "DRAM bytes", "INT8 products", ...

    def __post_init__(self) -> None:
        if not self.repeats:
            raise ValueError(f"{self.name} has no repeats")

    @property
    def median(self) -> float:
        return statistics.median(self.repeats)

    @property
    def spread(self) -> float:
        """Half of the interquartile range over the median; 0 of a single repeat."""
        if len(self.repeats) < 2 or not self.median:
            return 0.0
        low, _, high = statistics.quantiles(self.repeats, n=4, method="inclusive")
        return (high - low) / 2 / abs(self.median)

    @property
    def share(self) -> float | None:
        """Share of the limit that was reached: 1 is as fast, or as small, as the machine allows."""
        if not self.limit or not self.median or not self.better:
            return None
        return self.median / self.limit if self.better == "higher" else self.limit / self.median


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    keys: Mapping[str, str | int | float | bool | None]  # all that was set
    figures: list[Figure] = field(default_factory=list)
    yardsticks: list[float] = field(default_factory=list)  # seconds of benchmarks/repeats.py
    reasons: list[str] = field(default_factory=list)  # not to compare it; empty: it is valid
    notes: dict[str, Any] = field(default_factory=dict)

    def why(self, reason: str) -> str:
        """Return a reason with its case's note."""
        if reason in self.notes:
            return f"{reason}: {self.notes[reason]}"
        return reason

    def figure(self, name: str) -> Figure:
        return next(figure for figure in self.figures if figure.name == name)


@dataclass(frozen=True, kw_only=True)
class BenchRecord:
    benchmark: str
    command: str
    started: str  # UTC, ISO 8601
    environment: dict[str, Any]
    cases: list[Case]
    schema: str = SCHEMA

    def keep(self, folder: Path | None) -> None:
        """Print the table, and write BENCHMARK.json to ``folder``, if there is one; raise
        ``ConfigError`` if it cannot be written."""
        print(self.table(), end="")
        if folder is None:
            return
        path = folder / f"{self.benchmark}.json"
        with refusing(path, key="--out"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(asdict(self), indent=1) + "\n")
        print(path)

    def table(self) -> str:
        """Return a line per figure, and below them why cases cannot be compared."""
        rows: list[tuple[str, ...]] = [HEADS]
        reasons = []
        for case in self.cases:
            name = case.name
            for figure in case.figures:
                rows.append((name, *cells(figure)))
                name = ""
            reasons += [f"{case.name}: {case.why(reason)}" for reason in case.reasons]
        return "\n".join([*aligned(rows, words=WORDS), *reasons]) + "\n"


def recorded(
    benchmark: str,
    program: str,
    measure: Callable[[], list[Case]],
    facts: Callable[[], dict[str, Any]] = dict,
) -> BenchRecord:
    """Return the record of the cases that ``measure`` returns, run by ``program`` with its options;
    ``facts`` adds facts of the machine afterwards."""
    start = datetime.fromtimestamp(now(), UTC).isoformat(timespec="seconds")
    before = environment()
    cases = measure()
    command = f"{program} {shlex.join(sys.argv[1:])}"
    machine = {**before, "load_after": load(), **facts()}
    return BenchRecord(
        benchmark=benchmark, command=command, started=start, environment=machine, cases=cases
    )


def in_turns(
    candidates: Mapping[str, Callable[[], T]],
    *,
    repeats: int,
    warm_up: int,
    seen: Callable[[str, T], object],
) -> dict[str, list[T]]:
    """Return the results of all candidates, called in rounds.

    A machine warms up, and others use it. Each round has the opposite order of the last (A B, B A,
    ...), which gives a slow drift to all alike.

    Args:
        warm_up: rounds before those that count.
        seen: called with the name and result of each call that counts, e.g. to show progress.
    """
    results: dict[str, list[T]] = {name: [] for name in candidates}
    names = list(candidates)
    for place in range(-warm_up, repeats):
        for name in names if place % 2 == 0 else reversed(names):
            result = candidates[name]()
            if place >= 0:
                results[name].append(result)
                seen(name, result)
    return results


def progress(line: str) -> None:
    """Print to standard error: benchmarks take minutes, and standard output is for the table."""
    print(line, file=sys.stderr, flush=True)


HEADS = ("case", "figure", "median", "unit", "spread", "limit", "share")
WORDS = ("case", "figure", "unit")


def cells(figure: Figure) -> tuple[str, ...]:
    """Return a figure's cells of a table, by ``HEADS`` after the first."""
    spread = limit = share = ""
    if len(figure.repeats) > 1:
        spread = f"±{percent(figure.spread)}"
    if figure.limit is not None:
        limit = f"{number(figure.limit)} {figure.limit_of}".strip()
    if figure.share is not None:
        share = percent(figure.share)
    return figure.name, number(figure.median), figure.unit, spread, limit, share


def percent(share: float) -> str:
    """0.123 -> "12 %", 0.0123 -> "1.2 %"."""
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f}{NARROW_SPACE}%"


INSTRUCTIONS = {  # a flag of /proc/cpuinfo, and its name
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_int8": "AMX INT8",
    "amx_bf16": "AMX BF16",
    "sha_ni": "SHA",
}
PACKAGES = ("torch", "megatron-core", "sglang", "vllm", "transformers", "numpy")


def environment() -> dict[str, Any]:
    first_core = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first_core.splitlines())
    cpuinfo = {key.strip(): value.strip() for key, _, value in pairs}
    flags = cpuinfo.get("flags", "").split()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpuinfo.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "memory_gib": round(memory, 1),
        "instructions": [name for flag, name in INSTRUCTIONS.items() if flag in flags],
        "gpus": gpus(),
        "python": platform.python_version(),
        "versions": {d.name: d.version for d in metadata.distributions() if d.name in PACKAGES},
        "commit": commit(Path(__file__).parent),
        "load_before": load(),
    }


def load() -> float:
    return round(os.getloadavg()[0], 2)


def commit(folder: Path) -> str | None:
    """Return the repository's commit, "+changes" if tracked files differ; None outside of one."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git, or installed by pip
        return None


def gpus() -> list[dict[str, Any]]:
    """Return name and memory of each GPU, as nvidia-smi reports them."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return []
    devices = []
    for line in done.stdout.splitlines():
        name, _, mebibytes = line.rpartition(", ")
        # "[N/A]" of a GPU that shares its memory with the CPU.
        gib = round(int(mebibytes) / 1024, 1) if mebibytes.isdigit() else None
        devices.append({"name": name, "memory_gib": gib})
    return devices
