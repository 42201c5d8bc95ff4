"""Every number that a prediction rests on, with its unit and source.

No other file of the planner's seconds has constants of its own. A source that says "estimate" is a
guess of ours that nobody has measured on this code.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from qurl_megatron.kit.errors import ConfigError

GB = 1e9


@dataclass(frozen=True, kw_only=True, eq=False)
class Gpu:
    """The data sheet of one GPU. FLOP/s are dense. Compared by identity, so that caches take it."""

    gib: float  # of memory, as the driver counts it
    flops: Mapping[str, float]  # FLOP/s by number format, where engines have kernels for it
    hbm: float  # bytes/s
    nvlink: float  # bytes/s to the other GPUs of a machine, one way
    network: float  # bytes/s of its share of the machine's network, one way


GPUS: dict[str, Gpu] = {
    # NVIDIA A100 80GB SXM data sheet; DGX A100: 200 Gb/s InfiniBand a GPU; no FP8 units
    "a100-80": Gpu(
        gib=80,
        flops={"none": 312e12, "int8": 624e12},
        hbm=2039 * GB,
        nvlink=300 * GB,
        network=25 * GB,
    ),
    # NVIDIA H100 SXM data sheet, without sparsity; DGX H100: 400 Gb/s a GPU
    "h100": Gpu(
        gib=80,
        flops={"none": 989e12, "int8": 1979e12, "fp8": 1979e12},
        hbm=3350 * GB,
        nvlink=450 * GB,
        network=50 * GB,
    ),
    # NVIDIA H200 SXM data sheet, without sparsity; DGX H200: 400 Gb/s a GPU
    "h200": Gpu(
        gib=140,
        flops={"none": 989e12, "int8": 1979e12, "fp8": 1979e12},
        hbm=4800 * GB,
        nvlink=450 * GB,
        network=50 * GB,
    ),
    # NVIDIA HGX B200 data sheet, without sparsity; 400 Gb/s a GPU; no INT8, for which engines have
    # no kernels on Blackwell (vllm#25935, #27182)
    "b200": Gpu(
        gib=179,
        flops={"none": 2250e12, "fp8": 4500e12},
        hbm=7700 * GB,
        nvlink=900 * GB,
        network=50 * GB,
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


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The share of a data sheet that software reaches, and assumptions about the work."""

    flops: float = 0.5
    """Share of dense FLOP/s; estimate, of products with what lies between them and of attention:
    Megatron-LM's README reports 41 to 48 % of H100s for whole steps of pre-training,
    FlashAttention-2 and -3 from 35 to 75 % (arXiv:2407.08608)."""

    hbm: float = 0.6
    """Share of HBM bandwidth; estimate: weights and cache read in a decode step."""

    collective: float = 0.75
    """Share of a link; estimate: nccl-tests of large messages on DGX H100 give 0.7 to 0.85."""

    latency: float = 12e-6
    """Seconds an all-reduce of a decode step; estimate: SGLang's one-shot all-reduce."""

    layer_launch: float = 0.25e-3
    """Seconds a layer and pass, one way; estimate: 30 to 50 kernels, launched from Python."""

    decode_layer: float = 25e-6
    """Seconds a layer and decode step; estimate: 8 to 10 small kernels in a CUDA graph."""

    decode_step: float = 3e-3
    """Seconds a decode step; estimate: scheduling, sampling and log-probs of an engine."""

    reload: float = 3.0
    """Seconds a step; estimate: colocated engines release memory and take it back."""

    disk: float = 10 * GB
    """Bytes/s for all; estimate of a shared file system."""

    publish_over: float = 2.0
    """Times this model; docs/performance-notes.md: 1.9 to 3.0 on CPUs."""

    mean_response: float = 0.3
    """Share of rollout.max_new_tokens; estimate; --mean-tokens says better."""

    mean_prompt: float = 0.1
    """Share of data.max_prompt_tokens; estimate; --mean-prompt-tokens says better."""

    spare: float = 0.03
    """Share of a GPU's memory; our rule: left free by a layout, for fragments."""

    static_step: float = 0.05
    """Share of free memory; our rule: steps in which --mem-fraction-static is tried."""

    tail: float = 0.5
    """Share of the rollout; our rule: the longest response limits where equal ones would take
    less than this share."""

    no_room: float = 0.8
    """Share of the rollout; our rule, likewise, for a cache that would hold all responses."""

    worth: float = 0.2
    """Share of the step; our rule: scaling has stopped where twice the GPUs take off less than
    this."""
