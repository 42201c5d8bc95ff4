"""Joules, where the machine reports them: RAPL for packages and memory, NVML for GPUs.

Linux shows RAPL's counters, Intel's and AMD's alike, as folders of /sys/class/powercap. A counter
only grows, until it has reached ``max_energy_range_uj``, minutes later, and begins again at 0:
so ``Meter`` reads it every second during a run. Joules are the whole machine's, other processes
included.
"""

import bisect
import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qurl_megatron.observe.clock import now

POWERCAP = Path("/sys/class/powercap")
ZONE = re.compile(r"(?:intel|amd)-rapl:\d+(?::\d+)?")  # a package, or a part of it
EVERY_S = 1.0


class NoEnergy(Exception):
    """Why there are no joules, for the record's reader."""


@dataclass(frozen=True)
class JouleCounter:
    name: str
    read: Callable[[], float]  # joules, from some moment on
    wraps_at: float = math.inf  # joules after which it begins again at 0


def found(root: Path = POWERCAP) -> tuple[list[JouleCounter], list[str]]:
    """All counters of this machine, and why others are missing."""
    counters: list[JouleCounter] = []
    missing: list[str] = []
    for source in (partial(rapl, root), nvml):
        try:
            counters += source()
        except NoEnergy as why:
            missing.append(str(why))
    return counters, missing


def rapl(root: Path = POWERCAP) -> list[JouleCounter]:
    """Of each package, and of its memory.

    Raises:
        NoEnergy: there are none, or they may not be read.
    """
    zones = sorted(path for path in root.glob("*") if ZONE.fullmatch(path.name))
    try:
        names = {zone.name: (zone / "name").read_text().strip() for zone in zones}
        counters = [
            JouleCounter(
                name if zone.name.count(":") == 1 else f"{name} of {names[_package(zone)]}",
                partial(_joules, zone / "energy_uj"),
                _joules(zone / "max_energy_range_uj"),
            )
            for zone in zones
            # Cores lie within the package, which lies within psys; memory beside it.
            if (name := names[zone.name]).startswith("package") or name == "dram"
        ]
        for counter in counters:
            counter.read()
    except PermissionError as error:  # since 2020, because the counters leak keys
        raise NoEnergy(
            f"{error.filename} may be read by root alone; `chmod a+r` it, or measure as root"
        ) from None
    except OSError as error:  # a failed read names no file
        raise NoEnergy(f"{error.filename or root} is unreadable: {error.strerror}") from None
    if not counters:
        raise NoEnergy(f"{root} has no intel-rapl or amd-rapl zone")
    return counters


def _package(zone: Path) -> str:
    return zone.name.rpartition(":")[0]


def _joules(file: Path) -> float:
    return int(file.read_text()) / 1e6


def nvml() -> list[JouleCounter]:
    """Of each GPU, since its driver was loaded.

    Raises:
        NoEnergy: there are no GPUs, or none of Volta's age or newer.
    """
    try:
        import pynvml
    except ImportError:
        raise NoEnergy("no NVML: pynvml is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoEnergy(f"no NVML: {error}") from None
    counters = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        read = partial(_millijoules, pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        try:
            read()
        except pynvml.NVMLError as error:
            raise NoEnergy(f"GPU {index} reports no energy: {error}") from None
        counters.append(JouleCounter(f"GPU {index}", read))
    return counters


def _millijoules(tell: Callable[[object], int], handle: object) -> float:
    return tell(handle) / 1e3


class Meter:
    """Joules by time, read by a thread of its own while the meter is open.

    A counter that fails ends the joules and not the run that they are read beside: ``failed`` says
    why, and there are none ``between`` any two moments.
    """

    def __init__(
        self,
        counters: Sequence[JouleCounter],
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = now,
    ) -> None:
        self._counters, self._every_s, self._clock = counters, every_s, clock
        self._last: dict[str, float] = {}
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="joules", daemon=True)
        self.times: list[float] = []  # unix seconds
        self.joules: list[float] = []  # since the first of them
        self.failed = ""  # which counter, and why

    def __enter__(self) -> "Meter":
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()
        self.sample()

    def _go_on(self) -> None:
        while not self._enough.wait(self._every_s):
            self.sample()

    def sample(self) -> None:
        if self.failed:
            return
        total = self.joules[-1] if self.joules else 0.0
        for counter in self._counters:
            try:
                value = counter.read()
            except Exception as error:  # drivers have errors of their own; the run must continue
                why = f"{type(error).__name__}: {error}".removesuffix(": ")
                self.failed = f"{counter.name} failed: {why}"
                return
            before = self._last.get(counter.name, value)
            if value < before and math.isinf(counter.wraps_at):
                fell = f"{counter.name} fell from {before:g} to {value:g} J"
                self.failed = f"{fell}, as if its driver had been reloaded"
                return
            total += value - before + (counter.wraps_at if value < before else 0.0)
            self._last[counter.name] = value
        self.times.append(self._clock())
        self.joules.append(total)

    def between(self, start: float, end: float) -> float | None:
        """Joules from one moment to another, in unix seconds; None where nobody measured, or
        where a counter failed."""
        told = len(self.times) > 1 and len(self._counters) > 0 and not self.failed
        if not (told and self.times[0] <= start <= end <= self.times[-1]):
            return None
        return self._at(end) - self._at(start)

    def _at(self, moment: float) -> float:
        right = max(1, bisect.bisect_left(self.times, moment))
        left = right - 1
        span = self.times[right] - self.times[left]
        part = (moment - self.times[left]) / span if span else 1.0
        return self.joules[left] + part * (self.joules[right] - self.joules[left])
