"""The machine that this runs on as a row of the table: what it reads and multiplies, measured.

All ranks and engines share its cores, so a rank has its part of what the busy cores do together
(``Gpu.of_rank``), and more ranks than cores gain nothing. Between ranks everything goes through the
loopback.
"""

import os
from collections.abc import Mapping
from dataclasses import replace

import psutil

from qurl_megatron.planning.constants import LOOPBACK, Gpu
from qurl_megatron.planning.machine_limits import measured_limits
from qurl_megatron.schemes import INTEGER

CPU = "cpu"
"""What ``--gpu`` calls it."""


def of_limits(limits: Mapping[str, float], wide: str) -> Gpu:
    """A device from what ``measured_limits`` found.

    Args:
        wide: "fp32" or "bf16", what is not quantized.
    """
    plain = 1e9 * limits["fp32_gflop_s" if wide == "fp32" else "bf16_gflop_s"]
    codes = dict.fromkeys(INTEGER, 1e9 * limits["int8_gop_s"])
    return Gpu(
        gib=psutil.virtual_memory().total / 2**30,
        # Without units for FP8 its products are those of the wider format.
        flops={"none": plain, "fp8": 1e9 * limits.get("fp8_gflop_s", plain / 1e9), **codes},
        hbm=1e9 * limits["read_gb_s"],
        nvlink=LOOPBACK,
        network=LOOPBACK,
        source="measured here: planning.machine_limits",
    )


def cpu(
    alone: Mapping[str, float],
    together: Mapping[str, float],
    dtype: str,
    *,
    cores: int,
    threads: int = 0,
    native: bool = False,
) -> Gpu:
    """A CPU of ``cores``.

    Args:
        alone: the limits of one core while the others rest.
        together: those of all cores.
        dtype: ``model.dtype``.
        threads: of each rank; 0: its share of the cores.
        native: an engine of codes has its decode step in one native call, given FP32 beside them.
    """
    wide = "fp32" if dtype == "float32" else "bf16"
    one, every = (_without_fp8(limits, wide) for limits in (alone, together))
    return replace(
        every,
        cores=cores,
        threads=threads,
        alone=one,
        native=frozenset(INTEGER) if native and wide == "fp32" else frozenset(),
    )


def _without_fp8(limits: Mapping[str, float], wide: str) -> Gpu:
    """FP8 weights are multiplied in FP32, whatever format the others have."""
    found = of_limits(limits, wide)
    return replace(found, flops={**found.flops, "fp8": 1e9 * limits["fp32_gflop_s"]})


def here(dtype: str, threads: int = 0) -> Gpu:
    """This machine; takes two seconds."""
    import torch

    from qurl_megatron.engines.embedded.native import library

    cores, before = len(os.sched_getaffinity(0)), torch.get_num_threads()
    found = []
    try:
        for count in (1, cores):
            torch.set_num_threads(count)
            found.append(measured_limits("cpu"))
    finally:
        torch.set_num_threads(before)
    alone, together = found
    return cpu(alone, together, dtype, cores=cores, threads=threads, native=library() is not None)
