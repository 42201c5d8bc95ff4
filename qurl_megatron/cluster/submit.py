"""From a recipe or a command to a job in the queue, by way of all that can be checked before."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.cluster import ClusterConfig, load_cluster
from qurl_megatron.cluster.script import LOGS, Script, command_job, render, training_job
from qurl_megatron.config import load
from qurl_megatron.config.keys import require
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusing


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
    """Check a job, ask Slurm, and submit it.

    Raises:
        ConfigError: a mistake in a file, or something that stands in the way of a job.
    """
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
    """Submit a training run."""
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
    from qurl_megatron.evaluation.plan import read_study, run_dir

    study, out = read_study(words[0]), Path(words[1])
    for cell in study.cells:
        own = run_dir(out, cell)
        if folder.saved_step(own) >= cell.steps:
            print(f"{cell.name}: it is done")
        elif (own / "slurm/job.json").exists() and commands.queued(folder.job(own)):
            print(f"{cell.name}: job {folder.job(own)} is in the queue")
        else:
            print(f"{cell.name}:")
            words = [*cell.overrides, f"train.run_dir={own}"]
            submit_training(study.recipe, words, cluster, dry_run=dry_run)


def submit_command(job: Script, cluster: ClusterConfig, *, dry_run: bool) -> None:
    """Submit a command."""
    from qurl_megatron.cluster.checks import check_container

    check_container(cluster)
    script = render(job, cluster)
    print(f"Slurm: {commands.test_only(script)}")
    if dry_run:
        return
    with refusing(Path(LOGS), key="the working folder"):
        Path(LOGS).mkdir(parents=True, exist_ok=True)
    number = commands.submit(script)
    print(f"job {number}; its log is {LOGS}/{job.name}-{number}.log")


def cancel(run_dir: Path) -> int:
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
    return 0
