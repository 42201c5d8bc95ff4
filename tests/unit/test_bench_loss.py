import argparse
import subprocess
import sys
from types import SimpleNamespace

import pytest

from qurl_megatron.bench import loss
from qurl_megatron.bench.options import BENCHMARKS, add_options
from qurl_megatron.kit.errors import ConfigError


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, BENCHMARKS["loss"])
    return parser.parse_args(["--device", "cpu", *given])


def test_every_way_has_its_seconds_and_memory_beside_the_limit():
    given = ["--tokens", "64", "--vocab", "4096", "--tensor", "2", "--repeats", "2"]
    only = ["--only", "ours", "ours_torch", "ours_entropy_gradient", "megatron"]
    cases = {case.keys["way"]: case for case in loss.run(options(*given, *only))}
    for name in ("ours", "ours_entropy_gradient", "megatron"):
        case = cases[name]
        seconds, peak = case.figure("seconds"), case.figure("peak")
        assert len(seconds.repeats) == len(peak.repeats) == len(case.yardsticks) == 2
        assert 0 < seconds.limit < seconds.median and peak.limit == 1.0
        assert min(case.yardsticks) > 0
    assert cases["ours_torch"].notes["not run"] == "needs CUDA"


def test_a_case_tells_all_that_was_set():
    words = ("--tokens", "64", "--vocab", "512", "--dtype", "float32", "--threads", "3")
    case = loss.case_of("ours_torch", 2, options(*words), None, "needs CUDA")
    set_ = {"tokens": 64, "vocab": 512, "dtype": "float32", "threads": 3, "device": "cpu"}
    assert case.keys == {"way": "ours_torch", "tensor": 2, **set_}
    assert case.why("not run") == "not run: needs CUDA"


def test_a_way_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="--only theirs is not known; known: ours, "):
        loss.run(options("--only", "theirs", "--vocab", "64"))


def test_what_does_not_fit_into_memory_is_not_tried(monkeypatch):
    free = SimpleNamespace(available=8 << 30)
    monkeypatch.setattr(loss.psutil, "virtual_memory", lambda: free)
    given = options("--tokens", "8192", "--vocab", "151936")  # 2.3 GiB of logits
    assert loss._obstacle("ours", 1, given) == ""
    assert loss._obstacle("megatron", 1, given) == "needs 14 GiB and 3 to spare, 8 are free"


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
