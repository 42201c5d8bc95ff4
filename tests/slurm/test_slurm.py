"""What ``qurl slurm`` submits, on a real Slurm."""

import re
from pathlib import Path
from shutil import which

import pytest

from qurl_megatron.cluster import folder
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import ROOT, User
from tests.slurm.runs import (
    ENDLESS,
    ONE_RANK,
    OPTIONS,
    STEPS,
    decisions,
    ended_attempts,
    ends_in,
    measured,
    reaches,
    steps_done,
    time_is_up,
)
from tests.support.slurm_scripts import FOLDER, READY


@pytest.mark.slice
@pytest.mark.parametrize("name", READY)
def test_slurm_would_take_the_scripts_that_ship(name: str, slurm: Cluster):
    done = slurm.call("sbatch", "--test-only", FOLDER / name)
    assert done.returncode == 0, done.stderr


def test_slurms_signal_before_the_time_limit_has_the_run_save_and_go_on(user: User):
    job, run_dir = user.submit("endless", *ENDLESS, ONE_RANK)
    reaches(user, run_dir, 3)
    running = user.told("status", run_dir)
    assert f"running, job {job} on " in running and ", attempt 1\n" in running
    assert re.search(r"this job +1?\dm\d+s left", running), running
    ends_in(user, job, 75)
    user.slurm.wait(lambda: user.slurm.facts(job).get("Restarts") == "1", 180)
    (first,) = ended_attempts(run_dir)
    assert (first.signal, first.decision) == ("USR1", "again") and first.step_after >= 3
    assert user.slurm.call("scancel", job).returncode == 0
    assert user.footprint.left(run_dir) == []


def test_where_requeueing_is_forbidden_another_job_goes_on_behind_this_one(
    user: User, undisturbed: Path
):
    scontrol = user.folder / "bin/scontrol"  # before the real one on PATH
    scontrol.write_text(
        f'#!/bin/sh\n[ "$1" != requeue ] && exec {which("scontrol")} "$@"\nexit 1\n'
    )
    scontrol.chmod(0o755)
    job, run_dir = user.submit("forbidden", *OPTIONS)
    reaches(user, run_dir, 3)
    time_is_up(user, job)
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    behind = folder.job(run_dir)
    assert behind != job
    assert user.slurm.ended(behind) == "COMPLETED", user.log(run_dir)
    assert [(one.job, one.decision) for one in ended_attempts(run_dir)] == [
        (job, "again"),
        (behind, "done"),
    ]
    assert measured(run_dir) == measured(undisturbed)
    assert user.footprint.left(run_dir) == []


@pytest.mark.slice
def test_a_run_whose_time_is_up_goes_on_in_the_same_job_and_ends_as_if_it_had_not(
    user: User, undisturbed: Path
):
    job, run_dir = user.submit("interrupted", *OPTIONS)
    user.slurm.wait(lambda: user.slurm.state(job) == "RUNNING", 60)
    refused = user.slurms("submit", *_words(user, run_dir), "--cluster", user.cluster_file)
    assert f"has job {job} in the queue (RUNNING)" in refused.stderr
    reaches(user, run_dir, 3)
    time_is_up(user, job)
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    assert user.slurm.facts(job)["Restarts"] == "1"
    first, second = ended_attempts(run_dir)
    assert (first.signal, first.code, first.decision) == ("USR1", 0, "again")
    assert (second.step_before, second.step_after) == (first.step_after, STEPS)
    assert (second.job, second.code, second.decision) == (job, 0, "done")
    assert measured(run_dir) == measured(undisturbed)
    assert (run_dir / "report.html").is_file()
    assert user.footprint.left(run_dir) == []


def test_engines_on_a_node_of_their_own_meet_the_trainer_before_and_after_a_requeue(user: User):
    meeting = user.folder / "apart/engines"
    job, run_dir = user.submit(
        "apart", *OPTIONS, f"rollout.rendezvous={meeting}", "rollout.engines=2"
    )
    reaches(user, run_dir, 3)
    user.assert_no_command_has_key(meeting)
    time_is_up(user, job)
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    assert steps_done(run_dir) == STEPS
    assert decisions(run_dir) == ["again", "done"]
    said_there = (run_dir / "slurm/latest/engines-0.log").read_text()
    assert re.search(r"engine-0 listens at http://[\d.]+:\d+", said_there)
    user.assert_key_is_kept(job, run_dir, meeting)
    assert user.footprint.left(run_dir) == []


def _words(user: User, run_dir: Path) -> list[str]:
    recipe = ROOT / "launch/recipes/quickstart.toml"
    return [str(recipe), *user.overrides, f"train.run_dir={run_dir}"]
