"""What tests here ask of a run, and do to it."""

import contextlib
import json
import re
from pathlib import Path

import psutil

from qurl_megatron.cluster import folder
from qurl_megatron.observe.sinks import read_metrics
from tests.slurm.conftest import User

STEPS = 16
OPTIONS = (f"train.steps={STEPS}", "checkpoint.every=5")
"""Of the run that ``undisturbed`` has the metrics of."""
ENDLESS = ("train.steps=100000", "checkpoint.every=0")
ONE_RANK = "parallel.tensor=1"
"""Where it is not about ranks: a second one takes ten seconds to start."""
TAKES_TIME = re.compile(r"time/|throughput/|sync/.*_s$")


def measured(run_dir: Path) -> dict[int, dict[str, float]]:
    """By step, without what depends on the clock."""
    return {
        record.step: {k: v for k, v in record.metrics.items() if not TAKES_TIME.match(k)}
        for record in read_metrics(run_dir / "metrics.jsonl")
    }


def but_published(steps: dict[int, dict[str, float]], step: int) -> dict[int, dict[str, float]]:
    """The metrics, but for those of one step's publication."""
    rest = {k: v for k, v in steps[step].items() if not re.match("quant/|sync/|fleet/", k)}
    return {**steps, step: rest}


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
    return max((json.loads(line)["step"] for line in whole.splitlines()[-3:]), default=0)


def reaches(user: User, run_dir: Path, step: int, seconds: float = 180.0) -> None:
    user.slurm.wait(lambda: steps_done(run_dir) >= step, seconds, f"step {step} of {run_dir}")


def said(run_dir: Path, attempt: int | None = None) -> str:
    """What the supervisor and srun have said, of all attempts or of one."""
    path = run_dir / "slurm/job.log"
    text = path.read_text() if path.exists() else ""
    return text if attempt is None else text.partition(f"qurl: attempt {attempt}, job ")[2]


def ended_attempts(run_dir: Path) -> list[folder.Attempt]:
    return [attempt for attempt in folder.attempts(run_dir) if attempt.ended]


def decisions(run_dir: Path) -> list[str]:
    return [attempt.decision for attempt in ended_attempts(run_dir)]


def rank(user: User, number: int) -> psutil.Process:
    """The process that srun has started for a rank of the user's only run, once there is one."""
    found: list[psutil.Process] = []

    def there() -> bool:
        found[:] = [p for p in user.footprint.look() if _is_rank(p, number)]
        return bool(found)

    user.slurm.wait(there, 60, f"rank {number}")
    return found[0]


def _is_rank(process: psutil.Process, number: int) -> bool:
    """None of those that a rank has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        words = process.cmdline()
        procid = process.environ().get("SLURM_PROCID")
        return words[-3:-1] == ["slurm", "task"] and procid == str(number)
    return False


def time_is_up(user: User, job: int) -> None:
    """What --signal=B:USR1@N does, at a moment that is known."""
    done = user.slurm.call("scancel", "--batch", "--signal=USR1", job)
    assert done.returncode == 0, done.stderr


def ends_in(user: User, job: int, seconds: int) -> None:
    """Cut a running job's time short, as an operator does."""
    user.slurm.update(f"JobId={job}", f"EndTime=now+{seconds}")
