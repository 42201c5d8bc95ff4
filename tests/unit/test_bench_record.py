import json

import pytest

from qurl_megatron.bench.record import HEADS, BenchRecord, Case, Figure, read
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
    path = tmp_path / "new" / "decode.json"
    written = record(int8(yardsticks=[0.1, 0.1, 0.2], notes={"threads": 2}))
    written.write(path)
    assert read(path) == written
    assert [file.name for file in path.parent.iterdir()] == ["decode.json"]


@pytest.mark.parametrize(
    "spoil, sentence",
    [
        (lambda r: r.update(schema="qurl-bench/0"), "has schema 'qurl-bench/0', this version"),
        (lambda r: r.pop("schema"), "has schema None"),
        (lambda r: r.pop("cases"), "cases: Field required"),
        (lambda r: r["cases"][0].pop("keys"), "cases.0.keys: Field required"),
        (lambda r: r["cases"][0]["figures"][0].pop("unit"), "cases.0.figures.0.unit: Field req"),
        (lambda r: r["cases"][0]["figures"][0].update(repeats=[]), "decode has no repeats"),
        (lambda r: r["cases"][0]["figures"][0].update(repeats=["fast"]), "figures.0.repeats.0"),
    ],
)
def test_a_damaged_record_is_refused_in_one_sentence_that_names_the_key(tmp_path, spoil, sentence):
    path = tmp_path / "decode.json"
    record(int8()).write(path)
    damaged = json.loads(path.read_text())
    spoil(damaged)
    path.write_text(json.dumps(damaged))
    with pytest.raises(ConfigError) as refused:
        read(path)
    assert sentence in str(refused.value) and str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text, why", [(None, "does not exist"), ("{half", "is not JSON")])
def test_a_record_that_is_none_is_refused(tmp_path, text, why):
    path = tmp_path / "decode.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read(path)


def test_the_table_shows_every_figure_and_why_a_case_cannot_be_compared():
    fp8 = Case(name="fp8, batch 8", keys={}, reasons=["not run"], notes={"not run": "needs CUDA"})
    lines = record(int8(), int8(figures=[speed()], reasons=["another load"]), fp8).table()
    head, first, second, reason, last = lines.splitlines()
    assert tuple(head.split()) == HEADS
    for shown in ("int8, batch 8", "decode", "100", "tokens/s", "400 DRAM bytes", "25"):
        assert shown in first
    assert "another load: something else used the machine" in reason
    assert last.startswith("fp8, batch 8") and last.endswith("not run: needs CUDA")
