"""Seconds of quantizing one layer's weights, beside a copy of the bytes that this moves.

Masters are in float32, trained and converted weights in BF16. On a GPU with
Triton both ways take turns: torch's operations, and the kernels of ``fused``. The limit is a plain
copy on the same device that reads and writes as many bytes as weights, codes and scales have.

    python -m benchmarks.quantize --device cuda --model Qwen2.5-Math-7B --out DIR
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import measure, parser_of
from benchmarks.machine_limits import fastest
from benchmarks.repeats import interleaved
from qurl_megatron.bench.record import Case, Figure, progress
from qurl_megatron.bench.rollout_engines import config_of
from qurl_megatron.checkpoints.ops import hf_shapes
from qurl_megatron.kit.fused import SWITCH, has_kernels_for
from qurl_megatron.quant import quantize
from qurl_megatron.tensors.arch import read_arch

DTYPES = ["float32", "bfloat16"]
WAYS = {"torch": "0", "kernels": "1"}  # and the value of its switch


def parser() -> argparse.ArgumentParser:
    options = parser_of("quantize", __doc__)
    options.add_argument("--schemes", nargs="+", choices=["int8", "fp8"], default=["int8", "fp8"])
    options.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    options.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where it is")
    return options


def run(options: argparse.Namespace) -> list[Case]:
    """Return a case per format of the weights, scheme and way."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    layer = hf_shapes(read_arch(config_of(options.model)))
    shapes = [s for name, s in layer.items() if ".layers.0." in name and len(s) == 2]
    cases = []
    for dtype in options.dtype:
        kind = {"dtype": getattr(torch, dtype), "device": device}
        weights = [torch.randn(*shape, **kind).mul_(0.02) for shape in shapes]
        with switched("1"):  # the environment may turn them off for all else
            ways = WAYS if has_kernels_for(weights[0]) else {"torch": "0"}
        for scheme in options.schemes:
            limit = copy_seconds(weights, scheme)
            acts = {way: partial(_quantize, weights, scheme, value) for way, value in ways.items()}
            for way, measured in interleaved(acts, repeats=options.repeats).items():
                keys = {"model": options.model, "scheme": scheme, "dtype": dtype, "way": way}
                figure = Figure(
                    name="quantize",
                    unit="s",
                    better="lower",
                    repeats=measured.seconds,
                    limit=limit,
                    limit_of="a copy of the bytes",
                )
                case = Case(
                    name=f"{dtype} to {scheme}, {way}",
                    keys=keys | {"device": device.type, "threads": torch.get_num_threads()},
                    figures=[figure],
                    yardsticks=measured.yardsticks,
                    reasons=measured.reasons,
                )
                progress(f"{case.name}: {figure.median:.4f} s")
                cases.append(case)
    return cases


def copy_seconds(weights: list[Tensor], scheme: str) -> float:
    """Return the seconds of a copy that moves as many bytes as quantizing reads and writes."""
    moved = 0
    for weight in weights:
        quantized = quantize(weight, scheme)
        moved += weight.nbytes + quantized.values.nbytes + quantized.scale.nbytes
    source = torch.ones(moved // 2, dtype=torch.uint8, device=weights[0].device)
    target = torch.empty_like(source)
    return fastest(lambda: target.copy_(source), source.device.type)


def _quantize(weights: list[Tensor], scheme: str, switch: str) -> None:
    with switched(switch):
        for weight in weights:
            quantize(weight, scheme)
    if weights[0].is_cuda:
        torch.cuda.synchronize()


@contextmanager
def switched(value: str) -> Iterator[None]:
    """Turn the kernels of ``fused`` on ("1") or off ("0") inside the block."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


if __name__ == "__main__":
    sys.exit(measure("quantize", parser().parse_args(), run))
