import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import repeats
from benchmarks.harness import read
from benchmarks.repeats import interleaved
from qurl_megatron import cli
from qurl_megatron.bench import step
from qurl_megatron.bench.record import HEADS, BenchRecord, Case, Figure, gpus, in_turns
from qurl_megatron.kit.errors import ConfigError


def speed(**given) -> Figure:
    kind = {"name": "decode", "unit": "tokens/s", "better": "higher"}
    return Figure(**{**kind, "repeats": [90.0, 100.0, 104.0], **given})


def record(*cases: Case) -> BenchRecord:
    return BenchRecord(
        benchmark="decode",
        command="qurl bench decode",
        started="2026-11-22T12:00:00+00:00",
        environment={"cpu": "some"},
        cases=list(cases),
    )


def int8(**given) -> Case:
    filled = {"figures": [speed(limit=400.0, limit_of="DRAM bytes")], **given}
    return Case(name="int8, batch 8", keys={"scheme": "int8", "batch": 8}, **filled)


def test_a_figure_tells_median_spread_and_its_share_of_the_limit():
    figure = speed(limit=400.0)
    assert (figure.median, figure.share) == (100.0, 0.25)
    assert figure.spread == pytest.approx((102 - 95) / 2 / 100)
    assert speed(better="lower", limit=50.0).share == 0.5
    assert speed().share is None and speed(repeats=[3.0]).spread == 0


@pytest.mark.parametrize(
    "spoil, sentence",
    [
        (lambda r: r.update(schema="qurl-bench/0"), "has schema qurl-bench/0, and not qurl-b"),
        (lambda r: r["cases"][0]["figures"][0].pop("unit"), "cases.0.figures.0.unit Field req"),
        (lambda r: r["cases"][0]["figures"][0].update(repeats=[]), "decode has no repeats"),
        (None, "Invalid JSON"),
    ],
)
def test_a_damaged_record_is_refused_in_one_sentence(tmp_path, spoil, sentence):
    path, whole = tmp_path / "decode.json", record(int8(yardsticks=[0.1], notes={"threads": 2}))
    whole.keep(tmp_path)
    assert read(path) == whole
    damaged = json.loads(path.read_text())
    if spoil:
        spoil(damaged)
    path.write_text(json.dumps(damaged) if spoil else "{half")
    with pytest.raises(ConfigError) as refused:
        read(path)
    assert sentence in str(refused.value) and str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_table_shows_every_figure_and_why_a_case_cannot_be_compared():
    fp8 = Case(name="fp8, batch 8", keys={}, reasons=["not run"], notes={"not run": "needs CUDA"})
    lines = record(int8(), int8(figures=[speed()], reasons=["failed"]), fp8).table()
    head, first, second, reason, last = lines.splitlines()
    assert tuple(head.split()) == HEADS
    for shown in ("int8, batch 8", "decode", "100", "tokens/s", "400 DRAM bytes", "25"):
        assert shown in first
    assert reason.endswith(": failed")
    assert last.startswith("fp8, batch 8") and last.endswith("not run: needs CUDA")


def test_rounds_alternate_forwards_and_backwards_and_warm_up_does_not_count():
    called, seen = [], []
    found = in_turns(
        {name: lambda name=name: called.append(name) or len(called) for name in "abc"},
        repeats=2,
        warm_up=1,
        seen=lambda name, number: seen.append(number),
    )
    assert "".join(called) == "cba" + "abc" + "cba" and seen == [4, 5, 6, 7, 8, 9]
    assert found == {"a": [4, 9], "b": [5, 8], "c": [6, 7]}


def test_a_repeat_has_its_own_seconds_and_not_the_yardsticks(monkeypatch):
    now = [0.0]  # a clock that only what is called moves
    monkeypatch.setattr(repeats, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def takes(seconds: float) -> float:
        now[0] += seconds
        return seconds

    found = interleaved({"a": lambda: takes(3.0)}, repeats=2, measure=lambda: takes(5.0))["a"]
    assert found.seconds == found.results == [3.0, 3.0] and found.yardsticks == [5.0, 5.0]


def test_an_environment_needs_no_torch():
    """A parent that measures its children's memory stays small."""
    code = "import sys; from qurl_megatron.bench import record; record.environment()"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_gpu_may_have_no_memory_of_its_own(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'NVIDIA H100, 81559\\nNVIDIA GB10, [N/A]\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert [gpu["memory_gib"] for gpu in gpus()] == [79.6, None]


def test_a_benchmark_leaves_its_record_and_shows_its_table(tmp_path, capsys, monkeypatch):
    cases = [Case(name="ahead", keys={"steps": 4}, figures=[speed()])]
    monkeypatch.setattr(step, "run", lambda options: cases)
    assert cli.main(["bench", "step", "--out", str(tmp_path / "new")]) == 0
    left = read(tmp_path / "new/step.json")
    assert left.cases == cases and left.benchmark == "step"
    out = capsys.readouterr().out
    assert "ahead" in out and out.endswith(f"{tmp_path}/new/step.json\n")
    assert cli.main(["bench", "step", "--out", str(tmp_path / "new/step.json/below")]) == 2
    shown = capsys.readouterr()
    assert "ahead" in shown.out and "--out" in shown.err  # the table is not lost


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("rollout --schemes int8 int3", "--schemes cannot be 'int3'; did you mean int8?"),
        ("rollout --engine vllm", "--engine cannot be 'vllm'; there are embedded, sglang"),
        ("rollout --repeats 0", "--repeats: must be a whole number, 1 or more"),
        ("rollout --model 8B", "--model 8B is neither a folder with a config.json nor a"),
        ("rollout --tensor 2", "--tensor 2 is not for --engine embedded"),
        ("rollout --model tiny --mean 300", "--mean 300 must be from 1 to --max 256"),
        ("step --steps 2", "--steps 2: the first 2 do not count; give more"),
        ("step --case parallel.data=3", "must be a multiple of"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_runs(words, sentence, capsys):
    try:
        code = cli.main(["bench", *words.split()])
    except SystemExit as left:
        code = left.code
    error = capsys.readouterr().err
    assert code == 2 and sentence in error and len(error.splitlines()) == 1
