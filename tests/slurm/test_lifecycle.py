"""What ends an attempt too early, on a real Slurm; a run ends as if nothing had been."""

import re
import time
from pathlib import Path

import pytest

from qurl_megatron.cluster import folder
from qurl_megatron.cluster.verdict import NO_PROGRESS
from qurl_megatron.training.state import TrainState, latest
from tests.slurm.conftest import (
    ENDLESS,
    ONE_RANK,
    OPTIONS,
    STEPS,
    User,
    but_published,
    ended_attempts,
    measured,
    rank,
    reaches,
    said,
)
from tests.support.disks import fill, small_disk
from tests.support.runs import steps_done

HUNG_S = 90
"""Longer than a set-up takes where both cores are busy with other things."""


def test_a_rank_that_is_stopped_is_found_its_stacks_kept_and_the_run_goes_on(
    user: User, undisturbed: Path
):
    user.describe(hung_s=HUNG_S)
    job, run_dir = user.submit("stopped", *OPTIONS)
    reaches(user, run_dir, 6)
    # First the whole job, as gang scheduling does: that is no reason to end anything.
    assert user.slurm.call("scontrol", "suspend", job).returncode == 0
    before = steps_done(run_dir)
    time.sleep(HUNG_S + 2)
    assert user.slurm.call("scontrol", "resume", job).returncode == 0
    reaches(user, run_dir, before + 1)
    rank(user, 1).suspend()
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    first, second = ended_attempts(run_dir)
    assert first.step_after >= 5
    assert (first.code, first.decision, second.decision) == (137, "retry", "done")
    stacks = [folder.stack_file(run_dir / "slurm/attempts/1", n).read_text() for n in (0, 1)]
    assert "in train" in stacks[0] and stacks[1] == ""
    assert "rank 1 did not answer: it is stopped, or stuck in the kernel" in said(run_dir)
    saved = f"step {first.step_after} is saved"
    assert re.search(rf"attempt 1: hung: no new step for \d+ s; {saved}", said(run_dir))
    assert said(run_dir).count("no new step for") == 2
    assert "First cause: the run hung: rank 1" in user.told("logs", run_dir, "--attempt", 1)
    assert measured(run_dir) == measured(undisturbed)
    assert user.footprint.left(run_dir) == []


@pytest.mark.slice
def test_a_rank_that_is_killed_is_the_first_cause_and_another_attempt_follows_in_the_same_job(
    user: User, undisturbed: Path
):
    job, run_dir = user.submit("killed", *OPTIONS)
    reaches(user, run_dir, 1)
    victim = rank(user, 1)  # looked for in time: the steps to come are short
    reaches(user, run_dir, 7)
    victim.kill()
    began = time.monotonic()
    user.slurm.wait(lambda: "attempt 2" in said(run_dir), 60)
    assert time.monotonic() - began < 60
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    assert user.slurm.facts(job)["Restarts"] == "0"
    first, second = ended_attempts(run_dir)
    assert (first.signal, first.code, first.decision) == ("", 137, "retry")
    saved = first.step_after
    assert saved in (5, 10) and (second.job, second.step_before) == (job, saved)
    assert second.step_after == STEPS
    assert measured(run_dir) == measured(undisturbed)
    text = user.told("logs", run_dir, "--attempt", 1)
    head, followed = text.split("followed from it")
    assert "First cause: it was killed: rank 1 on " in head, text
    assert "ended with 137" in head and "killed by SIGKILL" in head
    assert "rank 0 on " in followed and "another rank is gone" in followed
    assert list(run_dir.glob(".meet-*")) == []
    assert user.footprint.left(run_dir) == []


def test_two_failures_without_a_new_checkpoint_end_the_job_with_no_progress(user: User):
    job, run_dir = user.submit("twice", *ENDLESS, ONE_RANK)
    for number in (1, 2):
        attempt = f"qurl: attempt {number}, job"
        user.slurm.wait(lambda attempt=attempt: attempt in said(run_dir), 60, attempt)
        rank(user, 0).kill()
        user.slurm.wait(lambda n=number: len(ended_attempts(run_dir)) == n, 60)
    assert user.slurm.ended(job, 60) == "FAILED", user.log(run_dir)
    assert user.slurm.facts(job)["ExitCode"] == f"{NO_PROGRESS}:0"
    assert "the second attempt in a row without a new checkpoint" in said(run_dir)
    assert user.footprint.left(run_dir) == []


def urgent(user: User) -> int:
    """A job of higher priority that wants all nodes."""
    done = user.slurm.call(
        *("sbatch", "--parsable", "--partition=high", "--nodes=4", "--exclusive"),
        *("--output=/dev/null", "--wrap=sleep 1"),
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_preempted_run_saves_and_goes_on_once_it_has_its_nodes_back(
    user: User, undisturbed: Path
):
    user.describe(partition="low")
    job, run_dir = user.submit("preempted", *OPTIONS)
    reaches(user, run_dir, 7)
    assert user.slurm.ended(urgent(user)) == "COMPLETED"
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    first, second = ended_attempts(run_dir)
    assert (first.signal, first.decision, second.decision) == ("preempted", "again", "done")
    assert first.step_after >= 7  # it was saved, not lost
    # Engines get Slurm's SIGTERM as well: the last step may not have been published.
    assert but_published(measured(run_dir), first.step_after) == but_published(
        measured(undisturbed), first.step_after
    )
    assert user.footprint.left(run_dir) == []


def test_where_slurm_tells_the_job_of_its_preemption_no_metric_is_lost_and_cancelled_it_saves(
    user: User, undisturbed: Path
):
    user.describe(partition="low")
    with user.slurm.configured("SlurmctldParameters=preempt_send_user_signal"):
        job, run_dir = user.submit("told", "train.steps=400", "checkpoint.every=5")
        reaches(user, run_dir, 7)
        assert user.slurm.ended(urgent(user)) == "COMPLETED"
    (first,) = ended_attempts(run_dir)
    assert (first.signal, first.decision) == ("preempted", "again")
    assert "preempted by another job: the ranks save and end" in said(run_dir)
    alone = measured(undisturbed)
    assert {step: alone[step] for step in range(first.step_after + 1)} == measured(run_dir)

    reaches(user, run_dir, first.step_after + 1)
    assert f"job {job} saves and ends" in user.told("cancel", run_dir)
    assert user.slurm.ended(job) == "FAILED", user.log(run_dir)
    assert user.slurm.facts(job)["ExitCode"] == "143:0"
    last = ended_attempts(run_dir)[-1]
    assert (last.signal, last.code, last.decision) == ("TERM", 0, "stop")
    assert TrainState.read(latest(run_dir)).step == last.step_after > first.step_after
    assert user.footprint.left(run_dir) == []


def test_a_rollout_node_that_goes_down_ends_nothing_and_a_training_node_the_attempt(user: User):
    meeting = user.folder / "down/engines"
    user.describe({"gpus": 1})  # a node for each rank and engine
    job, run_dir = user.submit(
        "down", *OPTIONS, f"rollout.rendezvous={meeting}", "rollout.engines=2"
    )
    reaches(user, run_dir, 3)
    assert user.slurm.facts(job)["NumNodes"] == "4"
    trains = rank(user, 1).environ()["SLURMD_NODENAME"]
    node = sorted(path.name.partition("-")[0] for path in meeting.glob("*.json"))[-1]
    goes_down(user, node)
    user.slurm.wait(lambda: user.slurm.facts(job)["NumNodes"] == "3", 30)
    reaches(user, run_dir, max(6, steps_done(run_dir) + 2))
    assert ended_attempts(run_dir) == []

    goes_down(user, trains)
    user.slurm.wait(lambda: ended_attempts(run_dir) != [], 60, "the attempt's record")
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    assert user.slurm.facts(job)["Restarts"] == "1"
    first, second = ended_attempts(run_dir)
    assert (first.signal, first.decision, second.decision) == ("", "retry", "done")
    assert first.step_after >= 5 and second.step_after == STEPS
    assert f"job {job} has 2 of its 4 nodes left" in said(run_dir)
    told = user.told("logs", run_dir, "--attempt", 1)
    assert f"First cause: the node fails: node {trains}" in told
    assert sorted(measured(run_dir)) == list(range(STEPS + 1))
    assert user.footprint.left(run_dir) == []


def goes_down(user: User, node: str) -> None:
    user.slurm.update(f"NodeName={node}", "State=DOWN", "Reason=a test")


def test_a_disk_that_is_full_ends_the_job_with_a_sentence_and_with_room_it_goes_on(
    user: User, undisturbed: Path
):
    with small_disk(user.folder / "disk", "60m") as disk:
        job, run_dir = user.submit("disk/full", *OPTIONS)
        reaches(user, run_dir, 6)
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
        (first,) = ended_attempts(run_dir)
        assert (first.code, first.decision, first.step_after) == (2, "stop", 5)
        filler.unlink()
        job, _ = user.submit("disk/full", *OPTIONS)
        assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
        assert TrainState.read(latest(run_dir)).step == STEPS
        assert measured(run_dir) == measured(undisturbed)
        assert user.footprint.left(run_dir) == []
