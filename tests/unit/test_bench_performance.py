import re
from pathlib import Path

from benchmarks.performance import PAGE, RESULTS, rendered
from qurl_megatron.bench.record import BenchRecord, Case, Figure


def test_the_page_of_results_is_made_of_the_records():
    """``python -m benchmarks.performance`` writes it anew."""
    assert PAGE.read_text(encoding="utf-8") == rendered()


def test_every_record_in_the_results_stands_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert len(list(RESULTS.glob("*_cpu.json"))) >= 7
    for path in RESULTS.glob("*_cpu.json"):
        if path.name != "study_cpu.json":  # has a page of its own
            assert f"(results/{path.name})" in page


def kept(folder: Path, name: str, benchmark: str, *cases: Case) -> None:
    BenchRecord(
        benchmark=benchmark,
        command=f"qurl bench {benchmark}",
        started="2026-11-22T12:00:00+00:00",
        environment={"cpu": "some", "cores": 2},
        cases=list(cases),
    ).keep(folder)
    (folder / f"{benchmark}.json").rename(folder / f"{name}.json")


SPEED = Figure(name="tokens/s", unit="1/s", better="higher", repeats=[1.0])


def test_engines_stand_first_and_what_is_measured_no_more_behind(tmp_path: Path):
    for name in ("convert", "decode", "loss", "publish", "rollout", "step"):
        kept(tmp_path, f"{name}_cpu", name, Case(name="ours", keys={}, figures=[SPEED]))
    found = re.findall(r"results/(\w+)_cpu.json", rendered(tmp_path))
    assert found == ["rollout", "step", "publish", "loss", "decode", "convert"]


def test_loads_of_engines_are_told_apart_by_what_was_set(tmp_path: Path):
    load = {"model": "h1024", "samples": 4, "clients": "closed", "publish": None}
    for name, own in (
        ("rollout_8_cpu", {"prompts": 2}),
        ("rollout_publish_cpu", {"prompts": 8, "publish": "half"}),
        ("rollout_rate_cpu", {"prompts": 1, "samples": 1, "clients": "poisson:4"}),
        ("rollout_now_cpu", {"prompts": 3, "publish": 2}),
    ):
        keys = {**load, **own}
        kept(tmp_path, name, "rollout", Case(name="embedded int8", keys=keys, figures=[SPEED]))
    page = rendered(tmp_path)
    assert "grouped responses: rollout_8_cpu\n" in page
    assert "Shape h1024, 8 responses to 2 prompts, all at once:" in page
    assert "Shape h1024, 32 responses to 8 prompts, all at once, new weights at half:" in page
    assert "Shape h1024, 1 response to 1 prompt, poisson:4:" in page
    assert "Shape h1024, 12 responses to 3 prompts, all at once, new weights 2 times:" in page


def test_what_an_engine_calls_itself_stands_under_its_table(tmp_path: Path):
    def engine(name: str, kind: str, **identity: str) -> Case:
        return Case(name=name, keys={"engine": kind}, figures=[SPEED], notes={"identity": identity})

    kept(
        tmp_path,
        "rollout_cpu",
        "rollout",
        engine("embedded int8", "embedded", engine="qurl-embedded", version="0.1.0"),
        engine("sglang int8", "sglang", version="0.5.23", dtype="bfloat16"),
        engine("http://h:1 int8", "http://h:1", engine="vllm", version="0.32.0", model="m"),
        engine("http://h:2 int8", "http://h:2", version="0.32.0", model="m"),  # an older record
    )
    assert (
        "- Engines: qurl-embedded 0.1.0 (embedded int8); sglang 0.5.23 (sglang int8); "
        "vllm 0.32.0 (http://h:1 int8); m, version 0.32.0 (http://h:2 int8).\n"
    ) in rendered(tmp_path)


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
    )
    alone = Figure(name="decode", unit="tokens/s", better="higher", repeats=[3.0])
    BenchRecord(
        benchmark="decode",
        command="qurl bench decode",
        started="2026-11-22T12:00:00+00:00",
        environment={"cpu": "some", "cores": 2},
        cases=[
            Case(name="int8", keys={"model": "7B"}, figures=[figure]),
            Case(name="fp8", keys={"model": "7B"}, figures=[alone], reasons=["another load"]),
            Case(name="fp4", keys={}, reasons=["not run"], notes={"not run": "needs a GPU"}),
        ],
    ).keep(tmp_path)
    (tmp_path / "study_cpu.json").write_text('{"study": "not a benchmark"}')
    page = rendered(tmp_path)
    narrow = "\u202f"
    assert f"| int8 | 100 ±5.0{narrow}% (25{narrow}%) |" in page
    assert "| fp8 * | 3 |" in page
    assert "- Limit of decode: bytes read." in page
    assert "- Not run: needs a GPU (fp4)." in page and "(fp8)." in page
    assert "study" not in page
