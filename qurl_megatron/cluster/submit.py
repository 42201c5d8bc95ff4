"""From a recipe or a command to a job in the queue, by way of all that can be checked before."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.cluster import ClusterConfig, load_cluster
from qurl_megatron.cluster.script import LOGS, Script, render, tool_job, training_job
from qurl_megatron.config import load
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusing


def run(arguments: argparse.Namespace) -> int:
    """Carry out render, submit, cancel or cell.

    Raises:
        ConfigError: a mistake in a file, or something that stands in the way of a job.
    """
    if arguments.action == "cell":
        return run_cell(arguments.study, arguments.out)
    if arguments.action == "cancel":
        cancel(arguments.run_dir)
        return 0
    kind, words = arguments.kind, arguments.words
    cluster = load_cluster(arguments.cluster)
    if arguments.action == "render":
        if kind == "train":
            job = training_job(load(Path(words[0]), words[1:]), cluster)
        else:
            job = command_job(kind, words, cluster)
        print(render(job, cluster), end="")
        return 0
    if kind == "train":
        submit_training(Path(words[0]), words[1:], cluster, dry_run=arguments.dry_run)
    else:
        submit_command(command_job(kind, words, cluster), cluster, dry_run=arguments.dry_run)
    if arguments.dry_run:
        print("--dry-run: nothing was submitted")
    return 0


def submit_training(
    recipe: Path, overrides: list[str], cluster: ClusterConfig, *, dry_run: bool
) -> None:
    """Check a training run, ask Slurm, and submit it."""
    from qurl_megatron.cluster.checks import check, check_limits

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
    script = render(training_job(config, cluster), cluster)
    print(f"Slurm: {commands.test_only(script)}")
    check_limits(cluster.job, commands.partition_facts(cluster.job.partition.partition(",")[0]))
    if dry_run:
        return
    folder.write(run_dir, recipe, overrides, cluster, script)
    job = commands.submit(script)
    folder.write_job(run_dir, job)
    print(f"job {job}; run folder {run_dir}")
    print(f"follow it: tail -F {run_dir}/slurm/job.log {run_dir}/slurm/latest/train-0.log")


def submit_command(job: Script, cluster: ClusterConfig, *, dry_run: bool) -> None:
    """Check a command's container and script, ask Slurm, and submit it."""
    from qurl_megatron.cluster.checks import check_container

    check_container(cluster)
    script = render(job, cluster)
    print(f"Slurm: {commands.test_only(script)}")
    if dry_run:
        return
    with refusing(Path(LOGS), key="the working folder"):
        Path(LOGS).mkdir(parents=True, exist_ok=True)
    number = commands.submit(script)
    print(f"job {number}; its log is {LOGS}/{job.name}-{number}{'_*' * (job.tasks > 1)}.log")


def command_job(kind: str, words: Sequence[str], cluster: ClusterConfig) -> Script:
    if kind != "study":
        return tool_job(kind, words, cluster)
    if len(words) != 2:
        raise ConfigError("--kind study needs a study file, and the folder for its runs and tables")
    from qurl_megatron.evaluation import plan

    return tool_job(kind, words, cluster, tasks=len(plan.read_study(words[0]).cells))


def cancel(run_dir: Path) -> None:
    """Have the job of a run save and end; one that waits leaves the queue."""
    job = folder.job(run_dir)
    queued = commands.queued(job)
    if queued is None:
        print(f"{run_dir}: its job {job} is not in the queue")
    elif queued.state == "RUNNING":
        commands.signal_supervisor(job, "TERM")
        print(f"job {job} saves and ends; `scancel {job}` ends it without a checkpoint")
    else:
        commands.cancel(job)
        print(f"job {job} has left the queue")


def run_cell(study_file: Path, out: Path) -> int:
    """Run the study's cell of this task of a job array; ``qurl study --status`` shows all cells."""
    index = os.environ.get("SLURM_ARRAY_TASK_ID")
    if index is None:
        raise ConfigError(
            "SLURM_ARRAY_TASK_ID is not set: `qurl slurm cell` runs inside an array that "
            "`qurl slurm submit --kind study` submits"
        )
    from qurl_megatron.evaluation import plan
    from qurl_megatron.evaluation.study import train_command

    study = plan.read_study(study_file)
    command = train_command(study, study.cells[int(index)], out)
    print(" ".join(command), flush=True)
    os.execv(sys.executable, command)
