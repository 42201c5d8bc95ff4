"""The machine that this runs on as a row of the table: what it reads and multiplies, measured.

All ranks and engines share its cores, so a rank has the part of these rates that its cores are of
the machine's (``Gpu.of_rank``), and more ranks than cores gain nothing. Between ranks everything
goes through the loopback.
"""

import os
from collections.abc import Mapping
from dataclasses import replace

import psutil

from qurl_megatron.planning.constants import LOOPBACK, Gpu

CPU = "cpu"
"""What ``--gpu`` calls it."""


def of_limits(limits: Mapping[str, float], wide: str, scale: float = 1.0) -> Gpu:
    """A device from what ``bench.environment.limits`` measured.

    Args:
        wide: "fp32" or "bf16", what is not quantized.
        scale: times these rates.
    """
    plain = 1e9 * scale * limits["fp32_gflop_s" if wide == "fp32" else "bf16_gflop_s"]
    eight = 1e9 * scale * limits["int8_gop_s"]
    return Gpu(
        gib=psutil.virtual_memory().total / 2**30,
        # Without units for FP8 its products are those of the wider format.
        flops={
            "none": plain,
            "fp8": plain,
            **dict.fromkeys(("int8", "int6", "int5", "int4"), eight),
        },
        hbm=1e9 * scale * limits["read_gb_s"],
        nvlink=LOOPBACK,
        network=LOOPBACK,
        source="measured here: bench.environment.limits",
    )


def cpu(
    limits: Mapping[str, float], dtype: str, *, measured_with: int, cores: int, threads: int = 0
) -> Gpu:
    """A CPU of ``cores``.

    Args:
        limits: of ``bench.environment``.
        dtype: ``model.dtype``.
        measured_with: threads that the limits were measured with.
        threads: of each rank; 0: its share of the cores.
    """
    wide = "fp32" if dtype == "float32" else "bf16"
    found = of_limits(limits, wide, cores / measured_with)
    return replace(found, cores=cores, threads=threads)


def here(dtype: str, threads: int = 0) -> Gpu:
    """This machine; takes a second."""
    import torch

    from qurl_megatron.bench.environment import limits

    return cpu(
        limits(),
        dtype,
        measured_with=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)),
        threads=threads,
    )
