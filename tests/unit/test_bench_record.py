import json

import pytest

from benchmarks.harness import read
from qurl_megatron.bench.record import HEADS, BenchRecord, Case, Figure
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


def test_a_record_comes_back_as_it_was_written(tmp_path):
    written = record(int8(yardsticks=[0.1, 0.1, 0.2], notes={"threads": 2}))
    written.keep(tmp_path / "new")
    assert read(tmp_path / "new/decode.json") == written
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["decode.json"]


@pytest.mark.parametrize(
    "spoil, sentence",
    [
        (
            lambda r: r.update(schema="qurl-bench/0"),
            "has schema qurl-bench/0, and not qurl-bench/1",
        ),
        (lambda r: r["cases"][0]["figures"][0].pop("unit"), "cases.0.figures.0.unit Field req"),
        (lambda r: r["cases"][0]["figures"][0].update(repeats=[]), "decode has no repeats"),
        (None, "Invalid JSON"),
    ],
)
def test_a_damaged_record_is_refused_in_one_sentence(tmp_path, spoil, sentence):
    path = tmp_path / "decode.json"
    record(int8()).keep(tmp_path)
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
    lines = record(int8(), int8(figures=[speed()], reasons=["another load"]), fp8).table()
    head, first, second, reason, last = lines.splitlines()
    assert tuple(head.split()) == HEADS
    for shown in ("int8, batch 8", "decode", "100", "tokens/s", "400 DRAM bytes", "25"):
        assert shown in first
    assert "another load: something else used the machine" in reason
    assert last.startswith("fp8, batch 8") and last.endswith("not run: needs CUDA")
