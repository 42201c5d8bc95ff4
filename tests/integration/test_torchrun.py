"""Runs on nodes without a batch system, which are scripts on one machine here."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from qurl_megatron.config import load
from qurl_megatron.observe.attempts import tried
from qurl_megatron.runtime.network import free_port
from qurl_megatron.slurm.logs import logs
from qurl_megatron.training.state import latest
from qurl_megatron.training.warmstart import warmstart
from tests.integration.test_kills import finished, metrics
from tests.leftovers import Footprint
from tests.runs import Run, make_recipe

SCRIPT = Path(__file__).parents[2] / "launch/torchrun.py"
LIMIT_S = 300.0
OPTIONS = ("parallel.tensor=2", "checkpoint.every=2", "train.steps=8", "train.eval_prompts=0")
OPTIONS += ("rollout.engines=1", "train.save_rollouts=false")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = make_recipe(tmp_path_factory.mktemp("torchrun"))
    config = load(path, ["warmstart.steps=2"])
    warmstart(path.parent / "model", config.data, config.warmstart, log=lambda line: None)
    return path


class Nodes:
    """One script after the other for a run; all of it is gone at the end."""

    def __init__(self, recipe: Path, name: str, *overrides: str) -> None:
        self.recipe, self.dir = recipe, recipe.parent / name
        self.footprint = Footprint()
        self._overrides = [f"train.run_dir={self.dir}", *overrides]
        self._started: list[tuple[subprocess.Popen, Path]] = []

    def start(self, *options: str) -> subprocess.Popen:
        """A script on a node."""
        log = self.recipe.parent / f"{self.dir.name}-{len(self._started)}.txt"
        command = [sys.executable, SCRIPT, *options, self.recipe, *self._overrides]
        # Each node would take all cores for its ranks, and the order of sums goes by the threads.
        env = {**self.footprint.env, "OMP_NUM_THREADS": "1"}
        with log.open("w") as file:
            process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
        self._started.append((process, log))
        return process

    def told(self) -> str:
        return "\n".join(log.read_text() for _, log in self._started)

    def wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, self.told()
            assert any(process.poll() is None for process, _ in self._started), self.told()
            time.sleep(0.05)

    def saved(self) -> int:
        newest = latest(self.dir)
        return int(newest.name.removeprefix("step_")) if newest else 0

    def rank(self, number: int) -> int:
        """The process of a rank, once there is one. A look takes long where much else runs: look
        before the moment in which it is to be killed."""
        found: list[int] = []
        self.wait(lambda: found.extend(self._ranks(number)) or bool(found))
        return found[0]

    def _ranks(self, number: int) -> Iterator[int]:
        """It is torchrun's child, and has forks of the same name."""
        known = {process.pid: process for process in self.footprint.look()}
        for process in known.values():
            with contextlib.suppress(OSError, psutil.Error):  # it has ended
                environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                launcher = known.get(process.ppid())
                if launcher is None or f"RANK={number}".encode() not in environment:
                    continue
                if "torch.distributed.run" in launcher.cmdline():
                    yield process.pid

    def attempts(self) -> list[tuple[str, int, int, int]]:
        """Decision and exit code of each, and the steps that were saved before and after."""
        ended = [one.ended for one in tried(self.dir) if one.ended]
        return [(one.decision, one.code, one.step_before, one.step_after) for one in ended]


@contextlib.contextmanager
def nodes(recipe: Path, name: str, *overrides: str) -> Iterator[Nodes]:
    made = Nodes(recipe, name, *overrides)
    try:
        yield made
    finally:
        for process in made.footprint.processes():
            process.kill()


def endpoint() -> str:
    """Where a head may listen seconds later: no port that the kernel gives to others meanwhile."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def whole(tiny) -> dict[int, dict[str, float]]:
    """What is measured where nothing happens."""
    return finished(Run(tiny, "whole", *OPTIONS))


def test_a_run_on_two_nodes_of_which_a_rank_was_killed_ends_as_if_nothing_had_been(
    tiny, whole, capsys
):
    with nodes(tiny, "battered", *OPTIONS) as run:
        two = ("--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint={endpoint()}")
        started = [run.start(*two), run.start(*two)]
        victim = run.rank(1)
        run.wait(lambda: run.saved() >= 2)
        os.kill(victim, signal.SIGKILL)
        assert [process.wait(LIMIT_S) for process in started] == [0, 0], run.told()
        assert run.footprint.left(run.dir) == []
        (first, killed, _, after), last = run.attempts()
        assert (first, killed) == ("retry", 137) and after >= 2
        assert last == ("done", 0, after, 8)
        assert metrics(run) == whole

        capsys.readouterr()
        assert logs(run.dir, 1) == 0
        said = capsys.readouterr().out
        assert re.search(
            r"^First cause: it was killed: rank 1 on \S+, while rank 0 was in ", said, re.M
        )
        assert "killed by SIGKILL" in said and "another rank is gone" in said


@pytest.mark.thorough
def test_stopped_on_a_node_that_is_not_the_head_a_run_goes_on_as_if_nothing_had_been(tiny, whole):
    with nodes(tiny, "stopped", *OPTIONS) as run:
        two = ("--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint={endpoint()}")
        started = [run.start(*two), run.start(*two)]
        run.wait(lambda: run.saved() >= 2)
        started[1].send_signal(signal.SIGTERM)
        assert [process.wait(LIMIT_S) for process in started] == [143, 143], run.told()
        assert run.footprint.left(run.dir) == []
        saved = run.saved()
        assert f"attempt 1: stopped by SIGTERM; step {saved} is saved" in run.told()

        assert run.start("--nproc-per-node=2").wait(LIMIT_S) == 0, run.told()
        assert run.footprint.left(run.dir) == []
        assert run.attempts() == [("stop", 0, 0, saved), ("done", 0, saved, 8)]
        assert metrics(run) == whole


@pytest.mark.thorough
def test_two_failures_without_a_checkpoint_between_them_end_a_run_with_4(tiny):
    with nodes(tiny, "idle", *OPTIONS, "checkpoint.every=0") as run:
        head = run.start("--nproc-per-node=2")
        for attempt in (1, 2):
            run.wait(lambda n=attempt: len(tried(run.dir)) == n)
            victim = run.rank(attempt % 2)
            run.wait(lambda: bool(tried(run.dir)[-1].steps))
            os.kill(victim, signal.SIGKILL)
        assert head.wait(LIMIT_S) == 4
        assert run.footprint.left(run.dir) == []
        assert [one[:2] for one in run.attempts()] == [("retry", 137), ("stop", 137)]
    said = "the second attempt in a row without a new checkpoint; step 0 is saved; fix the cause"
    assert f"{said}, then the same command goes on" in run.told()


@pytest.mark.thorough
@pytest.mark.parametrize("after", ["the ranks write", "setting up"])
def test_a_run_that_is_stopped_before_its_ranks_can_listen_ends_with_143(tiny, after):
    with nodes(tiny, f"early-{after[:3]}", *OPTIONS) as run:
        head = run.start("--nproc-per-node=2")
        run.wait(lambda: "the ranks write" in run.told())
        if after == "setting up":
            run.wait(lambda: (run.dir / "slurm/attempts/1/train-1.log").exists())
        head.send_signal(signal.SIGTERM)
        assert head.wait(LIMIT_S) == 143, run.told()
        assert run.attempts()[0][0] == "stop" and run.footprint.left(run.dir) == []


@pytest.mark.thorough
def test_a_rank_that_is_stopped_is_found_and_the_run_goes_on(tiny, capsys):
    with nodes(tiny, "hung", *OPTIONS) as run:
        head = run.start("--nproc-per-node=2", "--hung-s=90")
        victim = run.rank(1)
        run.wait(lambda: run.saved() >= 2)
        os.kill(victim, signal.SIGSTOP)
        assert head.wait(LIMIT_S) == 0, run.told()
        assert run.footprint.left(run.dir) == []
        assert [one[0] for one in run.attempts()] == ["retry", "done"]
    assert "rank 1 did not answer: it is stopped, or stuck in the kernel" in run.told()
    assert "File" in (run.dir / "slurm/attempts/1/stack-0.txt").read_text()
    logs(run.dir, 1)
    said = capsys.readouterr().out
    assert "First cause: the run hung: rank 1" in said and "are allowed (--hung-s)" in said


@pytest.mark.thorough
def test_scripts_that_are_killed_leave_nothing_and_a_node_may_come_back(tiny):
    with nodes(tiny, "scripts", *OPTIONS) as run:
        two = ("--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint={endpoint()}")
        head = run.start(*two)
        run.wait(lambda: "ranks write" in run.told() or "nodes are here" in run.told())
        other = run.start(*two)
        run.wait(lambda: run.saved() >= 2)
        other.kill()
        run.wait(lambda: "lost" in run.told())
        other = run.start(*two)  # it comes back
        run.wait(lambda: len(tried(run.dir)) == 2)
        run.rank(0)
        run.wait(lambda: bool(tried(run.dir)[1].steps))
        head.kill()
        head.wait()
        head = run.start(*two)  # in the place of the one that was killed
        assert [head.wait(LIMIT_S), other.wait(LIMIT_S)] == [0, 0], run.told()
        assert run.footprint.left(run.dir) == []
        assert run.attempts()[-1][0] == "done"
        other = run.start("--nproc-per-node=2")
        assert other.wait(LIMIT_S) == 0 and "has all its 8 steps" in run.told()


@pytest.mark.thorough
@pytest.mark.parametrize("override", ["optimizer.lr=1e9", "model.path=nowhere"])
def test_what_would_end_so_again_is_not_tried_again(tiny, override):
    code, line = {"o": (3, "broke the policy"), "m": (2, "does not exist")}[override[0]]
    with nodes(tiny, f"final-{code}", *OPTIONS, override) as run:
        assert run.start("--nproc-per-node=2").wait(LIMIT_S) == code, run.told()
        assert [one[:2] for one in run.attempts()] == [("stop", code)]
        assert f"`qurl slurm logs {run.dir} --attempt 1` says why" in run.told()
        assert run.footprint.left(run.dir) == []
    logged = (run.dir / "slurm/attempts/1").glob("train-*.log")
    assert line in "".join(log.read_text() for log in logged)
