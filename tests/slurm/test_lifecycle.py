"""What ends an attempt too early, on a real Slurm; a run ends as if nothing had been."""

import re
import time
from pathlib import Path

import psutil
import pytest

from qurl_megatron.slurm import folder, pace
from qurl_megatron.slurm.verdict import NO_PROGRESS
from qurl_megatron.training.state import TrainState, latest
from tests.disks import fill, small_disk
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import User
from tests.slurm.test_slurm import is_rank, measured, steps_done

STEPS = 16
OPTIONS = (f"train.steps={STEPS}", "checkpoint.every=5")
ENDLESS = ("train.steps=100000", "checkpoint.every=0")


@pytest.fixture(scope="module")
def undisturbed(
    slurm: Cluster, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, float]]:
    """What a run measures that is left alone."""
    user = User(slurm, tmp_path_factory.mktemp("undisturbed"), model)
    (job,), run_dir = user.submit("run", *OPTIONS)
    assert slurm.ended(job) == "COMPLETED", user.log(run_dir)
    return measured(run_dir)


def rank(user: User, number: int) -> psutil.Process:
    """The process of a rank of the user's only run, once there is one."""
    found: list[psutil.Process] = []

    def there() -> bool:
        found[:] = [p for p in user.footprint.look() if is_rank(p, number)]
        return bool(found)

    user.slurm.wait(there, 60, f"rank {number}")
    return found[0]


def said(run_dir: Path) -> str:
    path = run_dir / "slurm/job.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.slice
def test_a_rank_that_is_killed_is_followed_by_an_attempt_in_the_same_job(
    user: User, undisturbed: dict
):
    (job,), run_dir = user.submit("killed", *OPTIONS)
    user.slurm.wait(lambda: steps_done(run_dir) >= 7, 120)
    rank(user, 1).kill()
    began = time.monotonic()
    user.slurm.wait(lambda: "attempt 2" in said(run_dir), 60)
    assert time.monotonic() - began < 60
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    assert user.slurm.facts(job)["Restarts"] == "0"
    first, second = folder.attempts(run_dir)
    assert (first.signal, first.code, first.decision, first.step_after) == ("", 137, "retry", 5)
    assert (second.job, second.step_before, second.step_after) == (job, 5, STEPS)
    assert len(pace.measured(run_dir, since=0.0).saves) == len([5, 10, 15, STEPS])
    assert measured(run_dir) == undisturbed
    assert user.footprint.left(run_dir) == []


def test_a_rank_that_is_stopped_is_found_its_stacks_kept_and_the_run_goes_on(
    user: User, undisturbed: dict
):
    user.describe(hung_s=60)  # as long as a set-up takes on a busy machine
    (job,), run_dir = user.submit("stopped", *OPTIONS)
    user.slurm.wait(lambda: steps_done(run_dir) >= 7, 120)
    rank(user, 1).suspend()
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    first, second = folder.attempts(run_dir)
    assert (first.code, first.decision, second.decision) == (137, "retry", "done")
    stacks = [folder.stack_file(run_dir / "slurm/attempts/1", n).read_text() for n in (0, 1)]
    assert "in train" in stacks[0] and stacks[1] == ""
    assert "rank 1 did not answer: it is stopped, or stuck in the kernel" in said(run_dir)
    assert re.search(r"attempt 1: hung: no new step for \d+ s; step 5 is saved", said(run_dir))
    assert measured(run_dir) == undisturbed
    assert user.footprint.left(run_dir) == []


def test_two_failures_without_a_new_checkpoint_end_the_job_with_no_progress(user: User):
    (job,), run_dir = user.submit("twice", *ENDLESS)
    for number in (1, 2):
        attempt = f"qurl: attempt {number}, job"
        user.slurm.wait(lambda attempt=attempt: attempt in said(run_dir), 60, attempt)
        rank(user, 0).kill()
        user.slurm.wait(lambda n=number: len(folder.attempts(run_dir)) == n, 60)
    assert user.slurm.ended(job, 60) == "FAILED", user.log(run_dir)
    assert user.slurm.facts(job)["ExitCode"] == f"{NO_PROGRESS}:0"
    assert "the second attempt in a row without a new checkpoint" in said(run_dir)
    assert user.footprint.left(run_dir) == []


def test_a_preempted_run_saves_and_goes_on_once_it_has_its_nodes_back(
    user: User, undisturbed: dict
):
    user.describe(partition="low")
    (job,), run_dir = user.submit("preempted", *OPTIONS)
    user.slurm.wait(lambda: steps_done(run_dir) >= 7, 120)
    urgent = user.slurm.call(
        *("sbatch", "--parsable", "--partition=high", "--nodes=4", "--exclusive"),
        *("--output=/dev/null", "--wrap=sleep 1"),
    )
    assert urgent.returncode == 0, urgent.stderr
    assert user.slurm.ended(int(urgent.stdout)) == "COMPLETED"
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    first, second = folder.attempts(run_dir)
    assert (first.signal, first.decision, second.decision) == ("preempted", "again", "done")
    assert first.step_after >= 7  # it was saved, not lost
    # Engines get Slurm's SIGTERM as well: the last step may not have been published.
    assert _but_published(measured(run_dir), first.step_after) == _but_published(
        undisturbed, first.step_after
    )
    assert user.footprint.left(run_dir) == []


def _but_published(steps: dict[int, dict[str, float]], step: int) -> dict[int, dict[str, float]]:
    """The metrics, but for those of one step's publication."""
    rest = {k: v for k, v in steps[step].items() if not re.match("quant/|sync/|fleet/", k)}
    return {**steps, step: rest}


def test_a_rollout_node_that_goes_down_leaves_the_run_to_the_others(user: User):
    meeting = user.folder / "down/engines"
    user.describe(layout="split", node={"gpus": 1})  # a node for each rank and engine
    (job,), run_dir = user.submit(
        "down", *OPTIONS, f"rollout.rendezvous={meeting}", "rollout.engines=2"
    )
    user.slurm.wait(lambda: steps_done(run_dir) >= 3, 120)
    assert user.slurm.facts(job)["NumNodes"] == "4"
    user.footprint.look()
    node = sorted(path.name.partition("-")[0] for path in meeting.glob("*.json"))[-1]
    down = user.slurm.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=a test")
    assert down.returncode == 0, down.stderr
    user.slurm.wait(lambda: user.slurm.facts(job)["NumNodes"] == "3", 30)
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    (only,) = folder.attempts(run_dir)
    assert (only.decision, only.step_after) == ("done", STEPS)
    assert sorted(measured(run_dir)) == list(range(STEPS + 1))
    assert user.footprint.left(run_dir) == []


def test_a_disk_that_is_full_ends_the_job_with_a_sentence_and_with_room_it_goes_on(
    user: User, undisturbed: dict
):
    with small_disk(user.folder / "disk", "60m") as disk:
        (job,), run_dir = user.submit("disk/full", *OPTIONS)
        user.slurm.wait(lambda: steps_done(run_dir) >= 6, 120)
        filler = fill(disk, leave=300_000)
        assert user.slurm.ended(job, 120) == "FAILED", user.log(run_dir)
        assert user.slurm.facts(job)["ExitCode"] == "2:0", user.log(run_dir)
        # The first rank to meet it says it, for all.
        logs = (run_dir / "slurm/attempts/1").glob("train-*.log")
        log = "".join(path.read_text() for path in logs)
        assert re.search(
            r"^qurl: checkpoint \S+step_000010 cannot be written \(No space left on device\): .*"
            r"step_000005 stays the newest checkpoint$",
            log,
            re.M,
        )
        assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step_000005"]
        (first,) = folder.attempts(run_dir)
        assert (first.code, first.decision, first.step_after) == (2, "stop", 5)
        filler.unlink()
        (job,), _ = user.submit("disk/full", *OPTIONS)
        assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
        assert TrainState.read(latest(run_dir)).step == STEPS
        assert measured(run_dir) == undisturbed
        assert user.footprint.left(run_dir) == []
