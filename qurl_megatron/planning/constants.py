"""Every number that a prediction rests on, with its unit and where it comes from.

Nothing else in this room has a constant of its own. What says "estimate" is ours: nobody has
measured it on this code, and a measured run replaces it (``measured``). The rates of a CPU are
measured where it stands (``machine``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from qurl_megatron.errors import ConfigError

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What a data sheet says of one GPU, or what was measured of a CPU. FLOP/s are dense."""

    gib: float  # of memory, as the driver counts them
    flops: Mapping[str, float]  # FLOP/s by number format, where engines have kernels for it
    hbm: float  # bytes/s
    nvlink: float  # bytes/s to the other GPUs of a machine, one way
    network: float  # bytes/s of its share of the machine's network, one way
    source: str
    cores: int | None = None  # of a CPU, which all ranks share; None: each rank has its own GPU
    threads: int = 0  # of each rank on a CPU; 0: its share of the cores
    alone: "Gpu | None" = None  # what one core does while the others rest
    native: frozenset[str] = frozenset()  # formats whose decode step is one native call
    turns: float = 1.0  # ranks to a core, where there are more of them than cores

    def busy(self, ranks: int) -> float:
        """Share of the machine's cores that ``ranks`` keep busy together; 0 on GPUs."""
        if self.cores is None:
            return 0.0
        return min(1.0, ranks * (self.threads or max(1, self.cores // ranks)) / self.cores)

    def together(self, ranks: int) -> "Gpu":
        """What ``ranks`` that compute at the same time do on a CPU, all together.

        Two cores are less than twice as fast as one, above all where they are threads of one; so
        rates between a core alone and all of them lie on a straight line.
        """
        assert self.cores and self.alone, "GPUs are not shared"
        more = max(0.0, self.busy(ranks) * self.cores - 1) / max(1, self.cores - 1)

        def rate(alone: float, all_cores: float) -> float:
            return alone + more * (max(alone, all_cores) - alone)

        flops = {name: rate(self.alone.flops[name], most) for name, most in self.flops.items()}
        return replace(self, flops=flops, hbm=rate(self.alone.hbm, self.hbm))

    def of_rank(self, ranks: int) -> "Gpu":
        """What each of ``ranks`` that compute at the same time has."""
        if self.cores is None:
            return self
        found = self.together(ranks)
        return replace(
            found,
            gib=self.gib / ranks,
            flops={name: rate / ranks for name, rate in found.flops.items()},
            hbm=found.hbm / ranks,
            turns=max(1.0, ranks / self.cores),
        )


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
    """The GPU of that name.

    Raises:
        ConfigError: it is not in the table, or engines cannot run ``quant.scheme`` on it.
    """
    if kind not in GPUS:
        raise ConfigError(f"--gpu {kind} is not in the table; known: {', '.join(GPUS)}")
    found = GPUS[kind]
    if scheme not in found.flops:
        others = ", ".join(name for name in found.flops)
        raise ConfigError(
            f"quant.scheme={scheme} has no kernels on {kind}; set quant.scheme to one of {others}"
        )
    return found


def unknown(name: str) -> Gpu:
    """A GPU that has no row in the table: nothing can be predicted of it."""
    return Gpu(gib=0, flops={}, hbm=0, nvlink=0, network=0, source=name)


def _constant(value: float, unit: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "source": source})


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What software attains on those GPUs, and what is assumed of the work."""

    gemm: float = _constant(
        0.5,
        "share of dense FLOP/s",
        "estimate: products of a training pass with what lies between them. Megatron-LM's README "
        "tells 41 to 48 % of H100s for whole steps of pre-training",
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
    launch_overlap: float = _constant(
        1.0, "share of the launches", "kernels run while the next ones are launched"
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
    decode_row: float = _constant(
        0.0, "s a response and step", "our rule: a GPU's are in decode_step, whatever their number"
    )
    decode_overlap: float = _constant(
        1.0,
        "share of the shorter",
        "the roofline: of reading weights and multiplying by them, the longer one counts",
    )
    request: float = _constant(
        0.0, "s a response", "our rule: to ask for it and to read it costs nothing beside a GPU's"
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
    disk: float = _constant(
        10 * GB,
        "bytes/s for all",
        "estimate of a shared file system",
    )
    rollout_over: float = _constant(
        1.0, "times this model", "--measured: what a run's rollouts took over their prediction"
    )
    training_over: float = _constant(
        1.0, "times this model", "--measured: likewise, its scores and updates"
    )
    publish_over: float = _constant(
        2.0,
        "times this model",
        "docs/performance-notes.md: 1.9 to 3.0 on CPUs; --measured: likewise, its publications",
    )
    mean_response: float = _constant(
        0.3, "share of rollout.max_new_tokens", "estimate; --mean-tokens says better"
    )
    mean_prompt: float = _constant(
        0.1, "share of data.max_prompt_tokens", "estimate; --mean-prompt-tokens says better"
    )
    spare: float = _constant(
        0.03, "share of a GPU's memory", "our rule: what a layout must leave, for fragments"
    )
    static_step: float = _constant(
        0.05, "share of free memory", "our rule: steps in which --mem-fraction-static is tried"
    )
    tail: float = _constant(
        0.5,
        "share of the rollout",
        "our rule: it is the longest response that limits, where equal ones would take less than "
        "this share",
    )
    no_room: float = _constant(
        0.8, "share of the rollout", "our rule, likewise, for a cache that would hold all responses"
    )
    worth: float = _constant(
        0.2,
        "share of the step",
        "our rule: scaling has stopped where twice the GPUs take off less than this",
    )


_STEPS = "docs/results/step_cpu.json"
_DECODED = "docs/results/decode_cpu.json and decode_small_cpu.json"
_BY_TORCH = f"{_DECODED}: BF16, FP32 and FP8 steps by torch"
_IN_ONE_CALL = f"{_DECODED}: INT8 steps in one native call"

CPU_SAYS: dict[str, tuple[float, str]] = {
    "gemm": (
        0.54,
        f"{_STEPS}, scores and updates by layout: small passes, norms and SwiGLU",
    ),
    "attention": (0.2, "estimate: 3 to 5 % of a training rank's time"),
    "layer_launch": (
        1.1e-3,
        f"{_STEPS}: scores and updates; 50 to 70 operators",
    ),
    "launch_overlap": (0.0, "operators run one after the other"),
    "training_latency": (
        2.4e-3,
        f"{_STEPS}, TP2: gloo over the loopback, ranks waiting for a core",
    ),
    "decode_latency": (0.5e-3, "estimate: gloo over the loopback, among an engine's ranks"),
    "decode_gemm": (0.43, _BY_TORCH),
    "decode_hbm": (0.43, _BY_TORCH),
    "decode_overlap": (0.0, f"{_BY_TORCH}; reading and multiplying take turns"),
    "decode_layer": (75e-6, _BY_TORCH),
    "decode_step": (0.66e-3, _BY_TORCH),
    "decode_row": (22e-6, _BY_TORCH),
    "request": (
        0.21e-3,
        f"{_STEPS}: what rollouts took beside their steps, HTTP and JSON",
    ),
}
"""What differs where ranks are processes on a CPU: value and source, by the name of a constant."""

NATIVE_SAYS: dict[str, tuple[float, str]] = {
    "decode_gemm": (0.73, _IN_ONE_CALL),
    "decode_hbm": (0.69, _IN_ONE_CALL),
    "decode_overlap": (1.0, _IN_ONE_CALL),
    "decode_layer": (10e-6, _IN_ONE_CALL),
    "decode_step": (0.28e-3, _IN_ONE_CALL),
    "decode_row": (14e-6, _IN_ONE_CALL),
}
"""What differs from ``CPU_SAYS`` where a decode step is one native call."""

LOOPBACK = 1.5 * GB
"""Bytes/s between two processes of a machine by gloo; estimate."""


ON_CPU = Constants(**{name: value for name, (value, _) in CPU_SAYS.items()})
NATIVE = replace(ON_CPU, **{name: value for name, (value, _) in NATIVE_SAYS.items()})


def constants_of(gpu: Gpu, scheme: str) -> Constants:
    """Those of a kind of machine whose engines have ``quant.scheme``, before any run has been
    measured on it."""
    if gpu.cores is None:
        return Constants()
    return NATIVE if scheme in gpu.native else ON_CPU


def _sources(gpu: Gpu, scheme: str) -> dict[str, str]:
    """Of each constant of ``constants_of``."""
    found = {item.name: item.metadata["source"] for item in fields(Constants)}
    if gpu.cores is not None:
        found |= {name: source for name, (_, source) in CPU_SAYS.items()}
    if scheme in gpu.native:
        found |= {name: source for name, (_, source) in NATIVE_SAYS.items()}
    return found


def table(kind: str, gpu: Gpu, constants: Constants, scheme: str) -> list[dict[str, Any]]:
    """Name, value, unit and source of every number."""
    usual, sources = constants_of(gpu, scheme), _sources(gpu, scheme)
    sheet = [("memory", gpu.gib, "GiB"), ("HBM", gpu.hbm / GB, "GB/s")]
    sheet += [("NVLink", gpu.nvlink / GB, "GB/s"), ("network", gpu.network / GB, "GB/s")]
    sheet += [(f"FLOP/s, {name}", value / 1e12, "T/s") for name, value in gpu.flops.items()]
    given = kind in GPUS and gpu != GPUS[kind]
    sheet_says = f"{gpu.source}; the network was given" if given else gpu.source
    rows = [
        {"name": f"{kind}: {name}", "value": value, "unit": unit, "source": sheet_says}
        for name, value, unit in sheet
    ]
    for item in fields(constants):
        value = getattr(constants, item.name)
        same = value == getattr(usual, item.name)
        source = sources[item.name] if same else "measured"
        rows.append(
            {"name": item.name, "value": value, "unit": item.metadata["unit"], "source": source}
        )
    return rows
