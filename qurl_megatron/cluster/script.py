"""The job script as a pure function: options of sbatch, the site's lines, and one call.

Nothing is decided in shell: ``qurl slurm attempt`` decides in the job. A training run has that
supervisor; every other kind of job is one command on one node.
"""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.bench.command import BENCHMARKS
from qurl_megatron.cluster.cluster import ClusterConfig
from qurl_megatron.cluster.layout import Component, gpus, inside, lay_out, variables
from qurl_megatron.config import RunConfig
from qurl_megatron.config.keys import require
from qurl_megatron.kit.errors import ConfigError

HEADER = "# Written by `qurl slurm`: change the recipe or the cluster file instead."
LOGS = "runs/slurm"
"""Folder of the logs of jobs that have no run folder."""

TOOLS = {
    "convert": ("qurl", "{}"),
    "bench": ("qurl", "bench", "{}"),
    "eval": ("qurl", "eval", "{}"),
    "study": ("qurl", "slurm", "cell", "{}"),
}
"""How the command of a kind of job begins; {} stands for the user's first word."""
FIRST_WORDS = {
    "convert": ["convert", "export", "quantize", "inspect", "diff"],
    "bench": list(BENCHMARKS),
}
"""The choices for that word; for the other kinds it is a file."""
KINDS = ("train", *TOOLS)


@dataclass(frozen=True)
class Script:
    """A job script's resources and command."""

    name: str
    output: str  # file of its output; may hold Slurm's patterns such as %j
    nodes: Component
    command: tuple[str, ...]
    tasks: int = 1  # of an array; 1 is no array
    saves: bool = False  # it wants a signal before its time is up
    outlives: bool = False  # it goes on when a node fails


def training_job(config: RunConfig, cluster: ClusterConfig) -> Script:
    """Describe the job of a training run."""
    layout = lay_out(config.parallel, config.rollout, cluster.node)
    run_dir = Path(config.train.run_dir)
    return Script(
        name=run_dir.name,
        output=f"{run_dir}/slurm/job.log".replace("%", "%%"),
        nodes=layout.whole,
        command=("qurl", "slurm", "attempt", str(run_dir)),
        saves=True,
        outlives=layout.rollout is not None,
    )


def tool_job(kind: str, words: Sequence[str], cluster: ClusterConfig, *, tasks: int = 1) -> Script:
    """Describe the job of a command.

    Args:
        kind: a key of ``TOOLS``.
        words: name of the tool, benchmark or study, and its own options.
        tasks: of an array.
    """
    if not words:
        raise ConfigError(f"--kind {kind} needs a tool, benchmark or file, and then its options")
    first, *options = words
    known = FIRST_WORDS.get(kind, [first])
    if first not in known:
        raise ConfigError(f"--kind {kind}: {first} is unknown; known: {', '.join(known)}")
    node_gpus = cluster.node.gpus if _takes_gpus(kind, first, options) else 0
    component = Component(nodes=1, tasks=1, gpus=node_gpus)
    command = [part.format(first) for part in TOOLS[kind]] + options
    step = ["srun", "--export=ALL", "--mpi=none", "--input=none", "--ntasks=1"]
    step.append(f"--cpus-per-task={component.cpus_per_task(cluster.node)}")
    return Script(
        name=first if kind == "convert" else f"{kind}-{Path(first).stem}",
        output=f"{LOGS}/%x-{'%A_%a' if tasks > 1 else '%j'}.log",
        nodes=component,
        command=(*step, *inside(cluster, command, os.getcwd())),
        tasks=tasks,
    )


def _takes_gpus(kind: str, first: str, options: Sequence[str]) -> bool:
    if kind == "convert":
        return "te" in options  # quantize --backend te
    if kind == "eval":
        return "--url" not in options
    if kind == "bench":
        return first == "step" or any("sglang" in word for word in options)
    return True  # a study trains


def render(job: Script, cluster: ClusterConfig) -> str:
    """Return the text of the script."""
    require(
        re.search(r"[\s'\"\\]", job.output) is None,
        f"train.run_dir: Slurm takes no log at {job.output!r}; use no white space, quotes or \\",
    )
    lines = ["#!/bin/bash", HEADER]
    lines += [f"#SBATCH {option}" for option in _options(job, cluster)]
    lines.append("")
    body = []
    for name, value in variables(cluster).items():
        body.append(f"export {name}={shlex.quote(value)}")
        if cluster.container.kind == "apptainer":  # an image's own go before those without prefix
            body.append(f"export APPTAINERENV_{name}={shlex.quote(value)}")
    body += cluster.site.prolog
    if body:
        lines += ["set -e", *body, ""]
    lines.append(f"exec {shlex.join(job.command)}")
    return "\n".join(lines) + "\n"


def _options(job: Script, cluster: ClusterConfig) -> list[str]:
    """Return the options of sbatch."""
    site, nodes = cluster.job, job.nodes
    options = [
        f"--job-name={job.name}",
        f"--output={job.output}",
        "--open-mode=append",
        # The submitter's shell stays out: its modules, and whatever secrets it has.
        "--export=NONE",
        "--requeue",
    ]
    if job.saves:
        options.append(f"--signal=B:USR1@{site.signal_s}")
    if job.outlives:
        options.append("--no-kill")
    if job.tasks > 1:
        options.append(f"--array=0-{job.tasks - 1}")
    named = {"partition": site.partition, "account": site.account, "qos": site.qos}
    options += [f"--{key}={value}" for key, value in named.items() if value]
    memory = nodes.memory_gib(cluster.node)
    options += [
        f"--time={site.time_limit}",
        f"--nodes={nodes.nodes}",
        f"--ntasks-per-node={nodes.tasks}",
        f"--cpus-per-task={nodes.cpus_per_task(cluster.node)}",
        f"--mem={memory}G" if memory else "--mem=0",
    ]
    if nodes.gpus:
        options.append(f"--gpus-per-node={gpus(nodes, cluster)}")
    return [*options, *site.extra]
