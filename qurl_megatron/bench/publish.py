"""Seconds and memory of publishing weights to a real SGLang engine, beside the straightforward way.

Two training ranks (TP2, BF16 weights with FP32 masters) hold a random model; one engine is started
empty per scheme and tensor size. Then our transports and ``benchmarks/peers/gathered.py`` publish
in turns. Ours are made again for each turn, publish once so that their slots exist, and are timed
then. The engine must give the same log-probs after all of them. Beside every turn stand the
yardstick and what a plain copy ran at on both ranks: such a copy of the version's bytes is the
limit. The prediction is ``publish_model``'s, from this machine's rates.

Memory is the highest of what all processes of one side have for themselves (RssAnon), and of what
our files and slots in /dev/shm take, above what it was before the sender was made. Pages of files
on a disk are not counted: the system takes them back when it needs to.
"""

import argparse
import ctypes
import json
import os
import re
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from qurl_megatron.bench.options import chosen
from qurl_megatron.bench.peer import checkout, peer
from qurl_megatron.bench.random_model import config_of, write_random
from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.repeats import load_reasons, progress, yardstick
from qurl_megatron.config import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    QuantConfig,
    RolloutConfig,
    SyncConfig,
)
from qurl_megatron.engines.sglang.starting_sglang import sglang_python
from qurl_megatron.errors import ConfigError
from qurl_megatron.planning.publish_model import TRANSPORTS, PublishSetting, Rates, predict
from qurl_megatron.publish import routes
from qurl_megatron.runtime.launch import launch
from qurl_megatron.tensors.arch import Arch, read_arch
from qurl_megatron.weights.shapes import parameter_count

OWN = {"bf16": "none"}  # quant.scheme of a name that users give
SHOWN = {scheme: name for name, scheme in OWN.items()}
OURS = ("memory", "files", "files, staged", "files on disk", "group")
GATHERED: dict[str, tuple[Any, bool | None]] = {
    "gathered": ("loader", None),
    "gathered, buckets": ("loader", True),
    "gathered, from_tensor": ("from_tensor", True),
    "gathered, from_disk": ("from_disk", None),
}
MIB = 1 << 20
SAMPLE_S = 0.02
PROMPT = list(range(100, 124))
TRAINERS = 2


@dataclass(frozen=True)
class PublishPlan:
    """What the ranks shall do; they all follow it in step."""

    model: Path
    work: Path
    disk: Path  # a folder that is not in memory
    cases: tuple[tuple[str, int], ...]  # (scheme, tensor size of the engine)
    candidates: tuple[str, ...]
    turns: int
    bucket_mb: float

    def of(self, scheme: str) -> list[str]:
        """The candidates that can bring weights of this scheme."""
        own = ("gathered, from_tensor", "gathered, from_disk")
        return [c for c in self.candidates if scheme == "none" or c not in own]


def take_turns(plan: PublishPlan) -> int:
    """One training rank."""
    import torch
    import torch.distributed as dist

    from qurl_megatron.fleet.fleet import Fleet
    from qurl_megatron.model.policy import Policy
    from qurl_megatron.runtime.megatron import megatron_runtime
    from qurl_megatron.wire.facts import settle_nccl

    torch.set_num_threads(1)
    settle_nccl()  # for the group transport
    parallel = ParallelConfig(tensor=TRAINERS)
    with megatron_runtime(parallel) as ranks:
        model = ModelConfig(path=str(plan.model), dtype="bfloat16")
        policy = Policy.build(model, parallel, OptimizerConfig(), ranks)
        limits = measure_limits(ranks)
        if ranks.leads:
            write(plan, {"limits": limits})
        for scheme, tp in plan.cases:
            rollout = RolloutConfig(
                backend="sglang", engine_tensor=tp, engine_threads=1, start_timeout_s=500
            )
            logs = plan.work / f"logs-{scheme}-tp{tp}"
            started = time.perf_counter()
            with (
                Fleet(
                    rollout,
                    plan.model,
                    scheme=scheme,
                    log_dir=logs,
                    vocabulary=policy.arch.vocab,
                )
                if ranks.leads
                else nullcontext() as fleet
            ):
                dist.barrier()
                if ranks.leads:
                    progress(f"{scheme} tp{tp}: engine up in {time.perf_counter() - started:.0f} s")
                case = PublishTurns(plan, policy, rollout, fleet, scheme, tp)
                names = plan.of(scheme)
                case.warm_up(names[0])
                for turn in range(plan.turns):
                    for name in names[turn % len(names) :] + names[: turn % len(names)]:
                        case.turn(name)
    return 0


class PublishTurns:
    """One engine, to which candidates publish in turns."""

    def __init__(self, plan, policy, rollout, fleet, scheme, tp) -> None:
        self.plan, self.policy, self.rollout, self.fleet = plan, policy, rollout, fleet
        self.scheme, self.tp = scheme, tp
        self.version = 0
        self.log_probs: list[float] | None = None

    def turn(self, name: str) -> None:
        """Publish twice; the leading rank writes what the second time took."""
        import torch.distributed as dist

        ctypes.CDLL("libc.so.6").malloc_trim(0)
        copy = copy_gbps(16 * MIB)
        watched: list[Any] = [None] * TRAINERS
        dist.all_gather_object(watched, os.getpid())
        dist.barrier()
        memory = Watch(watched, self.fleet, self.plan) if self.fleet else None
        before = yardstick() if self.fleet else 0.0
        dist.barrier()
        folder = Path(tempfile.mkdtemp(dir=self.plan.work)) if self.fleet else None
        box: list[Any] = [folder]
        dist.broadcast_object_list(box)
        with memory or nullcontext(), self.made(name, box[0]) as publish:
            if name not in GATHERED:  # which keeps nothing from one version to the next
                publish(self.version)
            dist.barrier()
            start, before_work = time.perf_counter(), time.process_time()
            engine_worked = memory.cpu_seconds() if memory else 0.0
            found = publish(self.version + 1)
            dist.barrier()
            seconds, worked = time.perf_counter() - start, time.process_time() - before_work
            engine_worked = memory.cpu_seconds() - engine_worked if memory else 0.0
        self.version += 2
        measured: list = [None] * TRAINERS
        dist.all_gather_object(measured, (copy, worked))
        copies, work = zip(*measured, strict=True)
        if memory:
            self.agree(name)
            record = {
                "scheme": self.scheme,
                "engine_tp": self.tp,
                "candidate": name,
                "seconds": seconds,
                **found,
                "trainer_cpu_s": sum(work),
                "engine_cpu_s": engine_worked,
                "trainer_mib": memory.trainer / MIB,
                "engine_mib": memory.engine / MIB,
                "yardstick": before,
                "copy_gbps": min(copies),
            }
            progress(f"{self.scheme} tp{self.tp}, {name}: {seconds:.2f} s")
            write(self.plan, record)

    def warm_up(self, name: str) -> None:
        """An engine that was started empty gets its memory when it is first written to."""
        with self.made(name, self.plan.work / "warm-up") as publish:
            publish(self.version)
        self.version += 1

    @contextmanager
    def made(self, name: str, folder: Path) -> Iterator[Callable[[int], dict]]:
        if name in GATHERED:
            way, bucketed = GATHERED[name]
            limit = self.plan.bucket_mb * MIB if bucketed else float("inf")
            place = memory_folder(self.plan) / folder.name
            gathered = peer("gathered").Gathered(
                self.policy, self.fleet, self.scheme, way, place, limit
            )
            try:
                yield lambda version: asdict(gathered.publish(version))
            finally:
                gathered.close()
            return
        from qurl_megatron.observe.metrics import merge, values
        from qurl_megatron.publish.publisher import Publisher
        from qurl_megatron.publish.senders import make_sender

        place = self.plan.disk if name == "files on disk" else memory_folder(self.plan)
        transport: Any = re.split(r"\W", name)[0]  # one of the section's
        sync = SyncConfig(
            transport=transport,
            dir=str(place),
            bucket_mb=self.plan.bucket_mb,
            keep=1,
        )
        quant = QuantConfig(scheme=self.scheme, uaq_scale=1.0, diagnostics_every=0)
        sender = make_sender(sync, self.rollout, self.policy, folder)

        def publish(version: int) -> dict:
            import torch.distributed as dist

            gathered: list = [None] * TRAINERS
            dist.all_gather_object(gathered, publisher.publish(version))
            found = values(merge(gathered))
            return {key.removeprefix("sync/"): value for key, value in found.items()}

        stage = name == "files, staged"
        with Publisher(self.policy, self.fleet, quant, sync, sender, stage=stage) as publisher:
            yield publish

    def agree(self, name: str) -> None:
        """The engine answers as after the other candidates."""
        (engine,) = self.fleet.serving()
        scored = engine.api.score(PROMPT, start=1)
        if self.log_probs is None:
            self.log_probs = scored
        worst = max(abs(a - b) for a, b in zip(self.log_probs, scored, strict=True))
        assert worst < 1e-5, f"{name}: log-probs differ by {worst} from those of the first"


class Watch:
    """Two sides' memory, from a thread of its own; afterwards the peaks above the start."""

    def __init__(self, trainers: Sequence[int], fleet, plan: PublishPlan) -> None:
        (engine,) = fleet.engines()
        parent = psutil.Process(engine.process.popen.pid)
        self._engines = [parent.pid, *(child.pid for child in parent.children(recursive=True))]
        self._trainers = trainers
        self._shared = (f"torch_{os.getpid()}", "qurl-")
        self._own = {path for path in Path("/dev/shm").glob("qurl-*") if not _ours(path, plan)}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.trainer = self.engine = 0

    def cpu_seconds(self) -> float:
        """Of the engine's processes so far; to the hundredth."""
        times = [psutil.Process(pid).cpu_times() for pid in self._engines]
        return sum(each.user + each.system for each in times)

    def __enter__(self) -> "Watch":
        self._rest = self._look()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            trainer, engine = (
                now - rest for now, rest in zip(self._look(), self._rest, strict=True)
            )
            self.trainer, self.engine = max(self.trainer, trainer), max(self.engine, engine)

    def _look(self) -> tuple[int, int]:
        shared = sum(
            bytes_under(path)
            for path in Path("/dev/shm").iterdir()
            if path.name.startswith(self._shared) and path not in self._own
        )
        trainers, engines = (sum(map(anonymous, p)) for p in (self._trainers, self._engines))
        return trainers + shared, engines


def _ours(path: Path, plan: PublishPlan) -> bool:
    return path == memory_folder(plan)


def memory_folder(plan: PublishPlan) -> Path:
    return Path("/dev/shm") / f"qurl-bench-{plan.work.name}"


def anonymous(pid: int) -> int:
    """Bytes that a process has for itself; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    lines = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return 1024 * int(lines[0].split()[1]) if lines else 0


def bytes_under(path: Path) -> int:
    """What a file or folder takes, while others write and remove there."""
    try:
        if not path.is_dir():
            return 512 * path.stat().st_blocks
        return sum(bytes_under(inner) for inner in path.iterdir())
    except FileNotFoundError:
        return 0


def copy_gbps(size: int) -> float:
    """Bytes per second that a plain copy in memory brings over, in GB/s."""
    import torch

    source = torch.ones(8, size, dtype=torch.uint8)
    target = torch.ones(8, size, dtype=torch.uint8)
    return rate(8 * size, lambda: target.copy_(source))


def rate(size: int, act: Callable[[], object]) -> float:
    """GB/s of the fastest of some repetitions."""
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return size / 1e9 / min(seconds)


def measure_limits(ranks) -> dict[str, float]:
    """GB/s of the machine's primitives, one thread on each rank, both at once."""
    import torch
    import torch.distributed as dist

    from qurl_megatron.quant import quantize
    from qurl_megatron.wire.message import checksum

    weight = torch.randn(4864, 896)
    data = torch.ones(64 * MIB, dtype=torch.uint8)

    def exchange() -> None:
        if ranks.rank == 0:
            dist.send(data, 1)
        else:
            dist.recv(data, 0)

    found = {}
    for name, size, act in (
        ("copy_gbps", 128 * MIB, None),
        ("hash_gbps", len(data), lambda: checksum(data)),
        ("quantize_int8_gbps", weight.nbytes, lambda: quantize(weight, "int8")),
        ("quantize_fp8_gbps", weight.nbytes, lambda: quantize(weight, "fp8")),
        ("cast_bf16_gbps", weight.nbytes, lambda: weight.bfloat16()),
        ("gloo_gbps", len(data), exchange),
    ):
        dist.barrier()
        found[name] = copy_gbps(16 * MIB) if act is None else rate(size, act)
    return {name: round(value, 3) for name, value in found.items()}


def write(plan: PublishPlan, record: dict) -> None:
    with (plan.work / "records.jsonl").open("a") as out:
        out.write(json.dumps(record) + "\n")


def cases_of(
    records: Sequence[dict], *, arch: Arch, model: str, rates: dict[str, float], bucket_mb: float
) -> list[Case]:
    """One case per scheme, engine and candidate.

    Args:
        records: of all turns.
        rates: GB/s, of ``measure_limits``.
    """
    turns: dict[tuple, list[dict]] = {}
    for record in records:
        key = record["scheme"], record["engine_tp"], record["candidate"]
        turns.setdefault(key, []).append(record)
    return [
        _case(these, arch=arch, model=model, rates=rates, bucket_mb=bucket_mb)
        for these in turns.values()
    ]


def _case(
    turns: Sequence[dict], *, arch: Arch, model: str, rates: dict[str, float], bucket_mb: float
) -> Case:
    first = turns[0]
    scheme, tp, candidate = (first[key] for key in ("scheme", "engine_tp", "candidate"))
    cost = None
    if candidate in TRANSPORTS:
        setting = PublishSetting(
            arch=arch,
            scheme=scheme,
            trainer=routes.Layout(tensor=TRAINERS),
            engines=1,
            engine_tp=tp,
            bucket_mb=bucket_mb,
        )
        cost = predict(setting, candidate, Rates.of_cpu(rates, scheme, cores=os.cpu_count() or 1))
    copy_s = first["bytes"] / 1e9 / statistics.median(turn["copy_gbps"] for turn in turns)

    def figure(name: str, unit: str, of: Callable[[dict], float], **given: Any) -> Figure:
        return Figure(name=name, unit=unit, better="lower", repeats=[of(t) for t in turns], **given)

    yardsticks = [turn["yardstick"] for turn in turns]
    return Case(
        name=f"{SHOWN.get(scheme, scheme)}, engine TP{tp}, {candidate}",
        keys={
            "model": model,
            "scheme": SHOWN.get(scheme, scheme),
            "engine_tp": tp,
            "way": candidate,
            "bucket_mb": bucket_mb,
        },
        figures=[
            figure(
                "seconds",
                "s",
                lambda turn: turn["seconds"],
                limit=copy_s,
                limit_of="one copy",
                predicted=cost.seconds if cost else None,
            ),
            figure(
                "work",
                "CPU s",
                lambda turn: turn["trainer_cpu_s"] + turn["engine_cpu_s"],
                predicted=cost.work_s if cost else None,
            ),
            figure("paused", "s", lambda turn: turn["paused_s"]),
            figure("peak memory", "MiB", lambda turn: turn["trainer_mib"] + turn["engine_mib"]),
        ],
        yardsticks=yardsticks,
        reasons=load_reasons(yardsticks),
        notes={"bytes": first["bytes"], **shares(turns, 4 * parameter_count(arch))},
    )


def shares(turns: Sequence[dict], fp32_bytes: int) -> dict[str, Any]:
    """Of its phases: seconds, the shares of what a plain copy takes, and how much they overlap.

    Args:
        fp32_bytes: of the masters of the whole model.
    """
    phases = [key for key in ("gather_s", "quantize_s", "put_s", "load_s") if key in turns[0]]
    found: dict[str, Any] = {
        key: round(statistics.median(turn[key] for turn in turns), 4) for key in phases
    }
    seconds = statistics.median(turn["seconds"] for turn in turns)
    copy = 1e9 * statistics.median(turn["copy_gbps"] for turn in turns)
    size = turns[0]["bytes"]
    # 0: one thing after another. Ranks and engine at the same work count once each.
    found["overlap"] = round(max(0.0, 1 - seconds / (sum(found.values()) or seconds)), 3)
    if "put_s" in found and turns[0]["candidate"] in OURS:
        # A copy reads and writes each byte, quantizing reads four or more and writes one or two.
        moved = (fp32_bytes + size) / 2 / TRAINERS
        found["quantize_share"] = round(moved / copy / found["quantize_s"], 3)
        found["put_share"] = round(size / TRAINERS / copy / found["put_s"], 3)
    return found


def run(options: argparse.Namespace) -> list[Case]:
    """
    Raises:
        ConfigError: no SGLang, or not this model; an installed wheel, which has no peers.
    """
    names = chosen(options.candidates, [*OURS, *GATHERED], "--candidates")
    if any(name in GATHERED for name in names):
        own = " ".join(f"'{name}'" for name in OURS)
        checkout("benchmarks/peers/gathered.py", f", or give --candidates {own}")
    sglang_python(RolloutConfig().sglang_python)  # or says what to install
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir=options.work, prefix="bench-publish-") as folder:
        work = Path(folder)
        config = config_of(options.model)
        write_random(config, work / "model")
        (work / "disk").mkdir()
        todo = PublishPlan(
            model=work / "model",
            work=work,
            disk=work / "disk",
            cases=tuple((OWN.get(s, s), tp) for s in options.schemes for tp in options.engine_tp),
            candidates=tuple(names),
            turns=options.repeats,
            bucket_mb=options.bucket_mb,
        )
        shared = memory_folder(todo)
        shared.mkdir()
        try:
            status = launch(take_turns, (todo,), TRAINERS)
        finally:
            shutil.rmtree(shared)
        if status:
            raise ConfigError(f"bench publish: a rank left with code {status}; it says why above")
        rates, *records = map(json.loads, (work / "records.jsonl").read_text().splitlines())
    return cases_of(
        records,
        arch=read_arch(config),
        model=options.model,
        rates=rates["limits"],
        bucket_mb=options.bucket_mb,
    )
