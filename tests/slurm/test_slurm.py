"""What ``qurl slurm`` submits, on a real Slurm."""

import json
import re
from pathlib import Path

import pytest

from qurl_megatron.checkpoints.integrity import refuse_damaged
from qurl_megatron.cluster import folder
from qurl_megatron.training.state import TrainState, latest
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import ROOT, User
from tests.slurm.runs import (
    ENDLESS,
    ONE_RANK,
    OPTIONS,
    STEPS,
    decisions,
    ends_in,
    left_s,
    measured,
    reaches,
    said,
    shows_a_save,
    steps_done,
    time_is_up,
)
from tests.support.slurm_scripts import FOLDER, READY


@pytest.mark.slice
@pytest.mark.parametrize("name", READY)
def test_slurm_would_take_the_scripts_that_ship(name: str, slurm: Cluster):
    done = slurm.call("sbatch", "--test-only", FOLDER / name)
    assert done.returncode == 0, done.stderr


def test_what_slurm_would_refuse_is_said_before_anything_is_written(user: User):
    user.describe(partition="nowhere")
    run_dir = user.folder / "run"
    done = user.slurms("submit", *_words(user, run_dir), "--cluster", user.cluster_file)
    assert done.returncode == 2
    assert "sbatch --test-only refused (1): invalid partition specified: nowhere" in done.stderr
    assert not run_dir.exists()


def test_the_ranks_are_told_when_what_is_left_is_what_they_need(user: User):
    (job,), run_dir = user.submit("endless", *ENDLESS, ONE_RANK)

    def goes_on(times: int) -> folder.Attempt:
        """Wait until the job is back in the queue, and give it its time back."""
        user.slurm.wait(lambda: user.slurm.facts(job).get("Restarts") == str(times), 180)
        user.slurm.update(f"JobId={job}", "TimeLimit=20")
        newest = folder.attempts(run_dir)[-1]
        assert (newest.number, newest.signal, newest.decision) == (times, "USR1", "again")
        return newest

    # Nothing is saved yet, so nothing is known: Slurm's own signal counts.
    reaches(user, run_dir, 3)
    ends_in(user, job, 75)
    first = goes_on(1)
    assert "it goes on" not in said(run_dir)

    # Little is needed: it is put off. Then a save shows that all that is left is needed.
    reaches(user, run_dir, first.step_after + 1)
    running = json.loads(user.told("status", run_dir, "--json"))
    assert (running["state"], running["job"], running["attempt"]) == ("running", job, 2)
    assert (running["checkpoint"], running["serving"]) == (first.step_after, 1)
    assert 0 < running["steps_fit"] <= 100_000 and running["job_left_s"] < 20 * 60
    assert "step" in user.told("status", run_dir)
    shows_a_save(run_dir, 1.0)
    ends_in(user, job, 75)
    user.slurm.wait(lambda: "it goes on" in said(run_dir), 60)
    assert re.search(r"SIGUSR1 \d+ s before the end; 3\d are needed, it goes on", said(run_dir))
    shows_a_save(run_dir, left_s(user, job) - 32)
    second = goes_on(2)
    assert said(run_dir, 2).index("it goes on") < said(run_dir, 2).index("time is up")

    # More is needed than job.signal_s: Slurm's signal would come too late.
    reaches(user, run_dir, second.step_after + 1)
    shows_a_save(run_dir, left_s(user, job))
    third = goes_on(3)
    assert third.step_after > second.step_after
    assert said(run_dir, 3).index("time is up") and "SIGUSR1" not in said(run_dir, 3)
    assert user.slurm.call("scancel", job).returncode == 0
    assert user.footprint.left(run_dir) == []


@pytest.mark.slice
def test_a_run_whose_time_is_up_goes_on_in_the_same_job_and_ends_as_if_it_had_not(
    user: User, undisturbed: Path
):
    (job,), run_dir = user.submit("interrupted", *OPTIONS)
    user.slurm.wait(lambda: user.slurm.state(job) == "RUNNING", 60)
    refused = user.slurms("submit", *_words(user, run_dir), "--cluster", user.cluster_file)
    assert f"has job {job} in the queue (RUNNING)" in refused.stderr
    reaches(user, run_dir, 3)
    time_is_up(user, job)
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    assert user.slurm.facts(job)["Restarts"] == "1"
    first, second = folder.attempts(run_dir)
    assert (first.signal, first.code, first.decision) == ("USR1", 0, "again")
    assert (second.step_before, second.step_after) == (first.step_after, STEPS)
    assert (second.restarts, second.code, second.decision) == (1, 0, "done")
    assert measured(run_dir) == measured(undisturbed)
    assert (run_dir / "report.html").is_file()
    assert user.footprint.left(run_dir) == []


def test_engines_on_a_node_of_their_own_meet_the_trainer_before_and_after_a_requeue(user: User):
    meeting = user.folder / "apart/engines"
    (job,), run_dir = user.submit(
        "apart", *OPTIONS, f"rollout.rendezvous={meeting}", "rollout.engines=2"
    )
    reaches(user, run_dir, 3)
    user.assert_no_command_has_key(meeting)
    time_is_up(user, job)  # all components go back to the queue, and come from there
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    assert steps_done(run_dir) == STEPS
    assert decisions(run_dir) == ["again", "done"]
    said_there = (run_dir / "slurm/latest/engines-0.log").read_text()
    assert re.search(r"engine-0 listens at http://127\.0\.0\.1:\d+", said_there)
    user.assert_key_is_kept(job, run_dir, meeting)
    assert user.footprint.left(run_dir) == []


def test_a_run_that_scancel_ends_at_once_leaves_a_checkpoint_to_go_on_from(user: User):
    endless = ("train.steps=100000", "checkpoint.every=1")  # it may be in the midst of a save
    (job,), run_dir = user.submit("killed", *endless, ONE_RANK)
    reaches(user, run_dir, 3)
    user.footprint.look()
    assert user.slurm.call("scancel", job).returncode == 0
    assert user.slurm.ended(job) == "CANCELLED"
    refuse_damaged(latest(run_dir))
    step = TrainState.read(latest(run_dir)).step
    assert 2 <= step <= steps_done(run_dir)
    assert user.footprint.left(run_dir) == []
    (job,), _ = user.submit("killed", f"train.steps={step + 1}", "checkpoint.every=1", ONE_RANK)
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    assert sorted(measured(run_dir)) == list(range(step + 2))


def _words(user: User, run_dir: Path) -> list[str]:
    recipe = ROOT / "launch/recipes/quickstart.toml"
    return [str(recipe), *user.overrides, f"train.run_dir={run_dir}"]
