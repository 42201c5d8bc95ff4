"""Every number that a prediction rests on, with its unit and source.

No other file of the planner's seconds has constants of its own. A source that says "estimate" is a
guess of ours that nobody has measured on this code.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from qurl_megatron.kit.errors import ConfigError

GB = 1e9


@dataclass(frozen=True, eq=False)
class Gpu:
    """The data sheet of one GPU. FLOP/s are dense. Compared by identity, so that caches take it."""

    gib: float  # of memory, as the driver counts it
    flops: Mapping[str, float]  # FLOP/s by number format, where engines have kernels for it
    hbm: float  # bytes/s
    nvlink: float  # bytes/s to the other GPUs of a machine, one way
    network: float  # bytes/s of its share of the machine's network, one way


HOPPER = {"none": 989e12, "int8": 1979e12, "fp8": 1979e12, "fp8_block": 1979e12}
# NVIDIA's data sheets without sparsity, of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200. DGX A100
# has 200 Gb/s of InfiniBand a GPU, DGX H100 and later 400. A100s have no FP8 units, and engines no
# INT8 kernels on Blackwell (vllm#25935, #27182). Those of block FP8 there need other scales
# than updates bring.
GPUS: dict[str, Gpu] = {
    "a100-80": Gpu(80, {"none": 312e12, "int8": 624e12}, 2039 * GB, 300 * GB, 25 * GB),
    "h100": Gpu(80, HOPPER, 3350 * GB, 450 * GB, 50 * GB),
    "h200": Gpu(140, HOPPER, 4800 * GB, 450 * GB, 50 * GB),
    "b200": Gpu(179, {"none": 2250e12, "fp8": 4500e12}, 7700 * GB, 900 * GB, 50 * GB),
}


def gpu_of(kind: str, scheme: str) -> Gpu:
    """Return a GPU; raise ``ConfigError`` if it is unknown or cannot run ``quant.scheme``."""
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
    """Share of dense FLOP/s; estimate, of products, the work between them, and attention:
    Megatron-LM's README reports 41 to 48 % of H100s for whole steps of pre-training,
    FlashAttention-2 and -3 from 35 to 75 % (arXiv:2407.08608)."""

    codes: float = 0.85
    """Share of twice BF16's speed that 8-bit products reach; estimate: torch's on an H100 reach
    0.86 in FP8 and 0.58 in INT8 (docs/performance-notes.md). SGLang's were not measured."""

    activation_codes: float = 10e-6
    """Seconds a layer and decode step; estimate: four kernels that quantize activations."""

    hbm: float = 0.6
    """Share of HBM bandwidth; estimate: weights and cache read in a decode step."""

    collective: float = 0.75
    """Share of a link; estimate: nccl-tests of large messages on DGX H100 give 0.7 to 0.85."""

    latency: float = 12e-6
    """Seconds an all-reduce of a decode step; estimate: SGLang's one-shot all-reduce."""

    layer_launch: float = 0.25e-3
    """Seconds a layer and pass, one way; estimate: 30 to 50 kernels, launched from Python."""

    expert_launch: float = 0.015e-3
    """Seconds an expert, layer and pass, one way; estimate: two products, which Transformer Engine
    launches from C++."""

    crowded: float = 1.2
    """Copies of tokens at the fullest of the ranks that experts are dealt to, times an even share;
    estimate, of the mean over layers and passes."""

    decode_layer: float = 25e-6
    """Seconds a layer and decode step; estimate: 8 to 10 small kernels in a CUDA graph."""

    decode_experts: float = 20e-6
    """Seconds a layer with experts and decode step; estimate: 6 more kernels, for routing."""

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


ASSUMPTIONS: tuple[tuple[str, float, str], ...] = (
    ("codes", 0.58, "8-bit products are 1.16 times as fast as BF16's"),
    ("codes", 1.0, "8-bit products are twice as fast as BF16's"),
    ("activation_codes", 0.0, "quantizing activations takes no time"),
    ("activation_codes", 25e-6, "quantizing activations takes 25 us a layer"),
    ("flops", 0.35, "products reach 35 % of the data sheet"),
    ("flops", 0.65, "products reach 65 % of the data sheet"),
    ("hbm", 0.45, "reading reaches 45 % of the data sheet"),
    ("hbm", 0.8, "reading reaches 80 % of the data sheet"),
    ("decode_step", 1e-3, "scheduling and sampling take 1 ms a decode step"),
    ("decode_step", 8e-3, "scheduling and sampling take 8 ms a decode step"),
)
"""The estimates that decide the gain of 8 bits, at both ends of their plausible range. Lengths
decide it as well, but they are the user's."""
