import re

import pytest

from qurl_megatron.bench.page import chart, chart_svg, write_page
from qurl_megatron.bench.record import BenchRecord, Case, Figure
from qurl_megatron.errors import ConfigError


def case(scheme: str, batch: int, speed: float, **given) -> Case:
    figure = Figure(
        name="decode",
        unit="tokens/s",
        better="higher",
        repeats=[0.98 * speed, speed, 1.02 * speed],
        limit=2 * speed,
        limit_of="bytes read",
        predicted=1.5 * speed,
    )
    keys = {"model": "7B", "scheme": scheme, "batch": batch}
    filled = {"name": f"{scheme}, batch {batch}", "keys": keys, "figures": [figure], **given}
    return Case(**filled)


CASES = [case(scheme, batch, 100.0 * batch) for batch in (1, 8) for scheme in ("bf16", "int8")]


def record(*cases: Case) -> BenchRecord:
    return BenchRecord(
        benchmark="decode",
        command="qurl bench decode --model <7B>",
        started="2026-11-22T12:00:00+00:00",
        environment={"cpu": "Some & Co", "cores": 2, "instructions": ["AVX-512"], "commit": "ab"},
        cases=list(cases),
    )


def test_schemes_are_told_apart_by_colour_and_batches_by_place():
    bars = chart(CASES)
    assert [bar.group for bar in bars] == ["batch 1", "batch 1", "batch 8", "batch 8"]
    assert [bar.series for bar in bars] == ["bf16", "int8", "bf16", "int8"]
    assert bars[0].color == bars[2].color != bars[1].color
    assert chart([case("int8", 1, 1.0, figures=[], reasons=["not run"])]) == []


def test_the_picture_takes_its_colours_from_the_page_and_tells_its_numbers():
    svg = chart_svg(chart(CASES), "decode")
    assert svg.startswith("<svg") and "var(--blue)" in svg and "batch 8 int8: 800 tokens/s" in svg


def test_one_page_holds_every_figure_limit_prediction_and_reason(tmp_path):
    absent = case(
        "fp8", 1, 1.0, figures=[], reasons=["not run"], notes={"not run": "needs a <GPU>"}
    )
    loaded = case("fp32", 8, 50.0, reasons=["another load"])
    record(*CASES, absent, loaded).write(tmp_path / "decode.json")
    page = write_page(tmp_path).read_text(encoding="utf-8")
    for text in (
        "qurl bench decode --model &lt;7B&gt;",
        "Some &amp; Co",
        "int8, batch 8",
        "±1.0\u202f%",
        "50\u202f%",
        "not run: needs a &lt;GPU&gt;",
        "another load: something else used the machine",
    ):
        assert text in page, text
    # Self-contained: it asks nobody for anything.
    assert not re.search(r'(src|href)="(?!#)|@import|url\((?!#)', page)


def test_records_of_a_folder_share_a_page_and_a_folder_without_any_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no records"):
        write_page(tmp_path)
    (tmp_path / "other.json").write_text('{"study": "not a benchmark"}')
    record(*CASES).write(tmp_path / "decode.json")
    page = write_page(tmp_path).read_text(encoding="utf-8")
    assert page.count("<section") == 1 and "study" not in page
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["decode.json", "index.html", "other.json"]
