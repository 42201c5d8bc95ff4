"""The kernels compiled for GPUs that are not there: their instructions, registers and spills."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.triton.conftest import HERE

CAPABILITIES = [80, 90]  # A100, H100


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, dict]:
    if not HERE:
        pytest.skip("triton is not installed; make test-triton brings it")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    command = [sys.executable, "-m", "tests.triton.compiled", *map(str, CAPABILITIES)]
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    return json.loads(told)


def instructions(kernel: dict, name: str) -> set[str]:
    return set(re.findall(rf"\b{name}\.[a-z0-9.]+", kernel["ptx"]))


def test_every_kernel_compiles_and_keeps_its_numbers_in_registers(made):
    for name, kernel in made.items():
        assert kernel["spilled"] == 0, name
        assert kernel["registers"] * kernel["threads"] <= 65536, name


def test_quantizing_takes_ieee_instructions_alone(made):
    rounding = [kernel for name, kernel in made.items() if "round" in name]
    assert rounding
    for kernel in rounding:
        assert instructions(kernel, "div") == {"div.rn.f32"}
        assert not instructions(kernel, "fma") | instructions(kernel, "rcp")


def test_numbers_below_the_normal_ones_are_kept(made):
    assert not any(".ftz" in kernel["ptx"] for kernel in made.values())


def test_a_bfloat16_gradient_is_rounded_half_to_even(made):
    for capability in CAPABILITIES:
        kernel = made[f"sm_{capability} gradient_block bf16"]
        assert instructions(kernel, "cvt") & {"cvt.rn.bf16.f32", "cvt.rn.bf16x2.f32"}


def test_the_floor_of_the_exponent_is_a_comparison_because_a_maximum_drops_nan(made):
    for name, kernel in made.items():
        if "gradient_block" in name:
            assert not instructions(kernel, "max"), name
