"""Seconds of publishing to engines on two nodes, and the bytes that cross the link between them.

The nodes are network namespaces of this machine (root makes them), joined by a link of ``--gbit``
both ways. Each has a training rank of two (TP2, BF16 weights with FP32 masters) and an engine. The
ways take turns:

    relay     as a run publishes there
    files     sync.dir is in this machine's memory, which both nodes see: nothing crosses the link,
              so it is faster than any file system that nodes share
    gather    peers' way: whole BF16 weights are gathered on each node, and quantized there. It ends
              with codes in memory, which no engine has loaded

The limit is what the link needs for the bytes that a node gets, and after that ``memory``, the
local transport, measured with both ranks and both engines on one node.

    python -m benchmarks.publish_nodes --out DIR
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import psutil
import torch
import torch.distributed as dist

from benchmarks.harness import measure as record_of
from benchmarks.harness import parser_of
from benchmarks.network import CannotMake, Node, network
from benchmarks.publish import random_policy
from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.actor.policy import Policy
from qurl_megatron.bench.record import Case, Figure, in_turns, progress
from qurl_megatron.bench.rollout_engines import config_of, described, model_folder
from qurl_megatron.config import RunConfig, SyncConfig, load
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.place import place_under_launcher
from qurl_megatron.plan.memory import engine_weights
from qurl_megatron.publish.publisher import Publisher, make_sender
from qurl_megatron.quant import quantize
from qurl_megatron.tensors.arch import read_arch
from qurl_megatron.tensors.table import is_quantized
from qurl_megatron.training.each_node import engines_here

NODES = ("node1", "node2")
WAYS = {2: ("relay", "files", "gather"), 1: ("memory",)}  # by nodes
ROOT = Path(__file__).parents[1]


def parser() -> argparse.ArgumentParser:
    options = parser_of("publish_nodes", __doc__)
    add = options.add_argument
    add("--gbit", type=float, default=2.0, metavar="N", help="the link's rate; default 2")
    add("--scheme", choices=["int8", "fp8", "none"], default="int8", help="default int8")
    add("--work", type=Path, help=argparse.SUPPRESS)  # set: this process is a rank
    add("--nodes", type=int, help=argparse.SUPPRESS)
    return options


def run(options: argparse.Namespace) -> list[Case]:
    """Return a case per way.

    Raises:
        ConfigError: this machine makes no network namespaces, or a rank failed.
    """
    turns: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="publish-nodes-", dir="/dev/shm") as folder:
        work = Path(folder)
        model_folder(options.model, work, empty=False)
        try:
            with network(work, *NODES) as nodes:
                for node in nodes:
                    limit = ["rate", f"{options.gbit}gbit", "burst", "1mb", "latency", "5ms"]
                    node.do("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
                for count in WAYS:
                    turns |= _measured(nodes[:count], work, options)
        except CannotMake as error:
            raise ConfigError(f"no nodes can be made here: {error}") from None
    arch = read_arch(config_of(options.model))
    # By the plan: what the other node makes.
    half = engine_weights(arch, options.scheme, 1, 2) / 2
    link_s = half * 8 / 1e9 / options.gbit
    local_s = median(turn["seconds"] for turn in turns["memory"])
    cases = []
    for way, measured in turns.items():
        seconds = Figure(
            name="seconds",
            unit="s",
            better="lower",
            repeats=[turn["seconds"] for turn in measured],
            limit=link_s + local_s if way != "memory" else None,
            limit_of="link, then memory" if way != "memory" else "",
        )
        link = [turn["link"] / 1e6 for turn in measured]
        received = Figure(name="came to a node", unit="MB", better=None, repeats=link)
        keys = {"model": options.model, "scheme": options.scheme, "gbit": options.gbit, "way": way}
        notes = {"version_mb": turns["memory"][0]["bytes"] / 1e6, "half_mb": half / 1e6}
        cases.append(Case(name=way, keys=keys, figures=[seconds, received], notes=notes))
    return cases


def _measured(
    nodes: list[Node], work: Path, options: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """Run the two ranks on these nodes; return each way's turns."""
    count = len(nodes)
    torchrun = ["-m", "torch.distributed.run", f"--nnodes={count}", "--master-addr=node1"]
    torchrun += [f"--nproc-per-node={2 // count}", "--master-port=29500"]
    of_rank = [f"--model={options.model}", f"--repeats={options.repeats}", f"--work={work}"]
    of_rank += [f"--scheme={options.scheme}", f"--nodes={count}"]
    ranks = []
    for number, node in enumerate(nodes):
        command = [sys.executable, *torchrun, f"--node-rank={number}"]
        command = node.command(*command, "-m", "benchmarks.publish_nodes", *of_rank, cwd=ROOT)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        ranks.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
    if any([rank.wait() for rank in ranks]):
        raise ConfigError("a rank failed; it says why above")
    return json.loads((work / f"turns-{count}.json").read_text(encoding="utf-8"))


def rank_of(options: argparse.Namespace) -> int:
    """Run one training rank; the leading one writes the measurements."""
    torch.set_num_threads(1)
    place_under_launcher()
    work, run_dir = options.work, options.work / f"run-{options.nodes}"
    model = work / "model" if (work / "model").is_dir() else described(options.model)
    changes = [f"model.path={model}", "model.dtype=bfloat16", f"train.run_dir={run_dir}"]
    changes += [f"rollout.each_node={str(options.nodes > 1).lower()}", "rollout.engine_threads=1"]
    changes += [f"quant.scheme={options.scheme}", "quant.uaq_scale=1", "quant.diagnostics_every=0"]
    config = load("quickstart", changes)
    with ExitStack() as stack:
        ranks = stack.enter_context(megatron_runtime(config.parallel))
        policy = random_policy(options.model, config.parallel, ranks)
        if config.rollout.each_node:
            stack.enter_context(engines_here(config, ranks))
        fleet = None
        if ranks.leads:
            fleet = Fleet(
                config.rollout,
                model,
                scheme=config.quant.scheme,
                log_dir=run_dir / "logs",
                vocabulary=policy.arch.vocab,
            )
            stack.enter_context(fleet)
        dist.barrier()
        publishing = Publishing(config, policy, fleet)
        turns = in_turns(
            {way: partial(publishing.turn, way) for way in WAYS[options.nodes]},
            repeats=options.repeats,
            warm_up=1,
            seen=lambda way, turn: progress(f"{way}: {turn['seconds']:.2f} s") if fleet else None,
        )
        if fleet:
            (work / f"turns-{options.nodes}.json").write_text(json.dumps(turns), encoding="utf-8")
    return 0


class Publishing:
    """One policy and its fleet, to which the ways publish in turns."""

    def __init__(self, config: RunConfig, policy: Policy, fleet: Fleet | None) -> None:
        self._config, self._policy, self._fleet = config, policy, fleet
        self._version = 0

    def turn(self, way: str) -> dict[str, float]:
        """Publish twice, and return the measurements of the second time."""
        if way == "gather":
            return self._timed(lambda: _gather(self._policy, self._config.quant.scheme))
        folder = self._config.train.run_dir
        sync = SyncConfig(transport=way, dir=f"{folder}/versions")  # type: ignore[arg-type]
        sender = make_sender(sync, self._config.rollout, self._policy, Path(folder))

        def publish() -> int:
            self._version += 1
            return int(publisher.publish(self._version)["sync/bytes"].value)

        with Publisher(self._policy, self._fleet, self._config.quant, sync, sender) as publisher:
            publish()
            return self._timed(publish)

    def _timed(self, act: Callable[[], int]) -> dict[str, float]:
        dist.barrier()
        start, received = time.perf_counter(), _received()
        size = torch.tensor(act())
        dist.barrier()
        seconds = time.perf_counter() - start
        most = torch.tensor(_received() - received)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(size)
        return {"seconds": seconds, "link": most.item(), "bytes": size.item()}


def _received() -> int:
    """Return the bytes that have come to this node."""
    return psutil.net_io_counters(pernic=True)["eth0"].bytes_recv


def _gather(policy: Policy, scheme: str) -> int:
    """Have the whole version on both nodes, in memory, each tensor quantized there."""
    rank, kept = policy.ranks.rank, []
    for index in range(len(policy.hf_layout())):
        for shard in policy.hf_parameter(index, lambda parameter: parameter.detach()):
            whole = shard.value
            if shard.dim is not None:
                shapes: list = [None, None]
                dist.all_gather_object(shapes, whole.shape)
                parts = [whole.new_empty(shape) for shape in shapes]
                parts[rank] = whole.contiguous()
                moves = [dist.P2POp(dist.irecv, parts[1 - rank], 1 - rank)]
                moves.append(dist.P2POp(dist.isend, parts[rank], 1 - rank))
                for work in dist.batch_isend_irecv(moves):
                    work.wait()
                whole = torch.cat(parts, shard.dim)
            if is_quantized(shard.name) and scheme != "none":
                codes = quantize(whole, scheme)
                kept += [codes.values, codes.scale]
            else:
                kept.append(whole.clone())
    return sum(value.nbytes for value in kept)


def main() -> int:
    options = parser().parse_args()
    if options.work:
        return rank_of(options)
    return record_of("publish_nodes", options, run)


if __name__ == "__main__":
    sys.exit(main())
