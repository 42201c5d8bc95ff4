import argparse
import subprocess
import sys

import pytest

from qurl_megatron.bench import loss
from qurl_megatron.bench.options import BENCHMARKS, add_shared
from qurl_megatron.errors import ConfigError


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_shared(parser, BENCHMARKS["loss"])
    BENCHMARKS["loss"].add_options(parser)
    return parser.parse_args(["--device", "cpu", *given])


def test_cases_compare_with_megatron_and_tell_the_errors():
    given = ["--tokens", "64", "--vocab", "4096", "--tensor", "2", "--repeats", "1"]
    only = ["--only", "ours", "megatron_eager", "dense", "liger"]
    cases = {case.keys["way"]: case for case in loss.run(options(*given, *only))}
    for name in ("ours", "megatron_eager"):
        case = cases[name]
        assert case.notes["log_prob_error"] < 1e-6
        assert case.notes["gradient_error"] < 4e-3  # a BF16 gradient has 8 bits
        assert len(case.figure("seconds").repeats) == len(case.yardsticks) == 1
        assert case.figure("seconds").limit < case.figure("seconds").median
    assert cases["ours"].notes["entropy_error"] < 1e-6
    assert cases["dense"].notes["not run"] == "needs the whole vocabulary"
    assert cases["liger"].notes["not run"] == "needs CUDA"
    seconds = [cases[name].figure("seconds").median for name in ("ours", "megatron_eager")]
    ratio = cases["ours"].notes["seconds_over_megatron"]
    assert ratio == pytest.approx(seconds[0] / seconds[1], abs=1e-3)


def test_a_case_tells_all_that_was_set():
    words = ("--tokens", "64", "--vocab", "512", "--dtype", "float32", "--threads", "3")
    case = loss.case_of("liger", 2, options(*words), [{"not run": "needs CUDA"}])
    set_ = {"tokens": 64, "vocab": 512, "dtype": "float32", "threads": 3, "device": "cpu"}
    assert case.keys == {"way": "liger", "tensor": 2, **set_}


def test_a_way_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="--only theirs is not known; known: ours, "):
        loss.run(options("--only", "theirs", "--vocab", "64"))


def test_what_does_not_fit_into_memory_is_not_tried(monkeypatch):
    monkeypatch.setattr(loss, "_free_memory", lambda: 8 << 30)
    given = options("--tokens", "8192", "--vocab", "151936")  # 2.3 GiB of logits
    assert loss._obstacle("ours", 1, given) is None
    assert loss._obstacle("dense", 1, given) == "needs 17 GiB and 3 to spare, 8 are free"
    assert loss._obstacle("verl", 1, given) == "needs --verl"


def test_the_high_water_mark_is_of_what_happened_inside():
    # In a process of its own: threads of other tests give memory back as they please.
    code = (
        "import torch\n"
        "from qurl_megatron.bench import loss\n"
        # Above 32 MiB malloc always asks the kernel, whatever was given back before.
        "with loss.high_water('cpu') as before:\n"
        "    torch.ones(32 << 20)\n"  # 128 MiB, given back
        "with loss.high_water('cpu') as after:\n"
        "    torch.ones(12 << 20)\n"
        "print(before[0] / loss.MIB, after[0] / loss.MIB)"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    before, after = map(float, told.stdout.split())
    assert 124 < before < 144
    assert 44 < after < 64
