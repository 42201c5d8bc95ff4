import subprocess
import sys
from types import SimpleNamespace

import pytest

from qurl_megatron.bench import environment, machine_limits, repeats
from qurl_megatron.bench.repeats import interleaved


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
    assert repeats.load_reasons([1.01, 1.1, 3.0]) == []
    assert repeats.load_reasons([1.3, 1.4, 1.0]) == ["another load"]
    # However even, they are all above what this machine has shown it can do.
    assert repeats.load_reasons([1.5, 1.5, 1.5]) == ["another load"]
    assert repeats.load_reasons([]) == []


def test_the_yardstick_is_short_and_remembers_the_shortest():
    seconds = repeats.yardstick()
    assert 0 < repeats._Shortest.seconds <= seconds


def test_the_yardstick_needs_no_torch():
    code = (
        "import sys; from qurl_megatron.bench import repeats, environment; repeats.yardstick();"
        "environment.environment(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_instructions_are_told_by_the_names_that_people_know():
    found = environment.instructions("fpu avx512f avx512_vnni amx_int8 sha_ni avx512_vnni2")
    assert found == ["AVX-512", "AVX-512 VNNI", "AMX INT8", "SHA"]


def git(folder, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    done = subprocess.run(["git", *own, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_commit_with_changes_is_told_from_a_clean_one(tmp_path):
    assert environment.commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "a")
    head = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert environment.commit(tmp_path) == head
    (tmp_path / "a").write_text("2")
    assert environment.commit(tmp_path) == head + "+changes"


def test_limits_are_measured_once_per_process(monkeypatch):
    monkeypatch.setattr(machine_limits, "SIZE", 64)
    monkeypatch.setattr(machine_limits, "READ_MIB", 4)
    machine_limits.limits.cache_clear()
    found = machine_limits.limits()
    assert set(found) == {"read_gb_s", "int8_gop_s", "bf16_gflop_s", "fp32_gflop_s"}
    assert all(value > 0 for value in found.values())
    assert machine_limits.limits() is found
    machine_limits.limits.cache_clear()


def test_the_environment_names_what_times_depend_on():
    found = environment.environment()
    assert set(environment.HARDWARE) <= set(found)
    assert pytest.importorskip("torch").__version__.startswith(found["versions"]["torch"])
