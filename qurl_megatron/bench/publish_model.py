"""What publishing one version costs, from bandwidths: bytes are exact, seconds an estimate.

``python -m qurl_megatron.bench.publish_model --model qwen2.5-32b --gpus 8 --tp 8 --engines 4
--engine-tp 2 --nvlink-gbps 400 --ib-gbps 50 --disk-gbps 10``

Bytes come from the plan that the publisher follows. Each rank's phases follow from them and from
the rates of its machine; what overlaps counts as the longest, the rest as the sum:

    first bucket: quantize, put   then for each next one: max(quantize + put, load before)   load

On a machine with fewer cores than busy processes no overlap helps beyond all work over the cores.
``--check`` holds the model against the rows of a benchmark on this machine.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from qurl_megatron.rollout import plan
from qurl_megatron.weights import is_quantized
from qurl_megatron.weights.arch import Arch, read_arch
from qurl_megatron.weights.checkpoint import hf_shapes

TRANSPORTS = ("memory", "files", "group", "gathered")
MIB, GB = 1 << 20, 1e9

# Bytes of memory that each pass of plain torch operators reads and writes, on a GPU.
QUANTIZE_TRAFFIC = 37  # per FP32 weight: two for amax, then divide, round, clamp, cast
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

    @staticmethod
    def of_cpu(limits: Mapping[str, float], scheme: str, *, cores: int) -> "Rates":
        """From what ``bench.publish`` measured of its machine."""
        return Rates(
            quantize=limits[f"quantize_{'int8' if scheme == 'none' else scheme}_gbps"],
            cast=limits["cast_bf16_gbps"],
            copy=limits["copy_gbps"],
            hash=limits["hash_gbps"],
            link=limits["gloo_gbps"],
            disk=limits["copy_gbps"],  # /dev/shm
            cores=cores,
        )


@dataclass(frozen=True, kw_only=True)
class Setting:
    arch: Arch
    scheme: str
    trainer: plan.Layout
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
            found[f"{name}_scale"] = (shape[0], 1), 4
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
    trainer = plan.Layout(tensor=tensor, pipeline=stages)

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
def _sums(arch: Arch, of: str, trainer: plan.Layout, engine: int) -> dict[str, dict]:
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
    for transfer in plan.transfers(chosen, arch, trainer, engine):
        sums["source"][transfer.source] += transfer.bytes
        sums["engine_rank"][transfer.engine_rank] += transfer.bytes
    return sums


def predict(setting: Setting, transport: str, rates: Rates) -> Cost:
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
        put_s = put / GB * (1 / rates.copy + 1 / rates.hash)
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
    return Cost(
        bytes=whole,
        bytes_per_rank=round(put),
        quantize_s=quantize_s,
        put_s=put_s,
        load_s=load_s,
        seconds=seconds + calls * rates.call_s,
        work_s=work,
        buffer_mb=3 * min(setting.bucket_mb, put / MIB),  # two slots, and the next one's codes
    )


def _gathered(setting: Setting, rates: Rates) -> Cost:
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


def check(report: dict) -> list[dict]:
    """Predicted beside measured, for the rows of a benchmark on a CPU.

    CPU seconds do not depend on who else uses the machine; seconds do.
    """
    arch = make_arch(f"qwen2.5-{report['model'].lower()}")
    found = []
    for row in report["rows"]:
        transport = row["candidate"]
        if transport not in TRANSPORTS:
            continue
        setting = Setting(
            arch=arch,
            scheme=row["scheme"],
            trainer=plan.Layout(tensor=2),
            engines=1,
            engine_tp=row["engine_tp"],
            bucket_mb=report["bucket_mb"],
        )
        rates = Rates.of_cpu(report["limits"], row["scheme"], cores=report["machine"]["cores"])
        cost = predict(setting, transport, rates)
        found.append(
            {
                **{key: row[key] for key in ("scheme", "engine_tp", "candidate")},
                "bytes_predicted": cost.bytes,
                "bytes_measured": int(row["bytes"]),
                "seconds_predicted": round(cost.seconds, 3),
                "seconds_measured_min": row["seconds_min"],
                "seconds_ratio": round(row["seconds_min"] / cost.seconds, 2),
                "cpu_s_predicted": round(cost.work_s, 3),
                "cpu_s_measured": (worked := round(row["trainer_cpu_s"] + row["engine_cpu_s"], 3)),
                "cpu_s_ratio": round(worked / cost.work_s, 2),
            }
        )
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-32b")
    parser.add_argument("--gpus", type=int, help="of the trainer; default tp * pp")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--engine-tp", type=int, default=2)
    parser.add_argument("--hbm-gbps", type=float, default=3000, help="of a GPU's memory, GB/s")
    parser.add_argument("--nvlink-gbps", type=float, default=350, help="per GPU, one way, GB/s")
    parser.add_argument("--ib-gbps", type=float, default=45, help="per GPU, one way, GB/s")
    parser.add_argument("--disk-gbps", type=float, default=10, help="shared by all, GB/s")
    parser.add_argument("--bucket-mb", type=float, default=256)
    parser.add_argument("--check", type=Path, metavar="JSON", help="a benchmark's result instead")
    options = parser.parse_args(argv)
    if options.check:
        print(json.dumps(check(json.loads(options.check.read_text())), indent=1))
        return 0
    data, left = divmod(options.gpus or options.tp * options.pp, options.tp * options.pp)
    if left or not data:
        parser.error("--gpus must be a multiple of --tp times --pp")
    ways = {
        "memory (CUDA IPC)": ("memory", options.nvlink_gbps),
        "group, NVLink": ("group", options.nvlink_gbps),
        "group, network": ("group", options.ib_gbps),
        "files": ("files", options.ib_gbps),
        "gathered, NVLink": ("gathered", options.nvlink_gbps),
        "gathered, network": ("gathered", options.ib_gbps),
    }
    print(f"{'scheme':6} {'way':18} {'GB':>6} {'GB/rank':>7} {'quant':>6} {'put':>6} {'load':>6}")
    for scheme in ("int8", "fp8", "none"):
        setting = Setting(
            arch=make_arch(options.model),
            scheme=scheme,
            trainer=plan.Layout(tensor=options.tp, pipeline=options.pp, data=data),
            engines=options.engines,
            engine_tp=options.engine_tp,
            bucket_mb=options.bucket_mb,
        )
        for way, (transport, link) in ways.items():
            rates = Rates.of_gpus(hbm=options.hbm_gbps, link=link, disk=options.disk_gbps)
            cost = predict(setting, transport, rates)
            print(
                f"{scheme:6} {way:18} {cost.bytes / GB:6.1f} {cost.bytes_per_rank / GB:7.2f} "
                f"{cost.quantize_s:6.3f} {cost.put_s:6.3f} {cost.load_s:6.3f}  "
                f"{cost.seconds:6.2f} s, {cost.buffer_mb:.0f} MiB"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
