"""``RUN_DIR/slurm``: files from ``submit`` for the job, and from the job for its operator.

    config.toml      the recipe, resolved
    cluster.toml     the cluster file, resolved
    job.sbatch       the script
    job.json         the job's id; the last to be written
    job.log          the supervisor's messages, of all attempts
    attempts/1/      an attempt: attempt.json, train-RANK.log, failure-RANK.json of a rank that
                     failed, stack-RANK.txt if it hung
    latest           link to the newest of them

Each file appears whole.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from qurl_megatron.cluster.cluster import ClusterConfig, load_cluster
from qurl_megatron.config import RunConfig, load, to_toml
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.disk import read_json, write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.kit.record import Malformed, Value, convert
from qurl_megatron.training.state import TrainState, latest


@dataclass(frozen=True)
class Job:
    """job.json"""

    job: int


@dataclass(frozen=True)
class Attempt:
    """attempt.json: one start of the ranks. Without a decision it runs, or nobody saw its end."""

    number: int
    job: int
    began_at: float  # Unix seconds, by the supervisor's node
    step_before: int  # of the newest checkpoint when it began
    step_after: int = 0
    signal: str = ""  # why its ranks were told to end, such as USR1 or preempted; "": they were not
    code: int = 0  # exit code of the training step; 0 after a clean stop, too
    failure: str = ""  # how it failed, where the exit code does not tell
    decision: str = ""
    exit_code: int = 0  # of the supervisor, and so of the job
    reason: str = ""  # for the decision, as a sentence
    bad_nodes: tuple[str, ...] = ()  # that the next job must not have
    ended_at: float = 0.0

    @property
    def ended(self) -> bool:
        return bool(self.decision)


def write(config: RunConfig, cluster: ClusterConfig, script: str) -> None:
    """Write the job's input."""
    folder = Path(config.train.run_dir) / "slurm"
    put(folder / "config.toml", to_toml(config))
    put(folder / "cluster.toml", to_toml(cluster))
    put(folder / "job.sbatch", script)


def put(path: Path, text: str) -> None:
    with refusing(path, key="train.run_dir"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)


def recipe(run_dir: Path) -> RunConfig:
    """Read the run's resolved recipe; raise ``ConfigError`` if none was submitted there."""
    return load(_submitted(run_dir / "slurm/config.toml"))


def cluster(run_dir: Path) -> ClusterConfig:
    return load_cluster(_submitted(run_dir / "slurm/cluster.toml"))


def script(run_dir: Path) -> str:
    return (run_dir / "slurm/job.sbatch").read_text(encoding="utf-8")


def job(run_dir: Path) -> int:
    """Return the id of the job that was submitted last; raise ``ConfigError`` if none was."""
    path = run_dir / "slurm/job.json"
    if not path.exists():
        raise ConfigError(
            f"{run_dir}: no job was submitted for this folder; name the run's, train.run_dir of "
            "its recipe; of a run without Slurm, `qurl report RUN_DIR` shows how it went"
        )
    return _read(path, Job).job


def write_job(run_dir: Path, job: int) -> None:
    _write(run_dir / "slurm/job.json", Job(job))


def saved_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    newest = latest(run_dir)
    return TrainState.read(newest).step if newest else 0


def open_attempt(run_dir: Path, *, job: int, step: int = 0) -> Attempt:
    """Make the folder of the next attempt, which begins at ``step``, and link ``latest`` to it."""
    number = 1 + max([attempt.number for attempt in attempts(run_dir)], default=0)
    attempt = Attempt(number, job, now(), step)
    write_attempt(run_dir, attempt)
    link = run_dir / "slurm/latest"
    with refusing(link, key="train.run_dir"):
        aside = link.with_name(".latest")
        aside.unlink(missing_ok=True)
        aside.symlink_to(f"attempts/{number}")
        os.replace(aside, link)
    return attempt


def write_attempt(run_dir: Path, attempt: Attempt) -> None:
    _write(attempt_folder(run_dir, attempt.number) / "attempt.json", attempt)


def attempts(run_dir: Path) -> Sequence[Attempt]:
    """Return all attempts, oldest first; raise ``ConfigError`` if a record is damaged."""
    files = (run_dir / "slurm/attempts").glob("*/attempt.json")
    records = [_read(file, Attempt) for file in files]
    return sorted(records, key=lambda attempt: attempt.number)


def attempt_folder(run_dir: Path, number: int) -> Path:
    return run_dir / "slurm/attempts" / str(number)


def stack_file(attempt: Path, rank: int) -> Path:
    """Return the file for the stacks of a rank's threads; empty until they are asked for."""
    return attempt / f"stack-{rank}.txt"


def _submitted(path: Path) -> Path:
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist; `qurl slurm submit` makes it, and RUN_DIR is train.run_dir"
        )
    return path


def _write(path: Path, record: Job | Attempt) -> None:
    put(path, json.dumps(asdict(record), indent=1) + "\n")


def _read(path: Path, kind: type[Value]) -> Value:
    try:
        return convert(kind, read_json(path))
    except (ConfigError, Malformed) as error:
        raise ConfigError(
            f"{path} is damaged ({error}); submit the run again with `qurl slurm submit`"
        ) from None
