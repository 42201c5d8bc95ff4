"""The job script as a pure function: options of sbatch, the site's lines, and one call.

Nothing is decided in shell: ``qurl slurm attempt`` decides in the job. A training run has that
supervisor; any other job is one command on one node.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.cluster.cluster import ClusterConfig
from qurl_megatron.cluster.layout import Component, gpus, inside, lay_out
from qurl_megatron.config import RunConfig
from qurl_megatron.config.keys import require

HEADER = "# Written by `qurl slurm`: change the recipe or the cluster file instead."
LOGS = "runs/slurm"
"""Folder of the logs of jobs that have no run folder."""
COMMANDS = ("convert", "export", "quantize", "inspect", "diff", "eval", "bench", "study")
"""The commands that can be jobs of their own."""


@dataclass(frozen=True)
class Script:
    """A job script's resources and command."""

    name: str
    output: str  # file of its output; may hold Slurm's patterns such as %j
    nodes: Component
    command: tuple[str, ...]
    options: tuple[str, ...] = ()  # of sbatch, beside those of every job


def training_job(config: RunConfig, cluster: ClusterConfig) -> Script:
    """Describe the job of a training run."""
    layout = lay_out(config.parallel, config.rollout, cluster.node)
    run_dir = Path(config.train.run_dir)
    options = [f"--signal=B:USR1@{cluster.job.signal_s}"]
    if layout.rollout:  # it outlives an engine's node
        options.append("--no-kill")
    return Script(
        name=run_dir.name,
        output=f"{run_dir}/slurm/job.log".replace("%", "%%"),
        nodes=layout.whole,
        command=("qurl", "slurm", "attempt", str(run_dir)),
        options=tuple(options),
    )


def command_job(words: Sequence[str], cluster: ClusterConfig, node_gpus: int | None) -> Script:
    """Describe the job of a ``qurl`` command.

    Args:
        words: the command and its options.
        node_gpus: GPUs that it takes; None: a node's.
    """
    require(
        words[0] in COMMANDS,
        f"--kind command: {words[0]} is unknown; known: {', '.join(COMMANDS)}",
    )
    if node_gpus is None:
        node_gpus = cluster.node.gpus
    component = Component(nodes=1, tasks=1, gpus=node_gpus)
    step = ["srun", "--export=ALL", "--mpi=none", "--input=none", "--ntasks=1"]
    step.append(f"--cpus-per-task={component.cpus_per_task(cluster.node)}")
    return Script(
        name=words[0],
        output=f"{LOGS}/%x-%j.log",
        nodes=component,
        command=(*step, *inside(cluster, ["qurl", *words])),
    )


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
    for name, value in cluster.site.environment.items():
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
        *job.options,
    ]
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
