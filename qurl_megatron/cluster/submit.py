"""Submit a recipe or a command as a job, after all that can be checked before.

The job script is a pure function of recipe and cluster file: options of sbatch, the site's lines,
and one call. Nothing is decided in shell: ``qurl slurm attempt`` decides in the job. A training run
has that supervisor; any other job is one command on one node.
"""

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.cluster import ClusterConfig, load_cluster
from qurl_megatron.cluster.layout import Component, examination, lay_out, run_steps, step
from qurl_megatron.config import RunConfig, load
from qurl_megatron.config.keys import require
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusing

HEADER = "# Written by `qurl slurm`: change the recipe or the cluster file instead."
LOGS = "runs/slurm"
"""Folder of the logs of jobs that have no run folder."""
COMMANDS = ("convert", "export", "quantize", "inspect", "diff", "eval", "bench", "study")
"""The commands that can be jobs of their own."""


@dataclass(frozen=True)
class Script:
    name: str
    output: str  # file of its output; may hold Slurm's patterns such as %j
    nodes: Component
    command: tuple[str, ...]
    options: tuple[str, ...] = ()  # of sbatch, besides the ones of every job
    steps: tuple[tuple[str, ...], ...] = ()  # that the command starts: for people to read


def training_job(config: RunConfig, cluster: ClusterConfig) -> Script:
    layout = lay_out(config.parallel, config.rollout, cluster.node)
    run_dir = Path(config.train.run_dir)
    options = [f"--signal=B:USR1@{cluster.job.signal_s}"]
    if layout.rollout:  # it outlives an engine's node
        options.append("--no-kill")
    steps = [*run_steps(run_dir, layout, cluster, run_dir / "slurm/attempts/N").values()]
    if cluster.job.examine_s:
        steps = [examination(run_dir, layout, cluster), *steps]
    return Script(
        name=run_dir.name,
        output=f"{run_dir}/slurm/job.log".replace("%", "%%"),
        nodes=layout.whole,
        command=("qurl", "slurm", "attempt", str(run_dir)),
        options=tuple(options),
        steps=tuple(map(tuple, steps)),
    )


def command_job(words: Sequence[str], cluster: ClusterConfig, node_gpus: int | None) -> Script:
    """Describe the job of a ``qurl`` command; ``node_gpus=None`` takes all GPUs of a node."""
    require(
        words[0] in COMMANDS, f"--kind command: {words[0]} is unknown; known: {', '.join(COMMANDS)}"
    )
    if node_gpus is None:
        node_gpus = cluster.node.gpus
    component = Component(nodes=1, tasks=1, gpus=node_gpus)
    srun = step(words[0], component, cluster, ["qurl", *words])
    return Script(words[0], f"{LOGS}/%x-%j.log", component, tuple(srun))


def render(job: Script, cluster: ClusterConfig) -> str:
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
        if cluster.container.kind == "apptainer":  # an image's own win over names without prefix
            body.append(f"export APPTAINERENV_{name}={shlex.quote(value)}")
    body += cluster.site.prolog
    if body:
        lines += ["set -e", *body, ""]
    if job.steps:
        lines.append("# The next line starts these steps; N is the attempt.")
        lines += [f"#   {shlex.join(step)}" for step in job.steps]
    lines.append(f"exec {shlex.join(job.command)}")
    return "\n".join(lines) + "\n"


def _options(job: Script, cluster: ClusterConfig) -> list[str]:
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
    options += [f"--time={site.time_limit}", *nodes.options(cluster.node)]
    memory = nodes.memory_gib(cluster.node)
    options.append(f"--mem={memory}G" if memory else "--mem=0")
    return [*options, *site.extra]


def show_script(arguments: argparse.Namespace) -> int:
    """Print the job script of a recipe or a command, and check nothing else."""
    cluster, words = load_cluster(arguments.cluster), arguments.words
    if arguments.kind == "command":
        job = command_job(words, cluster, arguments.gpus)
    else:
        job = training_job(load(Path(words[0]), words[1:]), cluster)
    print(render(job, cluster), end="")
    return 0


def submit(arguments: argparse.Namespace) -> int:
    """Check a job, ask Slurm, and submit it."""
    cluster, words = load_cluster(arguments.cluster), arguments.words
    dry_run = arguments.dry_run
    if arguments.kind == "command":
        submit_command(command_job(words, cluster, arguments.gpus), cluster, dry_run=dry_run)
    elif arguments.kind == "study":
        submit_study(words, cluster, dry_run=dry_run)
    else:
        submit_training(Path(words[0]), words[1:], cluster, dry_run=dry_run)
    if dry_run:
        print("--dry-run: nothing was submitted")
    return 0


def submit_training(
    recipe: Path, overrides: Sequence[str], cluster: ClusterConfig, *, dry_run: bool
) -> None:
    from qurl_megatron.cluster.checks import check

    config = load(recipe, overrides)
    run_dir = Path(config.train.run_dir)
    if (run_dir / "slurm/job.json").exists():
        job = folder.job(run_dir)
        if entry := commands.queued(job):
            raise ConfigError(
                f"{run_dir} has job {job} in the queue ({entry.state}); let it end, or "
                f"`qurl slurm cancel {run_dir}`"
            )
    for line in check(config, cluster):
        print(line)
    script = _ask(training_job(config, cluster), cluster)
    if dry_run:
        return
    folder.write(config, cluster, script)
    job = commands.submit(script)
    folder.write_job(run_dir, job)
    print(f"job {job}; run folder {run_dir}")
    print(f"follow it: tail -F {run_dir}/slurm/job.log {run_dir}/slurm/latest/train-0.log")


def submit_study(words: Sequence[str], cluster: ClusterConfig, *, dry_run: bool) -> None:
    """Submit each run of a study that is neither done nor in the queue, as a job of its own."""
    require(
        len(words) == 2, "--kind study needs a study file, and the folder for its runs and tables"
    )
    from qurl_megatron.evaluation.study_plan import read_study, run_dir

    study, out = read_study(words[0]), Path(words[1])
    for cell in study.cells:
        cell_dir = run_dir(out, cell)
        if folder.saved_step(cell_dir) >= cell.steps:
            print(f"{cell.name}: it is done")
        elif (cell_dir / "slurm/job.json").exists() and commands.queued(folder.job(cell_dir)):
            print(f"{cell.name}: job {folder.job(cell_dir)} is in the queue")
        else:
            print(f"{cell.name}:")
            overrides = [*cell.overrides, f"train.run_dir={cell_dir}"]
            submit_training(study.recipe, overrides, cluster, dry_run=dry_run)


def submit_command(job: Script, cluster: ClusterConfig, *, dry_run: bool) -> None:
    from qurl_megatron.cluster.checks import check_container

    check_container(cluster)
    script = _ask(job, cluster)
    if dry_run:
        return
    with refusing(Path(LOGS), key="the working folder"):
        Path(LOGS).mkdir(parents=True, exist_ok=True)
    number = commands.submit(script)
    print(f"job {number}; its log is {LOGS}/{job.name}-{number}.log")


def _ask(job: Script, cluster: ClusterConfig) -> str:
    """Return the script of a job that Slurm would take."""
    from qurl_megatron.cluster.checks import check_limits

    script = render(job, cluster)
    print(f"Slurm: {commands.test_only(script)}")
    check_limits(cluster.job, commands.partition_facts(cluster.job.partition.partition(",")[0]))
    return script


def cancel(run_dir: Path) -> int:
    """Have the job of a run save and end; one that waits leaves the queue."""
    job = folder.job(run_dir)
    queued = commands.queued(job)
    if queued is None:
        print(f"{run_dir}: its job {job} is not in the queue")
    elif queued.state == "RUNNING":
        commands.terminate_supervisor(job)
        print(f"job {job} saves and ends; `scancel {job}` ends it without a checkpoint")
    else:
        commands.cancel(job)
        print(f"job {job} has left the queue")
    return 0
