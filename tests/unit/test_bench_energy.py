"""Joules from the folders that Linux keeps of RAPL, as a machine with two sockets has them."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from qurl_megatron.bench import energy
from qurl_megatron.bench.energy import JouleCounter, Meter, NoEnergy, nvml, rapl

RANGE_UJ = 262143328850  # of a Xeon's package


def write_zone(root: Path, zone: str, name: str, joules: float) -> Path:
    folder = root / zone
    folder.mkdir(parents=True)
    (folder / "name").write_text(name + "\n")
    (folder / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    return folder / "energy_uj"


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    """As `ls /sys/class/powercap` has it: zones and their parts side by side."""
    root = tmp_path / "powercap"
    (root / "intel-rapl").mkdir(parents=True)  # the control type: no zone
    write_zone(root, "intel-rapl:0", "package-0", 1000)
    write_zone(root, "intel-rapl:0:0", "core", 600)  # within the package
    write_zone(root, "intel-rapl:0:1", "dram", 100)  # beside it
    write_zone(root, "intel-rapl:1", "package-1", 2000)
    write_zone(root, "intel-rapl:2", "psys", 5000)  # all of the machine, packages included
    write_zone(root, "intel-rapl-mmio:0", "package-0", 1000)  # the same one once more
    return root


def test_packages_and_memory_count_once(powercap):
    found = rapl(powercap)
    assert [counter.name for counter in found] == ["package-0", "dram of package-0", "package-1"]
    assert [counter.read() for counter in found] == [1000, 100, 2000]
    assert {counter.wraps_at for counter in found} == {RANGE_UJ / 1e6}


def test_a_machine_without_the_folder_reports_no_energy(tmp_path):
    with pytest.raises(NoEnergy, match=r"powercap has no intel-rapl or amd-rapl zone"):
        rapl(tmp_path / "powercap")


def test_a_counter_that_root_alone_may_read_names_the_file_and_the_mend(powercap, monkeypatch):
    read = Path.read_text

    def refuses(file, *words, **more):  # as Linux does; the tests may run as root
        if file.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(file))
        return read(file, *words, **more)

    monkeypatch.setattr(Path, "read_text", refuses)
    with pytest.raises(NoEnergy, match="intel-rapl:0/energy_uj may be read by root alone; `chmod"):
        rapl(powercap)


def test_a_counter_that_cannot_be_read_is_no_energy_and_names_the_error(powercap, monkeypatch):
    def broken(file, *words, **more):
        raise OSError(5, "Input/output error")  # of a read, which names no file

    monkeypatch.setattr(Path, "read_text", broken)
    with pytest.raises(NoEnergy, match="powercap is unreadable: Input/output error"):
        rapl(powercap)


class Clock:
    """Seconds that the test sets, and a counter beside them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_joules_between_two_moments_are_interpolated_and_a_counter_may_begin_anew():
    clock, joules = Clock(), [900.0]
    counter = JouleCounter("package-0", lambda: joules[0], wraps_at=1000.0)
    meter = Meter([counter], clock=clock)
    # 60 W, and the counter passes 1000 J on the way: 900, 960, 20, 80.
    for second, read in enumerate((900.0, 960.0, 20.0, 80.0)):
        clock.seconds, joules[0] = float(second), read
        meter.sample()
    assert meter.between(0, 3) == pytest.approx(180)
    assert meter.between(0.5, 2) == pytest.approx(90)


def test_a_moment_that_nobody_measured_has_no_joules():
    clock = Clock()
    meter = Meter([JouleCounter("package-0", lambda: 1.0)], clock=clock)
    meter.sample()
    assert meter.between(0, 0) is None
    clock.seconds = 1.0
    meter.sample()
    assert meter.between(0, 1) == 0.0
    assert meter.between(0.5, 1.5) is None and meter.between(-1, 0.5) is None
    assert Meter([]).between(0, 1) is None


def test_a_meter_reads_while_it_is_open(powercap):
    file = powercap / "intel-rapl:0/energy_uj"
    with Meter(rapl(powercap), every_s=60.0) as meter:
        file.write_text("1500000000\n")
    start, end = meter.times[0], meter.times[-1]
    assert meter.between(start, end) == pytest.approx(500)


def test_a_counter_that_fails_meanwhile_ends_no_run_and_leaves_no_joules_across_the_gap():
    reads = iter([1.0, OSError(5, "Input/output error"), 3.0])

    def read() -> float:
        if isinstance(found := next(reads), OSError):
            raise found
        return found

    clock = Clock()
    with Meter([JouleCounter("package-0", read)], every_s=60.0, clock=clock) as meter:
        clock.seconds = 1.0
        meter.sample()
        clock.seconds = 2.0
    assert meter.between(0, 2) is None
    assert meter.failed == "package-0 failed: OSError: [Errno 5] Input/output error"


def test_a_counter_that_falls_and_never_wraps_leaves_no_joules():
    reads = iter([7.0, 2.0])
    with Meter([JouleCounter("GPU 0", lambda: next(reads))], every_s=60.0) as meter:
        pass
    assert meter.between(meter.times[0], meter.times[-1]) is None
    assert meter.failed == "GPU 0 fell from 7 to 2 J, as if its driver had been reloaded"


def fake_nvml(**changes) -> SimpleNamespace:
    class NVMLError(Exception):
        pass

    found = dict(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=lambda index: 1000 * (index + 7),  # mJ
    )
    return SimpleNamespace(**{**found, **changes})


def test_gpus_tell_joules_since_their_driver_was_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert [(c.name, c.read()) for c in nvml()] == [("GPU 0", 7.0), ("GPU 1", 8.0)]


def test_gpus_that_report_no_energy_say_so(monkeypatch):
    library = fake_nvml()

    def too_old(_):
        raise library.NVMLError("Not Supported")

    library.nvmlDeviceGetTotalEnergyConsumption = too_old
    monkeypatch.setitem(sys.modules, "pynvml", library)
    with pytest.raises(NoEnergy, match="GPU 0 reports no energy: Not Supported"):
        nvml()


def test_what_a_machine_tells_and_what_it_does_not_stand_side_by_side(powercap, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    counters, missing = energy.found(powercap)
    assert len(counters) == 3 and missing == ["no NVML: pynvml is not installed"]
    counters, missing = energy.found(powercap.parent / "nowhere")
    assert counters == [] and len(missing) == 2
