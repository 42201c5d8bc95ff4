from pathlib import Path

from qurl_megatron.bench.performance import PAGE, RESULTS, rendered
from qurl_megatron.bench.record import Case, Figure, Record


def test_the_page_of_results_is_made_of_the_records():
    """``python -m qurl_megatron.bench.performance`` writes it anew."""
    assert PAGE.read_text(encoding="utf-8") == rendered()


def test_every_record_in_the_results_stands_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert len(list(RESULTS.glob("*_cpu.json"))) >= 7
    for path in RESULTS.glob("*_cpu.json"):
        if path.name != "study_cpu.json":  # has a page of its own
            assert f"(results/{path.name})" in page


def test_sections_of_one_benchmark_have_headings_of_their_own(tmp_path: Path):
    figure = Figure(name="seconds", unit="s", better="lower", repeats=[1.0])
    for name in ("loss", "loss_tp"):
        Record(
            benchmark="loss",
            command="qurl bench loss",
            started="2026-11-22T12:00:00+00:00",
            environment={"cpu": "some", "cores": 2},
            cases=[Case(name="ours", keys={}, figures=[figure])],
        ).write(tmp_path / f"{name}.json")
    for page in (rendered(tmp_path), rendered()):
        headings = [line for line in page.splitlines() if line.startswith("## ")]
        assert len(headings) == len(set(headings)) > 1


def test_a_cell_has_median_spread_share_and_prediction_and_a_star_where_it_cannot_be_compared(
    tmp_path: Path,
):
    figure = Figure(
        name="decode",
        unit="tokens/s",
        better="higher",
        repeats=[90.0, 100.0, 110.0],
        limit=400.0,
        limit_of="bytes read",
        predicted=150.0,
    )
    alone = Figure(name="decode", unit="tokens/s", better="higher", repeats=[3.0])
    Record(
        benchmark="decode",
        command="qurl bench decode",
        started="2026-11-22T12:00:00+00:00",
        environment={"cpu": "some", "cores": 2},
        cases=[
            Case(name="int8", keys={"model": "7B"}, figures=[figure]),
            Case(name="fp8", keys={"model": "7B"}, figures=[alone], reasons=["another load"]),
            Case(name="fp4", keys={}, reasons=["not run"], notes={"not run": "needs a GPU"}),
        ],
    ).write(tmp_path / "decode.json")
    (tmp_path / "study_cpu.json").write_text('{"study": "not a benchmark"}')
    page = rendered(tmp_path)
    narrow = "\u202f"
    assert f"| int8 | 100 ±5.0{narrow}% (25{narrow}%) → 150 |" in page
    assert "| fp8 * | 3 |" in page
    assert "- Limit of decode: bytes read." in page
    assert "- Not run: needs a GPU (fp4)." in page and "(fp8)." in page
    assert "study" not in page
