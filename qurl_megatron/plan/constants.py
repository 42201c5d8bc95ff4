"""Every number that a prediction rests on, with its unit and source.

No other file of this room has constants of its own. A source that says "estimate" is a guess of
ours that nobody has measured on this code; ``--measured`` replaces it by a run of yours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from qurl_megatron.kit.errors import ConfigError

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The data sheet of one GPU. FLOP/s are dense."""

    gib: float  # of memory, as the driver counts it
    flops: Mapping[str, float]  # FLOP/s by number format, where engines have kernels for it
    hbm: float  # bytes/s
    nvlink: float  # bytes/s to the other GPUs of a machine, one way
    network: float  # bytes/s of its share of the machine's network, one way
    source: str


GPUS: dict[str, Gpu] = {
    "a100-80": Gpu(
        gib=80,
        flops={"none": 312e12, "int8": 624e12},
        hbm=2039 * GB,
        nvlink=300 * GB,
        network=25 * GB,
        source="NVIDIA A100 80GB SXM data sheet; DGX A100: 200 Gb/s InfiniBand a GPU; no FP8 units",
    ),
    "h100": Gpu(
        gib=80,
        flops={"none": 989e12, "int8": 1979e12, "fp8": 1979e12},
        hbm=3350 * GB,
        nvlink=450 * GB,
        network=50 * GB,
        source="NVIDIA H100 SXM data sheet, without sparsity; DGX H100: 400 Gb/s a GPU",
    ),
    "h200": Gpu(
        gib=140,
        flops={"none": 989e12, "int8": 1979e12, "fp8": 1979e12},
        hbm=4800 * GB,
        nvlink=450 * GB,
        network=50 * GB,
        source="NVIDIA H200 SXM data sheet, without sparsity; DGX H200: 400 Gb/s a GPU",
    ),
    "b200": Gpu(
        gib=179,
        flops={"none": 2250e12, "fp8": 4500e12},
        hbm=7700 * GB,
        nvlink=900 * GB,
        network=50 * GB,
        source="NVIDIA HGX B200 data sheet, without sparsity; 400 Gb/s a GPU; no INT8, for which "
        "engines have no kernels on Blackwell (vllm#25935, #27182)",
    ),
}


def gpu_of(kind: str, scheme: str) -> Gpu:
    """Return the GPU of that name.

    Raises:
        ConfigError: it is not in the table, or engines cannot run ``quant.scheme`` on it.
    """
    if kind not in GPUS:
        raise ConfigError(f"--gpu {kind} is not in the table; known: {', '.join(GPUS)}")
    gpu = GPUS[kind]
    if scheme not in gpu.flops:
        raise ConfigError(
            f"quant.scheme={scheme} has no kernels on {kind}; "
            f"set quant.scheme to one of {', '.join(gpu.flops)}"
        )
    return gpu


def _constant(value: float, unit: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "source": source})


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The share of a data sheet that software reaches, and assumptions about the work."""

    gemm: float = _constant(
        0.5,
        "share of dense FLOP/s",
        "estimate: products of a training pass with what lies between them. Megatron-LM's README "
        "reports 41 to 48 % of H100s for whole steps of pre-training",
    )
    attention: float = _constant(
        0.45,
        "share of dense BF16 FLOP/s",
        "estimate, between FlashAttention-2 (35 %) and -3 (up to 75 %) on H100 (arXiv:2407.08608)",
    )
    attention_backward: float = _constant(
        2.5, "forward passes", "five products to two: FlashAttention-2 (arXiv:2307.08691)"
    )
    layer_launch: float = _constant(
        0.25e-3, "s a layer and pass, one way", "estimate: 30 to 50 kernels, launched from Python"
    )
    collective: float = _constant(
        0.75,
        "share of a link",
        "estimate: nccl-tests of large messages on DGX H100 give 0.7 to 0.85",
    )
    training_latency: float = _constant(
        30e-6, "s a collective", "estimate: NCCL's latency among 8 GPUs of a machine"
    )
    prefill: float = _constant(0.5, "share of dense FLOP/s", "estimate")
    decode_gemm: float = _constant(
        0.5, "share of dense FLOP/s", "estimate: products of some hundred rows, any number format"
    )
    decode_hbm: float = _constant(
        0.6, "share of HBM bandwidth", "estimate: weights and cache read in a decode step"
    )
    decode_latency: float = _constant(
        12e-6, "s an all-reduce", "estimate: SGLang's one-shot all-reduce of small messages"
    )
    decode_layer: float = _constant(
        25e-6, "s a layer and step", "estimate: 8 to 10 small kernels in a CUDA graph"
    )
    decode_step: float = _constant(
        3e-3, "s a step", "estimate: scheduling, sampling and log-probs of an engine"
    )
    reload: float = _constant(
        3.0, "s a step", "estimate: colocated engines release memory and take it back"
    )
    optimizer_bytes: float = _constant(
        34.0,
        "bytes a parameter",
        "Adam reads gradient, master and moments (16), writes master, moments and BF16 (14); the "
        "norm reads the gradient again (4)",
    )
    disk: float = _constant(10 * GB, "bytes/s for all", "estimate of a shared file system")
    publish_call: float = _constant(5e-3, "s a call", "estimate: one HTTP call to an engine")
    rollout_over: float = _constant(
        1.0, "times this model", "--measured: seconds of a run's rollouts over their prediction"
    )
    training_over: float = _constant(
        1.0, "times this model", "--measured: likewise, of its scores and updates"
    )
    publish_over: float = _constant(
        2.0,
        "times this model",
        "docs/performance-notes.md: 1.9 to 3.0 on CPUs; --measured: likewise, of its publications",
    )
    mean_response: float = _constant(
        0.3, "share of rollout.max_new_tokens", "estimate; --mean-tokens says better"
    )
    mean_prompt: float = _constant(
        0.1, "share of data.max_prompt_tokens", "estimate; --mean-prompt-tokens says better"
    )
    spare: float = _constant(
        0.03, "share of a GPU's memory", "our rule: left free by a layout, for fragments"
    )
    static_step: float = _constant(
        0.05, "share of free memory", "our rule: steps in which --mem-fraction-static is tried"
    )
    tail: float = _constant(
        0.5,
        "share of the rollout",
        "our rule: the longest response limits where equal ones would take less than this share",
    )
    no_room: float = _constant(
        0.8, "share of the rollout", "our rule, likewise, for a cache that would hold all responses"
    )
    worth: float = _constant(
        0.2,
        "share of the step",
        "our rule: scaling has stopped where twice the GPUs take off less than this",
    )


def table(kind: str, gpu: Gpu, constants: Constants) -> list[dict[str, Any]]:
    """Return name, value, unit and source of every number."""
    sheet = [
        ("memory", gpu.gib, "GiB"),
        ("HBM", gpu.hbm / GB, "GB/s"),
        ("NVLink", gpu.nvlink / GB, "GB/s"),
        ("network", gpu.network / GB, "GB/s"),
        *((f"FLOP/s, {name}", value / 1e12, "T/s") for name, value in gpu.flops.items()),
    ]
    source = gpu.source if gpu == GPUS[kind] else f"{gpu.source}; the network was given"
    rows = [
        {"name": f"{kind}: {name}", "value": value, "unit": unit, "source": source}
        for name, value, unit in sheet
    ]
    for constant in fields(constants):
        value = getattr(constants, constant.name)
        estimate, metadata = constant.default, constant.metadata
        source = metadata["source"] if value == estimate else "measured"
        rows.append(
            {"name": constant.name, "value": value, "unit": metadata["unit"], "source": source}
        )
    return rows
