import argparse
import json

import pytest
import torch

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
    # Above 32 MiB malloc always asks the kernel, whatever was given back before.
    with loss.high_water("cpu") as before:
        torch.ones(32 << 20)  # 128 MiB, given back
    with loss.high_water("cpu") as after:
        torch.ones(12 << 20)
    assert 124 < before[0] / loss.MIB < 144
    assert 44 < after[0] / loss.MIB < 64
