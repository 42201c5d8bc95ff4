import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import machine_limits
from qurl_megatron.bench import record, repeats
from qurl_megatron.bench.repeats import Repeats, interleaved


def test_rounds_alternate_forwards_and_backwards_and_warm_up_does_not_count():
    called = []
    found = interleaved(
        {name: lambda name=name: called.append(name) or len(called) for name in "abc"},
        repeats=2,
        warm_up=1,
        measure=lambda: 0.5,
    )
    assert "".join(called) == "cba" + "abc" + "cba"
    assert found["a"].results == [4, 9] and found["c"].results == [6, 7]
    assert found["b"].yardsticks == [0.5, 0.5] and len(found["b"].seconds) == 2


def test_a_repeat_has_its_own_seconds_and_not_the_yardsticks(monkeypatch):
    now = [0.0]  # a clock that only what is called moves
    monkeypatch.setattr(repeats, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def takes(seconds: float) -> float:
        now[0] += seconds
        return seconds

    found = interleaved({"a": lambda: takes(3.0)}, repeats=2, warm_up=1, measure=lambda: takes(5.0))
    assert found["a"].seconds == [3.0, 3.0] and found["a"].yardsticks == [5.0, 5.0]


def test_a_machine_that_others_use_is_a_reason_and_one_burst_is_not(monkeypatch):
    monkeypatch.setattr(repeats._Shortest, "seconds", 1.0)
    assert Repeats(yardsticks=[1.01, 1.1, 3.0]).reasons == []
    assert Repeats(yardsticks=[1.3, 1.4, 1.0]).reasons == ["another load"]
    # However even, they are all above what this machine has shown it can do.
    assert Repeats(yardsticks=[1.5, 1.5, 1.5]).reasons == ["another load"]
    assert Repeats().reasons == []


def test_the_yardstick_is_short_remembers_the_shortest_and_needs_no_torch():
    code = (
        "import sys; from qurl_megatron.bench import repeats, record\n"
        "seconds = repeats.yardstick(); assert 0 < repeats._Shortest.seconds == seconds < 1\n"
        "record.environment(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def git(folder, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    done = subprocess.run(["git", *own, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_commit_with_changes_is_told_from_a_clean_one(tmp_path):
    assert record.commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "a")
    head = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert record.commit(tmp_path) == head
    (tmp_path / "a").write_text("2")
    assert record.commit(tmp_path) == head + "+changes"


def test_the_limits_of_the_machine_are_above_0_however_slow_it_is(monkeypatch):
    monkeypatch.setattr(machine_limits, "SIZE", 64)
    monkeypatch.setattr(machine_limits, "READ_MIB", 1)
    found = machine_limits.measured_limits("cpu")
    assert set(found) == {"read_gb_s", "int8_gop_s", "bf16_gflop_s", "fp32_gflop_s"}
    assert min(found.values()) > 0
    monkeypatch.setattr(machine_limits, "fastest", lambda act, device: 100.0)
    found = machine_limits.measured_limits("cpu")
    assert min(found.values()) > 0
    assert found["fp32_gflop_s"] == pytest.approx(2 * 64**3 / 1e11, rel=1e-3)
