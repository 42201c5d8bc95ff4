"""Seconds of publishing weights to a real engine, by transport.

Two training ranks (TP2, BF16 weights with FP32 masters, no optimizer) hold a random model; one
engine is started per scheme and tensor size, and the transports publish to it in turns. Each is
made again for each turn, publishes once so that its slots exist, and is timed then. The limit is a
plain copy of the version's bytes in the host's memory, at the rate that all ranks reach at once.
Memory is the worst rank's high-water mark above its weights. Where there are GPUs each rank has
one, which the engine shares: ``--trainers 1`` needs a single one.

    python -m benchmarks.publish --out DIR
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from benchmarks.harness import measure as record_of
from benchmarks.harness import parser_of
from benchmarks.loss import high_water
from benchmarks.machine_limits import fastest
from benchmarks.repeats import Repeats, interleaved, yardstick
from qurl_megatron.bench.command import count
from qurl_megatron.bench.record import Case, Figure, progress
from qurl_megatron.bench.rollout_engines import config_of, model_folder
from qurl_megatron.config import (
    ModelConfig,
    ParallelConfig,
    QuantConfig,
    RolloutConfig,
    SyncConfig,
)
from qurl_megatron.engines.starting import refuse_not_installed
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.launch import launch
from qurl_megatron.tensors.arch import read_arch

TRANSPORTS = ("memory", "files", "group")


def parser() -> argparse.ArgumentParser:
    options = parser_of("publish", __doc__)
    add = options.add_argument
    add("--schemes", nargs="+", choices=["int8", "fp8", "none"], default=["int8", "fp8", "none"])
    add("--engine-tp", type=count, nargs="+", default=[1, 2], metavar="N", help="default 1 2")
    add("--trainers", type=count, default=2, metavar="N", help="training ranks; default 2")
    add("--engine", choices=["sglang", "embedded"], default="sglang", help="default sglang")
    add("--sglang-python", default="", metavar="PATH", help="Python that has SGLang")
    add("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    return options


def run(options: argparse.Namespace) -> list[Case]:
    """Return a case per scheme, tensor size and transport.

    Raises:
        ConfigError: no SGLang, or not this model.
    """
    rollout = RolloutConfig(
        backend=options.engine,
        engine_threads=1,
        start_timeout_s=500,
        sglang_python=options.sglang_python,
    )
    refuse_not_installed(rollout)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="bench-publish-") as folder:
        work = Path(folder)
        memory = Path("/dev/shm") / f"qurl-{work.name}"
        memory.mkdir()
        model = model_folder(options.model, work, empty=rollout.kind.starts_empty)
        try:
            arguments = (options, rollout, model, work, memory)
            status = launch(measure, arguments, options.trainers)
        finally:
            shutil.rmtree(memory)
        if status:
            raise ConfigError(f"bench publish: a rank left with code {status}; it says why above")
        subjects = json.loads((work / "measured.json").read_text(encoding="utf-8"))
    cases = []
    for scheme, engine_tp, transport, repeats in subjects:
        cases.append(case_of(scheme, engine_tp, transport, Repeats(**repeats), options))
    return cases


def measure(
    options: argparse.Namespace, rollout: RolloutConfig, model: Path, work: Path, memory: Path
) -> int:
    """Run one training rank; the leading one writes the measurements.

    Args:
        rollout: all but the engine's tensor size.
        model: folder from which engines start.
        memory: a folder in memory, for transports that write files.
    """
    import torch
    import torch.distributed as dist

    from qurl_megatron.actor.megatron import megatron_runtime
    from qurl_megatron.fleet.fleet import Fleet
    from qurl_megatron.wire.transport import settle_nccl

    torch.set_num_threads(1)
    settle_nccl()  # for the group transport
    parallel = ParallelConfig(tensor=options.trainers)
    with megatron_runtime(parallel) as ranks:
        policy = random_policy(options.model, parallel, ranks)
        subjects = []
        for scheme, tp in product(options.schemes, options.engine_tp):
            rollout = replace(rollout, engine_tensor=tp)
            with ExitStack() as stack:
                fleet = show = None
                if ranks.leads:
                    fleet = Fleet(
                        rollout,
                        model,
                        scheme=scheme,
                        log_dir=work / f"logs-{scheme}-tp{tp}",
                        vocabulary=policy.arch.vocab,
                    )
                    stack.enter_context(fleet)
                    show = partial(_show, f"{scheme} tp{tp}")
                dist.barrier()
                turns = PublishTurns(policy, rollout, fleet, scheme, work, memory)
                measured = interleaved(
                    {name: partial(turns.turn, name) for name in options.transports},
                    repeats=options.repeats,
                    # Of the leading rank alone: on both at once it would measure the other.
                    measure=yardstick if ranks.leads else lambda: 0.0,
                    seen=show,
                )
                subjects += [(scheme, tp, name, vars(each)) for name, each in measured.items()]
        if ranks.leads:
            text = json.dumps(subjects)
            (work / "measured.json").write_text(text, encoding="utf-8")
    return 0


def random_policy(shape: str, parallel: ParallelConfig, ranks):
    """Return a policy that can publish and not learn: beside an optimizer's state, a GPU of 80 GB
    has no room for 7 billion parameters and an engine."""
    from qurl_megatron.actor.build import build_model, transformer_config
    from qurl_megatron.actor.policy import Policy

    arch = read_arch(config_of(shape))
    config = transformer_config(arch, ModelConfig(path=shape, dtype="bfloat16"), parallel)
    gpt = build_model(arch, config, ranks)
    for parameter in gpt.parameters():
        parameter.data.normal_(0, 0.02)
        parameter.main_param = parameter.detach().float()  # as Megatron's optimizer does
    source: Any = SimpleNamespace(arch=arch)
    wrapped: Any = SimpleNamespace(module=gpt)
    absent: Any = None
    return Policy(source, 1.0, ranks, wrapped, absent, absent)


def _show(engine: str, transport: str, turn: dict[str, float]) -> None:
    progress(f"{engine}, {transport}: {turn['seconds']:.2f} s")


class PublishTurns:
    """One engine, to which transports publish in turns."""

    def __init__(
        self, policy, rollout: RolloutConfig, fleet, scheme: str, work: Path, memory: Path
    ) -> None:
        self._policy, self._rollout, self._fleet = policy, rollout, fleet
        self._work, self._memory = work, memory
        self._quant = QuantConfig(scheme=scheme, uaq_scale=1.0, diagnostics_every=0)
        self._version = 0

    def turn(self, transport: str) -> dict[str, float]:
        """Publish twice, and return the measurements of the second time."""
        import torch.distributed as dist

        from qurl_megatron.observe.metrics import merge, values
        from qurl_megatron.publish.publisher import Publisher, make_sender

        self._version += 2
        folder = self._work / f"turn-{self._version}"
        folder.mkdir(exist_ok=True)
        copy, device = _copy_gb_s(), self._policy.ranks.device.type
        sync = SyncConfig(transport=transport, dir=str(self._memory))  # type: ignore[arg-type]
        with high_water(device) as mark:
            sender = make_sender(sync, self._rollout, self._policy, folder)
            with Publisher(self._policy, self._fleet, self._quant, sync, sender) as publisher:
                publisher.publish(self._version - 1)
                dist.barrier()
                start, cpu_s = time.perf_counter(), time.process_time()
                engine_cpu_s = self._engine_s()
                metrics = publisher.publish(self._version)
                dist.barrier()
                seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
                engine_cpu_s = self._engine_s() - engine_cpu_s
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (metrics, cpu_s, copy, mark[0]))
        every_metric, cpu_seconds, copies, marks = zip(*of_ranks, strict=True)
        published = values(merge(every_metric))
        return {
            "seconds": seconds,
            "bytes": published["sync/bytes"],
            "paused_s": published["sync/paused_s"],
            "work_s": sum(cpu_seconds) + engine_cpu_s,
            "copy_gb_s": min(copies),
            "memory_gib": max(marks) / (1 << 30),
        }

    def _engine_s(self) -> float:
        """Return the CPU seconds of the engine's processes so far; 0 on the other ranks."""
        if not self._fleet:
            return 0.0
        (engine,) = self._fleet.engines()
        parent = psutil.Process(engine.process.popen.pid)
        times = [each.cpu_times() for each in (parent, *parent.children(recursive=True))]
        return sum(each.user + each.system for each in times)


def _copy_gb_s() -> float:
    """Return the GB/s of the fastest of some plain copies in memory."""
    import torch

    source, target = (torch.ones(128 << 20, dtype=torch.uint8) for _ in range(2))
    return source.nbytes / 1e9 / fastest(lambda: target.copy_(source))


def case_of(
    scheme: str,
    engine_tp: int,
    transport: str,
    repeats: Repeats[dict[str, float]],
    options: argparse.Namespace,
) -> Case:
    """Return the case of one transport to one engine."""
    turns = repeats.results
    size = turns[0]["bytes"]

    def figure(name: str, unit: str, key: str, **given: Any) -> Figure:
        values = [turn[key] for turn in turns]
        return Figure(name=name, unit=unit, better="lower", repeats=values, **given)

    copy_s = size / 1e9 / statistics.median(turn["copy_gb_s"] for turn in turns)
    return Case(
        name=f"{scheme}, engine TP{engine_tp}, {transport}",
        keys={
            "model": options.model,
            "engine": options.engine,
            "trainers": options.trainers,
            "scheme": scheme,
            "engine_tp": engine_tp,
            "way": transport,
        },
        figures=[
            figure("seconds", "s", "seconds", limit=copy_s, limit_of="one copy"),
            figure("work", "CPU s", "work_s"),
            figure("paused", "s", "paused_s"),
            figure("memory", "GiB", "memory_gib"),
        ],
        yardsticks=repeats.yardsticks,
        reasons=repeats.reasons,
        notes={"bytes": size},
    )


if __name__ == "__main__":
    sys.exit(record_of("publish", parser().parse_args(), run))
