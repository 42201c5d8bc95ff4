"""What the nodes of a job are to each other, on a real Slurm whose nodes' names resolve nowhere."""

import re
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.slurm.cluster import NODES
from tests.slurm.conftest import User
from tests.slurm.runs import (
    FEW,
    OPTIONS,
    STEPS,
    decisions,
    measured,
    steps_done,
)

EXAMINE_S = 60


TORCH = Path(find_spec("torch").origin).parent
WHY = "it could not be measured: "


@pytest.fixture
def hide_torch(user: User):
    """Makes a node bad: torch is an empty folder there; undone at the end."""
    nodes = []

    def hide(node: str) -> None:
        user.slurm.on(node, "mount", "-t", "tmpfs", "tmpfs", TORCH)
        nodes.append(node)

    yield hide
    for node in nodes:
        user.slurm.on(node, "umount", "-l", TORCH)


def bad_nodes(run_dir: Path) -> list[str]:
    """Names of the nodes that the supervisor called bad, in all attempts."""
    return re.findall(f"node (\\S+) is bad: {WHY}", (run_dir / "slurm/job.log").read_text())


def test_two_jobs_of_one_user_at_once_on_the_same_two_nodes_end_as_each_alone_would(
    user: User, undisturbed: Path
):
    for node in NODES:
        with pytest.raises(OSError):
            socket.getaddrinfo(node, None)
    # A rank on each node, of which both jobs have half.
    user.describe({"gpus": 1, "cpus": 64}, extra=["--nodelist=train1,train2"])
    first, first_dir = user.submit("first", *OPTIONS)
    second, second_dir = user.submit("second", *OPTIONS)
    user.slurm.wait(lambda: min(steps_done(first_dir), steps_done(second_dir)) >= 1, 180)
    for job, where in ((first, first_dir), (second, second_dir)):
        assert user.slurm.facts(job)["NodeList"] == "train[1-2]"
        assert user.slurm.ended(job) == "COMPLETED", user.log(where)
    alone = measured(undisturbed)
    assert measured(first_dir) == measured(second_dir) == alone
    assert len(alone) == STEPS + 1
    for where in (first_dir, second_dir):
        assert list(where.glob(".meet-*")) == []
        assert user.footprint.left(where) == []


def test_a_bad_node_is_excluded_and_the_job_goes_on_elsewhere(user: User, hide_torch):
    user.describe({"gpus": 1}, examine_s=EXAMINE_S)
    for node in ("roll1", "train2"):
        hide_torch(node)
    job, run_dir = user.submit("moved", *FEW)
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    *moved, last = decisions(run_dir)
    assert 1 <= len(moved) <= 2 and {*moved} == {"without"} and last == "done"
    assert user.slurm.facts(job)["NodeList"] == "roll2,train1"
    assert {*bad_nodes(run_dir)} <= {"roll1", "train2"}
    assert steps_done(run_dir) == 6
