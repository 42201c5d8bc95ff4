"""The benchmarks of the checkout: the loss, quantizing, publishing."""

import pytest
import torch

from benchmarks import loss, machine_limits, publish, quantize
from benchmarks.harness import measure, read
from benchmarks.repeats import Repeats


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """Its rates come from work that is over at once."""
    monkeypatch.setattr(machine_limits, "SIZE", 64)
    monkeypatch.setattr(machine_limits, "READ_MIB", 1)
    machine_limits.limits.cache_clear()
    yield
    machine_limits.limits.cache_clear()


def of_loss(*words: str):
    return loss.parser().parse_args(["--device", "cpu", *words])


def test_every_way_has_its_seconds_and_memory_beside_the_limit():
    given = ["--tokens", "64", "--vocab", "4096", "--tensor", "2", "--repeats", "2"]
    cases = {case.keys["way"]: case for case in loss.run(of_loss(*given))}
    for name in ("ours", "ours_entropy_gradient", "megatron"):
        case = cases[name]
        seconds, peak = case.figure("seconds"), case.figure("peak")
        assert len(seconds.repeats) == len(peak.repeats) == len(case.yardsticks) == 2
        assert seconds.limit > 0 and peak.limit == 1.0 and min(case.yardsticks) > 0
    assert cases["ours_torch"].why("not run") == "not run: needs CUDA"
    keys = {"tokens": 64, "vocab": 4096, "dtype": "bfloat16", "threads": 0, "device": "cpu"}
    assert cases["ours_torch"].keys == {"way": "ours_torch", "tensor": 2, **keys}


def of_quantize(*words: str):
    small = ["--model", "tiny", "--repeats", "2", "--device", "cpu", "--schemes", "int8"]
    return quantize.parser().parse_args([*small, *words])


def test_quantizing_leaves_a_record_with_a_copy_of_what_it_moves_as_limit(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert measure("quantize", of_quantize("--out", str(tmp_path)), quantize.run) == 0
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


def test_a_transport_has_every_turn_and_the_limit_of_a_copy():
    def turn(seconds: float, paused_s: float) -> dict[str, float]:
        spent = {"seconds": seconds, "paused_s": paused_s, "work_s": 2 * seconds}
        return {**spent, "bytes": 2e9, "copy_gb_s": 2.0}

    repeats = Repeats(results=[turn(2.0, 0.5), turn(1.0, 0.7)], yardsticks=[0.01, 0.01])
    case = publish.case_of("int8", 1, "memory", repeats, model="0.5B")
    assert case.name == "int8, engine TP1, memory"
    seconds = case.figure("seconds")
    assert (seconds.repeats, seconds.limit) == ([2.0, 1.0], 1.0)  # 2 GB at 2 GB/s
    assert case.figure("work").repeats == [4.0, 2.0]
    assert case.figure("paused").repeats == [0.5, 0.7]
