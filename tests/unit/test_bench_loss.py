import argparse
import json
import subprocess
import sys

import pytest

from qurl_megatron.bench import loss


def arguments(*given: str) -> argparse.Namespace:
    return loss._arguments().parse_args(["--device", "cpu", *given])


def test_the_report_compares_with_megatron_and_tells_the_errors(tmp_path):
    out = tmp_path / "loss.json"
    command = ["--tokens", "64", "--vocab", "4096", "--tensor", "2", "--device", "cpu"]
    only = ["--only", "ours", "megatron_eager", "dense", "liger"]
    assert loss.main([*command, "--repeats", "1", *only, "--out", str(out)]) == 0
    here = json.loads(out.read_text())["results"]["tensor 2"]
    for name in ("ours", "megatron_eager"):
        assert here[name]["log_prob_error"] < 1e-6
        assert here[name]["gradient_error"] < 4e-3  # a BF16 gradient has 8 bits
    assert here["ours"]["entropy_error"] < 1e-6
    assert here["dense"] == {"not run": "needs the whole vocabulary"}
    assert here["liger"] == {"not run": "needs CUDA"}
    aims = json.loads(out.read_text())["aims"]["tensor 2"]
    seconds = [here[name]["seconds"] for name in ("ours", "megatron_eager")]
    assert aims["seconds_over_megatron"] == pytest.approx(seconds[0] / seconds[1], abs=1e-3)


def test_what_does_not_fit_into_memory_is_not_tried(monkeypatch):
    monkeypatch.setattr(loss, "_free_memory", lambda: 8 << 30)
    given = arguments("--tokens", "8192", "--vocab", "151936")  # 2.3 GiB of logits
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
