import argparse
import os

import pytest
import torch

from qurl_megatron import quant
from qurl_megatron.bench import quantize
from qurl_megatron.bench.options import BENCHMARKS, add_options
from qurl_megatron.bench.quantize import run
from qurl_megatron.kit import fused


def cases(*given: str) -> dict:
    parser = argparse.ArgumentParser()
    add_options(parser, BENCHMARKS["quantize"])
    words = ["--model", "tiny", "--repeats", "2", "--device", "cpu", *given]
    return {case.name: case for case in run(parser.parse_args(words))}


def test_every_format_stands_beside_a_copy_of_what_it_moves(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = cases("--dtype", "float32", "bfloat16", "--schemes", "int8")
    # The kernels are left out where there is no GPU.
    assert list(found) == ["float32 to int8, torch", "bfloat16 to int8, torch"]
    case = found["float32 to int8, torch"]
    assert case.keys == {
        "model": "tiny",
        "scheme": "int8",
        "dtype": "float32",
        "way": "torch",
        "device": "cpu",
        "threads": torch.get_num_threads(),
    }
    (figure,) = case.figures
    assert len(figure.repeats) == 2 and figure.limit > 0 and figure.unit == "s"


def test_the_kernels_are_measured_where_the_environment_turns_them_off_for_all_else(monkeypatch):
    monkeypatch.setenv(fused.SWITCH, "0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(fused, "_can_run", lambda interpreted: True)
    monkeypatch.setattr(quantize, "quantize", on_torch)
    found = cases("--dtype", "float32", "--schemes", "int8")
    assert found["float32 to int8, kernels"].figures
    assert os.environ[fused.SWITCH] == "0"


def on_torch(weight, scheme):
    """In place of kernels that this machine has not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(fused.SWITCH, "0")
        return quant.quantize(weight, scheme)
