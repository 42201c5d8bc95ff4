"""``RUN_DIR/slurm``: files from ``submit`` for the job, and from the job for its operator.

    recipe.toml      the recipe as it was given
    request.json     its overrides, and the folder it was given in
    cluster.toml     the cluster file, resolved
    job.sbatch       the script
    job.json         ids of the jobs and when they were submitted; the last to be written
    job.log          what the supervisor says, of all attempts
    attempts/1/      an attempt: train-RANK.log, failure-RANK.json of a rank that failed,
                     stack-RANK.txt if it hung, and the records of observe.attempts
    latest           link to the newest of them

Each file appears whole.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from qurl_megatron.cluster.cluster import ClusterConfig, load_cluster
from qurl_megatron.config import RunConfig, from_elsewhere, load, to_toml
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.observe.attempts import (
    BEGAN,
    ENDED,
    STEPS,
    Attempt,
    Began,
    read_attempt,
    read_began,
    read_record,
    steps_since,
)


def write(
    run_dir: Path, recipe: Path, overrides: list[str], cluster: ClusterConfig, script: str
) -> None:
    """Write the job's input."""
    request = {"overrides": from_elsewhere(recipe, overrides), "recipe": str(recipe)}
    put(run_dir / "slurm/recipe.toml", recipe.read_text(encoding="utf-8"))
    put(run_dir / "slurm/request.json", json.dumps(request, indent=1) + "\n")
    put(run_dir / "slurm/cluster.toml", to_toml(cluster))
    put(run_dir / "slurm/job.sbatch", script)


def put(path: Path, text: str) -> None:
    """Write a file whole."""
    with refusing(path, key="train.run_dir"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)


def recipe(run_dir: Path) -> RunConfig:
    """Read the run's whole recipe, its overrides and folder included.

    Raises:
        ConfigError: nothing was submitted there, or a file is damaged.
    """
    overrides = read_record(
        run_dir / "slurm/request.json",
        lambda value: [str(override) for override in value["overrides"]],
    )
    overrides.append(f"train.run_dir={json.dumps(str(run_dir), ensure_ascii=False)}")
    return load(run_dir / "slurm/recipe.toml", overrides)


def cluster(run_dir: Path) -> ClusterConfig:
    return load_cluster(run_dir / "slurm/cluster.toml")


def jobs(run_dir: Path) -> list[int]:
    """Return the ids of the jobs of the last submission, of a chain in their order; [] for none."""
    path = run_dir / "slurm/job.json"
    if not path.exists():
        return []
    return read_record(path, lambda value: [int(job) for job in value["jobs"]])


def write_jobs(run_dir: Path, jobs: Sequence[int]) -> None:
    """Record the jobs that were submitted, and when."""
    at = datetime.fromtimestamp(now(), UTC).isoformat(timespec="seconds")
    record = {"jobs": jobs, "submitted_at": at}
    put(run_dir / "slurm/job.json", json.dumps(record, indent=1) + "\n")


def no_job(run_dir: Path) -> ConfigError:
    """Return the error that a folder has no job of ours."""
    return ConfigError(
        f"{run_dir}: no job was submitted for this folder; name the run's, train.run_dir of its "
        "recipe; of a run without Slurm, `qurl report RUN_DIR` shows how it went"
    )


def no_attempt(run_dir: Path) -> ConfigError:
    """Return the error that a folder has no attempts."""
    if not jobs(run_dir):
        return no_job(run_dir)
    return ConfigError(
        f"{run_dir} has no attempt yet; `qurl slurm status {run_dir}` says what it waits for"
    )


def open_attempt(run_dir: Path, *, gpus: int = 0, step: int = 0) -> int:
    """Make the folder of the next attempt, and have ``latest`` lead there.

    The steps of the attempt before are kept with it: its metrics are about to be written again.

    Args:
        gpus: that the job holds, of all nodes.
        step: of the newest checkpoint.

    Returns:
        Its number; the first is 1.
    """
    attempts = run_dir / "slurm/attempts"
    with refusing(attempts, key="train.run_dir"):
        attempts.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            with contextlib.suppress(FileExistsError):
                (attempts / str(number)).mkdir()
                break
        before = attempts / str(number - 1)
        if (before / BEGAN).exists():
            done = steps_since(run_dir, before)
            rows = [[past.step, past.ended_at, past.seconds] for past in done]
            put(before / STEPS, json.dumps(rows) + "\n")
        put(attempts / str(number) / BEGAN, _text(Began(now(), gpus, step)))
        link = run_dir / "slurm/latest"
        aside = link.with_name(".latest")
        aside.unlink(missing_ok=True)
        aside.symlink_to(f"attempts/{number}")
        os.replace(aside, link)
    return number


def attempt_folder(run_dir: Path, number: int) -> Path:
    return run_dir / "slurm/attempts" / str(number)


def stack_file(attempt: Path, rank: int) -> Path:
    """Return the file for the stacks of a rank's threads; empty until they are asked for."""
    return attempt / f"stack-{rank}.txt"


def close_attempt(run_dir: Path, attempt: Attempt) -> None:
    """Record its end, by default now, beside its beginning."""
    path = attempt_folder(run_dir, attempt.number)
    began = asdict(read_began(path))
    ended_at = attempt.ended_at or now()
    put(path / ENDED, _text(replace(attempt, ended_at=ended_at, **began)))


def attempts(run_dir: Path) -> list[Attempt]:
    """Return the attempts that have ended, oldest first."""
    files = (run_dir / "slurm/attempts").glob(f"*/{ENDED}")
    return sorted(map(read_attempt, files), key=lambda attempt: attempt.number)


def _text(record: Attempt | Began) -> str:
    return json.dumps(asdict(record), indent=1) + "\n"
