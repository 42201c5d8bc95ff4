"""From a recipe or a command to a job in the queue, by way of all that can be checked before."""

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.cluster import ClusterConfig, load_cluster
from qurl_megatron.cluster.jobs import LOGS, tool_job, training_job
from qurl_megatron.cluster.pace import measured
from qurl_megatron.cluster.script import Script, render
from qurl_megatron.config import RunConfig, load
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusing


def script_of(kind: str, words: Sequence[str], cluster_file: Path) -> str:
    """The script of a job of any kind.

    Args:
        kind: of ``jobs.KINDS``.
        words: a recipe and its overrides, or a command.

    Raises:
        ConfigError: a mistake in one of the files, or a run that does not divide over nodes.
    """
    cluster = load_cluster(cluster_file)
    return render(_job(kind, words, cluster), cluster)


def submit(kind: str, words: Sequence[str], cluster_file: Path, *, dry_run: bool = False) -> int:
    """Check, ask Slurm, and submit.

    Args:
        dry_run: stop before anything is written or submitted.

    Raises:
        ConfigError: what stands in the way.
    """
    cluster = load_cluster(cluster_file)
    if kind == "train":
        return _submit_training(Path(words[0]), list(words[1:]), cluster, dry_run=dry_run)
    from qurl_megatron.cluster.checks import check_container, check_script

    job = _job(kind, words, cluster)
    check_container(cluster)
    check_script(job.command)
    script = render(job, cluster)
    print(f"Slurm: {commands.test_only(script)}")
    if dry_run:
        return _nothing_submitted()
    with refusing(Path(LOGS), key="the working folder"):
        Path(LOGS).mkdir(parents=True, exist_ok=True)
    number = commands.submit(script)
    print(f"job {number}; its log is {LOGS}/{job.name}-{number}{'_*' * (job.tasks > 1)}.log")
    return 0


def cancel(run_dir: Path, *, dry_run: bool = False) -> int:
    """Have the jobs of a run save and end; those that wait leave the queue.

    Args:
        dry_run: only print what would be asked of Slurm.

    Raises:
        ConfigError: nothing was submitted for the run.
    """
    submission = folder.submitted(run_dir)
    if submission is None:
        raise folder.no_job(run_dir)
    queued = commands.queued(submission.jobs)
    running = [job for job, entry in queued.items() if entry.state == "RUNNING"]
    waiting = [job for job in queued if job not in running]
    if dry_run:
        to_send = [commands.cancelling(waiting)] if waiting else []
        for words in [*to_send, *(commands.signalling(job, "TERM") for job in running)]:
            print(" ".join(words))
        print("--dry-run: nothing was asked of Slurm")
        return 0
    # The waiting first: the end of a running one lets the next of its chain begin.
    commands.cancel(waiting)
    for job in waiting:
        print(f"job {job} has left the queue")
    for job in running:
        commands.signal_supervisor(job, "TERM")
        print(f"job {job} saves and ends; `scancel {job}` ends it without a checkpoint")
    if not queued:
        print(f"{run_dir}: none of its jobs is in the queue")
    return 0


def cell(study_file: Path, out: Path) -> int:
    """Run the cell of a study that this task of a job array stands for; ``qurl study --status``
    shows all of them.

    Raises:
        ConfigError: this is no task of an array.
    """
    index = os.environ.get("SLURM_ARRAY_TASK_ID")
    if index is None:
        raise ConfigError(
            "SLURM_ARRAY_TASK_ID is not set: `qurl slurm cell` runs inside an array that "
            "`qurl slurm submit --kind study` submits"
        )
    from qurl_megatron.evaluation import plan, runner

    study = plan.read_study(study_file)
    command = runner.train_command(study, study.cells[int(index)], out)
    print(" ".join(command), flush=True)
    os.execv(sys.executable, command)


def _job(kind: str, words: Sequence[str], cluster: ClusterConfig) -> Script:
    if kind == "train":
        return training_job(load(Path(words[0]), words[1:]), cluster)
    if kind != "study":
        return tool_job(kind, words, cluster)
    if len(words) != 2:
        raise ConfigError("--kind study needs a study file, and the folder for its runs and tables")
    from qurl_megatron.evaluation import plan

    return tool_job(kind, words, cluster, tasks=len(plan.read_study(words[0]).cells))


def _submit_training(
    recipe: Path, overrides: list[str], cluster: ClusterConfig, *, dry_run: bool
) -> int:
    config = load(recipe, overrides)
    run_dir = Path(config.train.run_dir)
    _refuse_queued(run_dir)
    from qurl_megatron.cluster.checks import check, check_limits, silent_nodes

    for line in check(config, cluster):
        print(line)
    script = render(training_job(config, cluster), cluster)
    print(f"Slurm: {commands.test_only(script)}")
    partition = commands.partition_facts(cluster.job.partition.partition(",")[0])
    if line := check_limits(cluster.job, partition, measured(run_dir, now())):
        print(line)
    for line in silent_nodes(cluster.job, _site_facts()):
        print(line)
    if dry_run:
        return _nothing_submitted()
    folder.write(run_dir, recipe, overrides, cluster, script)
    jobs = _queue(run_dir, script, cluster.job.chain if cluster.job.again == "chain" else 1)
    print(f"job {', '.join(map(str, jobs))}; run folder {run_dir}")
    print(f"follow it: tail -F {_followed(config)}")
    return 0


def _site_facts() -> dict[str, str]:
    """Nothing where the site does not show them: only advice rests on them."""
    try:
        return commands.site_facts()
    except ConfigError:
        return {}


def _queue(run_dir: Path, script: str, count: int) -> list[int]:
    """Submit jobs; each is noted before the next, so that none is unknown where Slurm refuses."""
    jobs: list[int] = []
    at = datetime.fromtimestamp(now(), UTC).isoformat(timespec="seconds")
    for _ in range(count):
        jobs.append(commands.submit(script))
        folder.write_submitted(run_dir, folder.Submitted(list(jobs), at))
    return jobs


def _refuse_queued(run_dir: Path) -> None:
    submission = folder.submitted(run_dir)
    for job, entry in commands.queued(submission.jobs if submission else []).items():
        raise ConfigError(
            f"{run_dir} has job {job} in the queue ({entry.state}); let it end, or "
            f"`qurl slurm cancel {run_dir}`"
        )


def _followed(config: RunConfig) -> str:
    run_dir = config.train.run_dir
    return f"{run_dir}/slurm/job.log {run_dir}/slurm/latest/train-0.log"


def _nothing_submitted() -> int:
    print("--dry-run: nothing was submitted")
    return 0
