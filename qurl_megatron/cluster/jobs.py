"""What each kind of job asks for and calls: a training run, a checkpoint tool, a benchmark, ...

A training run has a supervisor, ``qurl slurm attempt``; the other kinds are one command on one
node, which begins again, or goes on by itself, where Slurm requeues it.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.bench.options import BENCHMARKS
from qurl_megatron.cluster.cluster import ClusterConfig
from qurl_megatron.cluster.layout import Allocation, Component, lay_out
from qurl_megatron.cluster.script import HERE, Script
from qurl_megatron.cluster.steps import inside
from qurl_megatron.config import RunConfig
from qurl_megatron.kit.errors import ConfigError

LOGS = "runs/slurm"
"""Folder of the logs of jobs that have no run folder."""


@dataclass(frozen=True)
class Tool:
    """A kind of job that is one command on one node."""

    prefix: tuple[str, ...]  # before the words the user gives; {} stands for the first of them
    gpus: Callable[[Sequence[str]], bool]  # the user's words: does it take those of a node?
    names: str  # what the first word is
    known: Callable[[], Collection[str]] | None = None  # what it may be; None: anything


def _checkpoint_tools() -> list[str]:
    return sorted(
        p.stem for p in (Path(__file__).parents[2] / "checkpoints_tools").glob("[a-z]*.py")
    )


TOOLS = {
    "convert": Tool(
        ("python", "checkpoints_tools/{}.py"),
        gpus=lambda words: "te" in words,  # quantize --backend te
        names="a tool of checkpoints_tools",
        known=_checkpoint_tools,
    ),
    "bench": Tool(
        ("qurl", "bench", "{}"),
        gpus=lambda words: (
            words[0] in ("loss", "publish", "rollout")
            or any(word.endswith("cuda") for word in words)
        ),  # --device cuda, --device=cuda
        names="a benchmark of qurl bench",
        known=lambda: BENCHMARKS,
    ),
    "eval": Tool(
        ("qurl", "eval", "{}"), gpus=lambda words: "--url" not in words, names="a benchmark file"
    ),
    "study": Tool(("qurl", "slurm", "cell", "{}"), gpus=lambda _: True, names="a study file"),
}
KINDS = ("train", *TOOLS)


def training_job(config: RunConfig, cluster: ClusterConfig) -> Script:
    """The job of a run.

    Raises:
        ConfigError: the run does not divide over the cluster's nodes.
    """
    layout = lay_out(config.parallel, config.rollout, cluster.node)
    run_dir = Path(config.train.run_dir)
    requested = components(layout, cluster)
    return Script(
        name=_name(run_dir, cluster),
        output=f"{run_dir}/slurm/job.log".replace("%", "%%"),
        components=requested,
        command=("qurl", "slurm", "attempt", str(run_dir)),
        saves=True,
        # Slurm ends a heterogeneous job with any of its nodes, whatever it is asked.
        outlives=layout.rollout is not None and len(requested) == 1,
    )


def components(layout: Allocation, cluster: ClusterConfig) -> tuple[Component, ...]:
    """What the job asks for: one component, or two of a heterogeneous job."""
    if layout.rollout and cluster.job.layout == "hetjob":
        return layout.training, layout.rollout
    return (layout.whole,)


def _name(run_dir: Path, cluster: ClusterConfig) -> str:
    """What ``squeue`` shows. Jobs of a chain wait for every job of their name: two runs whose
    folders are called alike must not."""
    if cluster.job.again != "chain":
        return run_dir.name
    return f"{run_dir.name}-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]}"


def tool_job(kind: str, words: Sequence[str], cluster: ClusterConfig, *, tasks: int = 1) -> Script:
    """The job of a command.

    Args:
        kind: of ``TOOLS``.
        words: name of the tool, benchmark or study, and its own options.
        tasks: of an array.

    Raises:
        ConfigError: no such tool or benchmark.
    """
    tool = TOOLS[kind]
    if not words:
        raise ConfigError(f"--kind {kind} needs {tool.names}, and behind it what it is to be given")
    first, *further_words = words
    if tool.known:
        first = first.removesuffix(".py")
        if first not in tool.known():
            raise ConfigError(
                f"--kind {kind}: {first} is not {tool.names}; known: {', '.join(tool.known())}"
            )
    gpus = cluster.node.gpus if tool.gpus((first, *further_words)) else 0
    component = Component(nodes=1, tasks=1, gpus=gpus)
    command = (*(part.format(first) for part in tool.prefix), *further_words)
    step = ["srun", "--export=ALL", "--mpi=none", "--input=none", "--ntasks=1"]
    step.append(f"--cpus-per-task={component.cpus_per_task(cluster.node)}")
    return Script(
        name=f"{kind}-{Path(first).stem}",
        output=f"{LOGS}/%x-{'%A_%a' if tasks > 1 else '%j'}.log",
        components=(component,),
        command=(*step, *inside(cluster, command, HERE)),
        tasks=tasks,
    )
