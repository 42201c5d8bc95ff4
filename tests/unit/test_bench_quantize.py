import argparse
import os

import pytest
import torch

from qurl_megatron import fused, quant
from qurl_megatron.bench import quantize
from qurl_megatron.bench.options import BENCHMARKS, add_shared
from qurl_megatron.bench.quantize import matrices, run
from qurl_megatron.bench.random_model import config_of
from qurl_megatron.tensors.arch import read_arch


def cases(*given: str) -> dict:
    parser = argparse.ArgumentParser()
    add_shared(parser, BENCHMARKS["quantize"])
    BENCHMARKS["quantize"].add_options(parser)
    words = ["--model", "tiny", "--repeats", "2", "--device", "cpu", *given]
    return {case.name: case for case in run(parser.parse_args(words))}


def test_what_is_quantized_of_a_layer_is_its_matrices():
    arch = read_arch(config_of("7B"))
    shapes = matrices(arch)
    assert (18944, 3584) in shapes and (3584, 18944) in shapes and len(shapes) == 7
    assert 220e6 < sum(rows * columns for rows, columns in shapes) < 240e6


def test_every_format_stands_beside_a_copy_of_what_it_moves(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = cases("--dtype", "float32", "bfloat16", "--schemes", "int8")
    assert list(found) == [f"float32 to int8, {way}" for way in ("torch", "kernels")] + [
        f"bfloat16 to int8, {way}" for way in ("torch", "kernels")
    ]
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
    assert found["float32 to int8, kernels"].notes["not run"] == "needs CUDA and Triton"


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
