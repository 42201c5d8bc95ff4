"""The benchmarks of the checkout, and docs/performance.md, which is made of their records."""

import pytest
import torch

from benchmarks import loss, machine_limits, many_tensors, quantize
from benchmarks.harness import measure, read
from benchmarks.performance import PAGE, RESULTS, rendered


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """Its rates come from work that is over at once."""
    monkeypatch.setattr(machine_limits, "SIZE", 64)
    monkeypatch.setattr(machine_limits, "READ_MIB", 1)
    machine_limits.limits.cache_clear()
    yield
    machine_limits.limits.cache_clear()


def test_every_way_has_its_seconds_and_memory_beside_the_limit():
    given = ["--device", "cpu", "--tokens", "64", "--vocab", "4096", "--tensor", "2"]
    given += ["--repeats", "2"]
    cases = {case.keys["way"]: case for case in loss.run(loss.parser().parse_args(given))}
    for name in ("ours", "ours_entropy_gradient", "megatron"):
        case = cases[name]
        seconds, peak = case.figure("seconds"), case.figure("peak")
        assert len(seconds.repeats) == len(peak.repeats) == len(case.yardsticks) == 2
        assert seconds.limit > 0 and peak.limit == 1.0 and min(case.yardsticks) > 0
    assert cases["ours_torch"].why("not run") == "not run: needs CUDA"
    keys = {"tokens": 64, "vocab": 4096, "dtype": "bfloat16", "threads": 0, "device": "cpu"}
    assert cases["ours_torch"].keys == {"way": "ours_torch", "tensor": 2, **keys}


def test_quantizing_leaves_a_record_with_a_copy_of_what_it_moves_as_limit(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    given = f"--model tiny --repeats 2 --device cpu --schemes int8 --out {tmp_path}".split()
    assert measure("quantize", quantize.parser().parse_args(given), quantize.run) == 0
    record = read(tmp_path / "quantize.json")
    # The kernels are left out where there is no GPU.
    names = [case.name for case in record.cases]
    assert names == ["float32 to int8, torch", "bfloat16 to int8, torch"]
    assert record.environment["limits"]["read_gb_s"] > 0
    case = record.cases[0]
    keys = {"model": "tiny", "scheme": "int8", "dtype": "float32", "way": "torch"}
    assert case.keys == keys | {"device": "cpu", "threads": torch.get_num_threads()}
    (figure,) = case.figures
    assert len(figure.repeats) == 2 and figure.limit > 0 and figure.unit == "s"


def test_a_version_of_many_tensors_comes_whole_at_an_engine_rank():
    given = ["--layers", "2", "4", "--repeats", "2"]
    cases = many_tensors.run(many_tensors.parser().parse_args(given))
    # A layer: 128 experts of three matrices and attention's four, with scales; router, norms.
    tensors = [layers * (2 * (128 * 3 + 4) + 5) + 3 for layers in (2, 4)]
    assert [case.notes["tensors"] for case in cases] == tensors
    for case in cases:
        names = ["training rank", "leading rank", "engine rank", "a tensor"]
        assert [figure.name for figure in case.figures] == names
        assert all(len(figure.repeats) == 2 and figure.median > 0 for figure in case.figures)


def test_the_page_of_results_is_made_of_the_records():
    """``python -m benchmarks.performance`` writes it anew."""
    assert PAGE.read_text(encoding="utf-8") == rendered()


def test_every_record_in_the_results_stands_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert len(list(RESULTS.glob("*_cpu.json"))) >= 7
    for path in RESULTS.glob("*_cpu.json"):
        if path.name != "study_cpu.json":  # has a page of its own
            assert f"(results/{path.name})" in page
