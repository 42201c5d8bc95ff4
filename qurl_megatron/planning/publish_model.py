"""What publishing one version costs, from bandwidths: bytes are exact, seconds an estimate.

Bytes come from the plan that the publisher follows. Each rank's phases follow from them and from
the rates of its machine; what overlaps counts as the longest, the rest as the sum:

    first bucket: quantize, put   then for each next one: max(quantize + put, load before)   load

On a machine with fewer cores than busy processes no overlap helps beyond all work over the cores.
``qurl plan`` takes it into its steps.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache

from qurl_megatron.publish import routes
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.tensors.table import hf_tensor, is_quantized
from qurl_megatron.weights.shapes import hf_shapes

TRANSPORTS = ("memory", "files", "group", "gathered")
MIB, GB = 1 << 20, 1e9

# Bytes of memory that each pass of plain torch operators reads and writes, on a GPU.
QUANTIZE_TRAFFIC = 29  # per FP32 weight: two for amax, then divide, round, cast
CAST_TRAFFIC = 6  # per FP32 weight
HASH_TRAFFIC = 31  # per byte that ``wire.word_sum`` reads: fourteen operators on words of 8 bytes
COPY_TRAFFIC = 2


@dataclass(frozen=True, kw_only=True)
class Rates:
    """GB/s of one rank's primitives, unless said otherwise."""

    quantize: float  # FP32 weights read
    cast: float  # FP32 weights read, for unquantized versions
    copy: float  # bytes copied within memory
    hash: float  # bytes summed
    link: float  # bytes to or from another rank
    disk: float  # of the folder that all share
    call_s: float = 0.005  # of one HTTP call to an engine
    cores: int | None = None  # that all ranks and engines share; None: each has its own device

    @staticmethod
    def of_gpus(*, hbm: float, link: float, disk: float) -> "Rates":
        """
        Args:
            hbm: GB/s of a GPU's memory.
            link: GB/s to another GPU, by NVLink or by the network.
        """
        return Rates(
            quantize=4 * hbm / QUANTIZE_TRAFFIC,
            cast=4 * hbm / CAST_TRAFFIC,
            copy=hbm / COPY_TRAFFIC,
            hash=hbm / HASH_TRAFFIC,
            link=link,
            disk=disk,
        )


@dataclass(frozen=True, kw_only=True)
class PublishSetting:
    arch: Arch
    scheme: str
    trainer: routes.Layout
    engines: int
    engine_tp: int
    bucket_mb: float = 256.0


@dataclass(frozen=True)
class Cost:
    """Of one version. Seconds are of the slowest rank; ``seconds`` is what they come to."""

    bytes: int  # of the version
    bytes_per_rank: int  # that the busiest training rank quantizes and puts
    quantize_s: float
    put_s: float
    load_s: float
    seconds: float
    work_s: float  # of all training and engine ranks together
    buffer_mb: float  # of a training rank, beyond its weights


def tensors(arch: Arch, scheme: str) -> dict[str, tuple[tuple[int, ...], int]]:
    """What a version holds: name -> (shape, bytes per element)."""
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, shape in hf_shapes(arch).items():
        if scheme != "none" and is_quantized(name):
            found[name] = shape, 1
            found[f"{name}_scale"] = hf_tensor(arch, f"{name}_scale").shape, 4
        else:
            found[name] = shape, 2
    return found


@dataclass(frozen=True)
class Volumes:
    """Bytes of one version, by who moves them; of the busiest rank but for ``whole``."""

    whole: int
    put: int  # by a training rank of one replica, to memory or files
    sent: int  # by it, cut to what each rank of one engine keeps
    linear: int  # FP32 weights of it that are quantized
    rest: int  # and that are not
    received: int  # by an engine rank


@cache
def volumes(arch: Arch, scheme: str, tensor: int, pipeline: int, engine_tp: int) -> Volumes:
    """From the plan that the publisher follows.

    All layers are alike, and so are all stages between the first and the last: so the plan is made
    for one and two layers on each of two stages at most, and the rest follows in a straight line.
    """
    version = tensors(arch, scheme)
    stages = min(pipeline, 2)
    trainer = routes.Layout(tensor=tensor, pipeline=stages)

    def most(of: str, engine: int, by: str) -> int:
        """Bytes of the busiest ``by``, "source" or "engine_rank"."""
        one, two = (
            _sums(replace(arch, num_layers=stages * n), of, trainer, engine)[by] for n in (1, 2)
        )
        known = stages if by == "engine_rank" else 1  # layers in the first; in it a rank has all
        layers = arch.num_layers if by == "engine_rank" else arch.num_layers // pipeline
        return max(a + (layers - known) * (two[key] - a) // known for key, a in one.items())

    return Volumes(
        whole=sum(math.prod(shape) * size for shape, size in version.values()),
        put=most(scheme, 1, "source"),
        sent=most(scheme, engine_tp, "source"),
        linear=most("quantized weights", 1, "source"),
        rest=most("other weights", 1, "source"),
        received=most(scheme, engine_tp, "engine_rank"),
    )


@cache
def _sums(arch: Arch, of: str, trainer: routes.Layout, engine: int) -> dict[str, dict]:
    """Bytes by training rank ("source") and by engine rank.

    Args:
        of: a scheme's version, or the FP32 weights that are quantized, or the others.
    """
    if of.endswith("weights"):
        chosen = {
            name: (shape, 4)
            for name, shape in hf_shapes(arch).items()
            if is_quantized(name) == of.startswith("quantized")
        }
    else:
        chosen = tensors(arch, of)
    sums: dict[str, dict] = {"source": defaultdict(int), "engine_rank": defaultdict(int)}
    for transfer in routes.transfers(chosen, arch, trainer, engine):
        sums["source"][transfer.source] += transfer.bytes
        sums["engine_rank"][transfer.engine_rank] += transfer.bytes
    return sums


def predict(setting: PublishSetting, transport: str, rates: Rates) -> Cost:
    """Seconds of one publication by ``memory``, ``files`` or ``group``, or ``gathered``."""
    if transport == "gathered":
        return _gathered(setting, rates)
    trainer, tp = setting.trainer, setting.engine_tp
    moved = volumes(setting.arch, setting.scheme, trainer.tensor, trainer.pipeline, tp)
    share = 1 / trainer.data  # replicas take turns, bucket by bucket
    put, read, other = share * moved.put, share * moved.linear, share * moved.rest
    kind = rates.cast if setting.scheme == "none" else rates.quantize
    quantize_s = (read / kind + other / rates.cast) / GB

    whole, received = moved.whole, moved.received
    load_s = received / GB * (1 / rates.hash + 1 / rates.copy)
    if transport == "memory":
        put_s = put / GB / rates.hash  # made in place
        if not rates.cores:  # the engine's GPU reads the trainer's
            load_s += received / rates.link / GB
    elif transport == "files":
        put_s = put / GB * (1 / rates.copy + 1 / rates.hash)
        if not rates.cores:
            put_s = max(put_s, whole / rates.disk / GB)
            load_s = max(load_s, setting.engines * whole / rates.disk / GB)
    else:
        sent = share * moved.sent
        put_s = sent / GB * (1 / rates.copy + 1 / rates.hash)
        load_s += max(setting.engines * sent, received) / rates.link / GB

    count = max(1, math.ceil(put / (setting.bucket_mb * MIB)))
    ahead, behind = (quantize_s + put_s) / count, load_s / count
    seconds = ahead + (count - 1) * max(ahead, behind) + behind
    ranks = trainer.tensor * trainer.pipeline * trainer.data
    work = ranks * (quantize_s + put_s) + setting.engines * tp * load_s
    if rates.cores:
        seconds = max(seconds, work / rates.cores)
    calls = 11 + count + (transport == "group")
    buffers = 2 if transport == "memory" else 3  # two slots, and the next one's codes
    return Cost(
        bytes=whole,
        bytes_per_rank=round(put),
        quantize_s=quantize_s,
        put_s=put_s,
        load_s=load_s,
        seconds=seconds + calls * rates.call_s,
        work_s=work,
        buffer_mb=buffers * min(setting.bucket_mb, put / MIB),
    )


def _gathered(setting: PublishSetting, rates: Rates) -> Cost:
    """The straightforward way: BF16 gathered over TP, quantized whole, one thing after another."""
    trainer, tp = setting.trainer, setting.engine_tp
    moved = volumes(setting.arch, setting.scheme, trainer.tensor, trainer.pipeline, tp)
    whole, received = moved.whole, moved.received
    plain = tensors(setting.arch, "none")
    bf16 = sum(math.prod(shape) * size for shape, size in plain.values()) / trainer.pipeline
    gather_s = bf16 * (trainer.tensor - 1) / trainer.tensor / rates.link / GB
    gather_s += 2 * bf16 / rates.copy / GB  # into the gathered parts, and joined
    linear = sum(math.prod(s) for n, (s, _) in plain.items() if is_quantized(n)) / trainer.pipeline
    quantize_s = 0.0 if setting.scheme == "none" else 4 * linear / rates.quantize / GB
    sent = whole / trainer.pipeline
    put_s = sent / GB * (1 / rates.copy + 1 / rates.hash)
    load_s = received / GB * (1 / rates.copy + 1 / rates.hash)
    if not rates.cores:
        load_s += setting.engines * sent / rates.link / GB
    return Cost(
        bytes=whole,
        bytes_per_rank=round(sent),
        quantize_s=gather_s + quantize_s,
        put_s=put_s,
        load_s=load_s,
        seconds=gather_s + quantize_s + put_s + load_s + 8 * rates.call_s,
        work_s=trainer.tensor * gather_s + quantize_s + put_s + setting.engines * tp * load_s,
        buffer_mb=3 * min(setting.bucket_mb, bf16 / MIB),  # gathered, joined, quantized
    )
