"""What ``qurl slurm`` submits, on a real Slurm."""

import contextlib
import json
import re
from pathlib import Path

import psutil
import pytest

from qurl_megatron.observe.sinks import read_metrics
from qurl_megatron.slurm import folder
from qurl_megatron.slurm.ready import FOLDER, READY
from qurl_megatron.training.state import TrainState, latest
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import User

TAKES_TIME = re.compile(r"time/|throughput/|sync/.*_s$")
STEPS = 20
OPTIONS = (f"train.steps={STEPS}", "checkpoint.every=8")


def measured(run_dir: Path) -> dict[int, dict[str, float]]:
    """By step, without what depends on the clock."""
    return {
        record.step: {k: v for k, v in record.metrics.items() if not TAKES_TIME.match(k)}
        for record in read_metrics(run_dir / "metrics.jsonl")
    }


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
    return max((json.loads(line)["step"] for line in whole.splitlines()[-3:]), default=0)


def time_is_up(user: User, job: int) -> None:
    """What --signal=B:USR1@N does, at a moment that is known."""
    done = user.slurm.call("scancel", "--batch", "--signal=USR1", job)
    assert done.returncode == 0, done.stderr


@pytest.mark.slice
@pytest.mark.parametrize("name", READY)
def test_slurm_would_take_the_scripts_that_ship(name: str, slurm: Cluster):
    done = slurm.call("sbatch", "--test-only", FOLDER / name)
    assert done.returncode == 0, done.stderr


def test_a_script_that_asks_for_more_than_there_is_would_be_refused(slurm: Cluster, tmp_path: Path):
    text = (FOLDER / "train_32b.sbatch").read_text()
    assert (greedy := text.replace("h100:8", "h100:9")) != text
    (tmp_path / "greedy.sbatch").write_text(greedy)
    assert slurm.call("sbatch", "--test-only", tmp_path / "greedy.sbatch").returncode != 0


def test_what_slurm_would_refuse_is_said_before_anything_is_written(user: User):
    user.describe(partition="nowhere")
    recipe = FOLDER.parent / "launch/recipes/quickstart.toml"
    run_dir = user.folder / "run"
    done = user.slurms(
        *("submit", recipe, *user.overrides, f"train.run_dir={run_dir}"),
        *("--cluster", user.cluster_file),
    )
    assert done.returncode == 2
    assert done.stderr == (
        "qurl: sbatch --test-only refused (1): invalid partition specified: nowhere; allocation "
        "failure: Invalid partition name specified\n"
    )
    assert not run_dir.exists()


@pytest.mark.slice
def test_a_run_whose_time_is_up_goes_on_in_the_same_job_and_ends_as_if_it_had_not(user: User):
    (whole,), whole_dir = user.submit("whole", *OPTIONS)
    (job,), run_dir = user.submit("interrupted", *OPTIONS)
    user.slurm.wait(lambda: steps_done(run_dir) >= 3, 120)
    refused = user.slurms("submit", *_words(user, run_dir), "--cluster", user.cluster_file)
    assert f"has job {job} in the queue (RUNNING)" in refused.stderr
    time_is_up(user, job)
    for one, where in ((whole, whole_dir), (job, run_dir)):
        assert user.slurm.ended(one) == "COMPLETED", user.log(where)
    assert user.slurm.facts(job)["Restarts"] == "1"
    first, second = folder.attempts(run_dir)
    assert (first.signal, first.code, first.decision) == ("USR1", 0, "again")
    assert (second.step_before, second.step_after) == (first.step_after, STEPS)
    assert (second.restarts, second.code, second.decision) == (1, 0, "done")
    assert measured(run_dir) == measured(whole_dir)
    assert (whole_dir / "report.html").is_file()
    assert user.footprint.left(run_dir) == []


def test_a_chain_goes_on_in_its_next_job_and_ends_with_the_run(user: User):
    user.describe(again="chain", chain=3)
    jobs, run_dir = user.submit("chained", *OPTIONS)
    user.slurm.wait(lambda: steps_done(run_dir) >= 3, 120)
    time_is_up(user, jobs[0])
    ended = [user.slurm.ended(job) for job in jobs]
    assert ended == ["COMPLETED", "COMPLETED", "CANCELLED"], user.log(run_dir)
    assert [(a.job, a.decision) for a in folder.attempts(run_dir)] == [
        (jobs[0], "again"),
        (jobs[1], "done"),
    ]
    assert sorted(measured(run_dir)) == list(range(STEPS + 1))


def test_slurms_own_signal_comes_in_time_and_a_cancelled_run_leaves_a_checkpoint(user: User):
    user.describe(time_limit="00:03:00", signal_s=60)
    (job,), run_dir = user.submit("endless", "train.steps=100000", "checkpoint.every=0")
    user.slurm.wait(lambda: user.slurm.facts(job).get("Restarts") == "1", 300)
    (first,) = folder.attempts(run_dir)
    assert (first.signal, first.decision) == ("USR1", "again"), user.log(run_dir)
    user.slurm.wait(lambda: steps_done(run_dir) > first.step_after, 120)
    done = user.slurms("cancel", run_dir)
    assert f"job {job} saves and ends" in done.stdout, done.stderr
    assert user.slurm.ended(job) == "FAILED", user.log(run_dir)
    assert user.slurm.facts(job)["ExitCode"] == "143:0"
    last = folder.attempts(run_dir)[-1]
    assert (last.signal, last.code, last.decision) == ("TERM", 0, "stop")
    assert TrainState.read(latest(run_dir)).step == last.step_after > first.step_after
    assert user.footprint.left(run_dir) == []


@pytest.mark.parametrize("layout", ["hetjob", "split"])
def test_engines_on_a_node_of_their_own_meet_the_trainer(layout: str, user: User):
    user.describe(layout=layout)
    meeting = user.folder / "apart/engines"
    (job,), run_dir = user.submit(
        "apart", *OPTIONS, f"rollout.rendezvous={meeting}", "rollout.engines=2"
    )
    if layout == "hetjob":  # all of its components go back to the queue, and come from there
        user.slurm.wait(lambda: steps_done(run_dir) >= 3, 120)
        time_is_up(user, job)
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    assert steps_done(run_dir) == STEPS
    assert [a.decision for a in folder.attempts(run_dir)] == ["again", "done"][
        -1 - (layout == "hetjob") :
    ]
    said = (run_dir / "slurm/latest/engines-0.log").read_text()
    assert re.search(r"engine-0 listens at http://127\.0\.0\.1:\d+", said)
    assert list(meeting.glob("*.json")) == []
    key = (meeting / "key").read_text()
    assert (meeting / "key").stat().st_mode & 0o777 == 0o600
    for path in (run_dir / "slurm").rglob("*"):
        assert not path.is_file() or key not in path.read_text()
    assert key not in user.slurm.call("scontrol", "show", "job", job).stdout
    assert user.footprint.left(run_dir) == []


def is_rank(process: psutil.Process, rank: int) -> bool:
    """The process that srun has started for a rank, and none of those that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        words = process.cmdline()
        return words[-3:-1] == ["slurm", "task"] and process.environ()["SLURM_PROCID"] == str(rank)
    return False


def _words(user: User, run_dir: Path) -> list[str]:
    recipe = FOLDER.parent / "launch/recipes/quickstart.toml"
    return [str(recipe), *user.overrides, f"train.run_dir={run_dir}"]
