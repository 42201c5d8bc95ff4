"""What the nodes of a job are to each other, on a real Slurm whose nodes' names resolve nowhere."""

import json
import socket
from pathlib import Path

import pytest

from qurl_megatron.slurm import folder
from tests.slurm.cluster import NODES
from tests.slurm.conftest import User
from tests.slurm.test_slurm import measured, steps_done

STEPS = 6
FEW = (f"train.steps={STEPS}", "checkpoint.every=0")
EXAMINE_S = 60


@pytest.fixture
def little_shared_memory(user: User):
    """Makes a node bad, as a container that was started carelessly is; mended at the end."""
    mended = []

    def make(node: str) -> None:
        user.slurm.on(node, "mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm")
        mended.append(node)

    yield make
    for node in mended:
        user.slurm.on(node, "umount", "-l", "/dev/shm")


def verdict(run_dir: Path, attempt: int = 1) -> dict:
    return json.loads((run_dir / f"slurm/attempts/{attempt}/nodes/verdict.json").read_text())


def test_two_jobs_of_one_user_at_once_on_the_same_two_nodes_end_as_each_alone_would(user: User):
    for node in NODES:
        with pytest.raises(OSError):
            socket.getaddrinfo(node, None)
    # A rank on each node, of which both jobs have half.
    user.describe({"gpus": 1, "cpus": 64}, extra=["--nodelist=train1,train2"])
    (first,), first_dir = user.submit("first", *FEW)
    (second,), second_dir = user.submit("second", *FEW)
    user.slurm.wait(lambda: min(steps_done(first_dir), steps_done(second_dir)) >= 1, 120)
    for job, where in ((first, first_dir), (second, second_dir)):
        assert user.slurm.facts(job)["NodeList"] == "train[1-2]"
        assert user.slurm.ended(job) == "COMPLETED", user.log(where)
    (alone,), alone_dir = user.submit("alone", *FEW)
    assert user.slurm.ended(alone) == "COMPLETED", user.log(alone_dir)
    assert measured(first_dir) == measured(second_dir) == measured(alone_dir)
    assert len(measured(alone_dir)) == STEPS + 1
    for where in (first_dir, second_dir):
        assert list(where.glob(".meet-*")) == []
        assert user.footprint.left(where) == []


@pytest.mark.parametrize(("layout", "bad"), [("hetjob", ["train2"]), ("split", ["train1"])])
def test_a_bad_rollout_node_is_left_out_and_the_run_goes_on_with_the_other(
    layout: str, bad: list[str], user: User, little_shared_memory
):
    # A rank or an engine for each of all four nodes.
    user.describe({"gpus": 1, "cpus": 128}, layout=layout, examine_s=EXAMINE_S)
    for node in bad:
        little_shared_memory(node)
    meeting = user.folder / "apart/engines"
    (job,), run_dir = user.submit(
        "apart", *FEW, f"rollout.rendezvous={meeting}", "rollout.engines=2"
    )
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    assert steps_done(run_dir) == STEPS
    assert set(verdict(run_dir)["bad"]) == set(bad)
    said = (run_dir / "slurm/latest/nodes").glob("*[12].json")
    assert {json.loads(path.read_text())["node"] for path in said} == set(NODES)
    offered = "\n".join(p.read_text() for p in run_dir.glob("slurm/latest/engines-*.log"))
    assert offered.count("listens at") == 1


def test_a_bad_training_node_is_excluded_and_the_job_goes_on_elsewhere(
    user: User, little_shared_memory
):
    user.describe({"gpus": 1}, examine_s=EXAMINE_S)
    for node in ("roll1", "train2"):
        little_shared_memory(node)
    (job,), run_dir = user.submit("moved", *FEW)
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    moved = [a for a in folder.attempts(run_dir) if a.decision == "without"]
    assert 1 <= len(moved) <= 2
    assert folder.attempts(run_dir)[-1].decision == "done"
    assert user.slurm.facts(job)["NodeList"] == "roll2,train1"
    bad = verdict(run_dir)["bad"]
    assert set(bad) <= {"roll1", "train2"}
    assert all("/dev/shm has 0.06 GiB free, and 1 are needed" in why for why in bad.values())
    assert steps_done(run_dir) == STEPS


def test_a_bad_node_without_another_in_its_place_ends_the_job_with_a_sentence(
    user: User, little_shared_memory
):
    little_shared_memory("train1")
    user.describe(examine_s=EXAMINE_S, extra=["--nodelist=train1"])
    (job,), run_dir = user.submit("stuck", *FEW)
    assert user.slurm.ended(job) == "FAILED", user.log(run_dir)
    assert user.slurm.facts(job)["ExitCode"] == "7:0"
    log = (run_dir / "slurm/job.log").read_text()
    assert "node train1 is bad: /dev/shm has 0.06 GiB free" in log
    assert "train1 cannot be excluded (sbatch --test-only refused" in log
    (only,) = folder.attempts(run_dir)
    assert (only.decision, only.code) == ("stop", 7)
