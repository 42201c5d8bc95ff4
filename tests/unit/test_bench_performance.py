"""docs/performance.md, whose every table is that of a record in docs/results."""

from benchmarks.performance import PAGE, RESULTS, rendered


def test_the_page_of_results_is_made_of_the_records():
    """``python -m benchmarks.performance`` writes it anew."""
    assert PAGE.read_text(encoding="utf-8") == rendered()


def test_every_record_in_the_results_stands_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert len(list(RESULTS.glob("*_cpu.json"))) >= 7
    for path in RESULTS.glob("*_cpu.json"):
        if path.name != "study_cpu.json":  # has a page of its own
            assert f"(results/{path.name})" in page
