"""The job script as a pure function: options of sbatch, the site's lines, and one call.

The same recipe and cluster file give the same text, on every machine and day. Nothing is decided in
shell; what has to be decided in the job, ``qurl slurm attempt`` does.
"""

import re
import shlex
from dataclasses import dataclass

from qurl_megatron.cluster.cluster import ClusterConfig
from qurl_megatron.cluster.layout import Component
from qurl_megatron.cluster.steps import gpus, variables
from qurl_megatron.config.keys import require

HEADER = "# Written by `qurl slurm`: change the recipe or the cluster file instead."

HERE = "\0"
"""In a command, at the end of a word: the folder in which the job was submitted. No word that a
user gives holds it."""


@dataclass(frozen=True)
class Script:
    """What one script asks for and runs."""

    name: str
    output: str  # file of what it prints; Slurm's patterns such as %j stand for themselves
    components: tuple[Component, ...]  # several make a heterogeneous job
    command: tuple[str, ...]
    tasks: int = 1  # of an array; 1 is no array
    saves: bool = False  # it wants a signal before its time is up, and goes on in another job
    outlives: bool = False  # a node that fails: it goes on with those that are left


def render(job: Script, cluster: ClusterConfig) -> str:
    """The text of the script.

    Raises:
        ConfigError: a name that #SBATCH lines cannot carry.
    """
    require(
        re.search(r"[\s'\"\\]", job.output) is None,
        f"train.run_dir: Slurm takes no log at {job.output!r}; set it to a folder without white "
        "space, quotes and backslashes",
    )
    lines = ["#!/bin/bash", HEADER]
    options = _job_options(job, cluster)
    for component in job.components:
        lines += [f"#SBATCH {option}" for option in options + _nodes(component, cluster)]
        lines.append("#SBATCH hetjob")
        options = []
    lines[-1] = ""
    if body := [*_exports(cluster), *cluster.site.prolog]:
        lines += ["set -e", *body, ""]
    lines.append(f"exec {_shell(job.command)}")
    return "\n".join(lines) + "\n"


def _job_options(job: Script, cluster: ClusterConfig) -> list[str]:
    """Those that stand once, whatever the number of components."""
    chained = job.saves and cluster.job.again == "chain"
    options = [
        f"--job-name={job.name}",
        f"--output={job.output}",
        "--open-mode=append",
        # The submitter's shell stays out: its modules, and whatever secrets it has.
        "--export=NONE",
        "--no-requeue" if chained else "--requeue",
    ]
    if chained:
        options.append("--dependency=singleton")
    if job.saves:
        options.append(f"--signal=B:USR1@{cluster.job.signal_s}")
    if job.outlives:
        options.append("--no-kill")
    if job.tasks > 1:
        options.append(f"--array=0-{job.tasks - 1}")
    return options


def _nodes(component: Component, cluster: ClusterConfig) -> list[str]:
    """Those of one component, which inherits little from the first."""
    site, node = cluster.job, cluster.node
    named = {"partition": site.partition, "account": site.account, "qos": site.qos}
    memory = component.memory_gib(node)
    options = [f"--{key}={value}" for key, value in named.items() if value]
    options += [
        f"--time={site.time_limit}",
        f"--nodes={component.nodes}",
        f"--ntasks-per-node={component.tasks}",
        f"--cpus-per-task={component.cpus_per_task(node)}",
        f"--mem={memory}G" if memory else "--mem=0",
    ]
    if component.gpus:
        options.append(f"--gpus-per-node={gpus(component, cluster)}")
    return [*options, *site.extra]


def _exports(cluster: ClusterConfig) -> list[str]:
    """For the steps; apptainer lets the image's own go before all that have not its prefix."""
    prefixes = ("", "APPTAINERENV_") if cluster.container.kind == "apptainer" else ("",)
    return [
        f"export {prefix}{name}={shlex.quote(value)}"
        for name, value in variables(cluster).items()
        for prefix in prefixes
    ]


def _shell(command: tuple[str, ...]) -> str:
    """The words as the shell reads them back, with its own folder for ``HERE``."""
    words = []
    for word in command:
        before, mark, _ = word.partition(HERE)
        quoted = shlex.quote(before) if before or not mark else ""
        words.append(f'{quoted}"$PWD"' if mark else quoted)
    return " ".join(words)
