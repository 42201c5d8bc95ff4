"""Seconds of quantizing one layer's weights, beside a copy of the bytes that this moves.

Float32 is what trained weights' masters are in, BF16 what is trained and converted. On a GPU with
Triton both ways take turns: torch's operations, and the kernels of ``fused``. The limit is a plain
copy on the same device that reads and writes as many bytes as weights, codes and scales have.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from qurl_megatron.bench.random_model import config_of
from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.repeats import Repeats, interleaved, progress
from qurl_megatron.fused import SWITCH, has_kernels_for
from qurl_megatron.planning.machine_limits import fastest
from qurl_megatron.quant import quantize
from qurl_megatron.tensors.arch import Arch, read_arch
from qurl_megatron.weights.shapes import hf_shapes

WAYS = ("torch", "kernels")


def run(options: argparse.Namespace) -> list[Case]:
    """A case per format of the weights, scheme and way."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    shapes = matrices(read_arch(config_of(options.model)))
    found = []
    for dtype in options.dtype:
        generator = torch.Generator(device).manual_seed(0)
        weights = [
            torch.randn(*shape, generator=generator, device=device).mul_(0.02) for shape in shapes
        ]
        weights = [weight.to(getattr(torch, dtype)) for weight in weights]
        for scheme in options.schemes:
            limit = copy_seconds(weights, scheme)
            acts = {"torch": _by(weights, scheme, switch="0")}
            with _switched("1"):  # the environment may turn them off for all else
                runs = has_kernels_for(weights[0])
            if runs:
                acts["kernels"] = _by(weights, scheme, switch="1")
            measured = interleaved(acts, repeats=options.repeats)
            for way in WAYS:
                keys = {"model": options.model, "scheme": scheme, "dtype": dtype, "way": way}
                keys |= {"device": device.type, "threads": torch.get_num_threads()}
                found.append(case_of(keys, measured.get(way), limit))
    return found


def matrices(arch: Arch) -> list[tuple[int, int]]:
    """Shapes of what is quantized of one layer."""
    layer = {name: shape for name, shape in hf_shapes(arch).items() if ".layers.0." in name}
    return [shape for shape in layer.values() if len(shape) == 2]


def copy_seconds(weights: list[Tensor], scheme: str) -> float:
    """Of a copy that moves what quantizing must: half of the bytes read and written, both ways."""
    moved = 0
    for weight in weights:
        quantized = quantize(weight, scheme)
        moved += weight.nbytes + quantized.values.nbytes + quantized.scale.nbytes
    source = torch.ones(moved // 2, dtype=torch.uint8, device=weights[0].device)
    target = torch.empty_like(source)
    return fastest(lambda: target.copy_(source), source.device.type)


def case_of(keys: dict, measured: Repeats | None, limit: float) -> Case:
    """Of one way's repeats; None where it could not be measured."""
    name = f"{keys['dtype']} to {keys['scheme']}, {keys['way']}"
    if measured is None:
        return Case(
            name=name, keys=keys, reasons=["not run"], notes={"not run": "needs CUDA and Triton"}
        )
    figure = Figure(
        name="quantize",
        unit="s",
        better="lower",
        repeats=measured.seconds,
        limit=limit,
        limit_of="a copy of the bytes",
    )
    progress(f"{name}: {figure.median:.4f} s")
    return Case(
        name=name,
        keys=keys,
        figures=[figure],
        yardsticks=measured.yardsticks,
        reasons=measured.reasons,
    )


def _by(weights: list[Tensor], scheme: str, switch: str) -> Callable[[], None]:
    def act() -> None:
        with _switched(switch):
            for weight in weights:
                quantize(weight, scheme)
        if weights[0].is_cuda:
            torch.cuda.synchronize()

    return act


@contextmanager
def _switched(value: str) -> Iterator[None]:
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before
