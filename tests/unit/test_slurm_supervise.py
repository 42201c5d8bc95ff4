import os
import signal
import subprocess
import sys
import time
from datetime import datetime

import psutil
import pytest

from qurl_megatron.cluster import supervise
from qurl_megatron.cluster.supervise import (
    ENGINES_S,
    GLANCE_S,
    KILL_S,
    LAST_S,
    POLL_S,
    WATCH_S,
    SrunStep,
    Stillness,
    beside,
    end_of,
    final_code,
    preempted,
    progress_mark,
)
from qurl_megatron.cluster.tasks import forget_hook
from qurl_megatron.kit import place
from tests.support.waiting import NEVER_S, PATIENCE_S, wait_until


def test_the_end_of_a_job_and_its_preemption_are_read_from_slurms_facts():
    at = datetime(2026, 11, 22, 9, 30).timestamp()
    assert end_of({"EndTime": "2026-11-22T09:30:00"}) == at
    assert end_of({"EndTime": "Unknown"}) is None is end_of({})
    assert preempted({"PreemptTime": "2026-11-22T09:34:46"})
    assert not preempted({"PreemptTime": "None"}) and not preempted({})


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("task 0: Exited with exit code 2", 2),
        ("tasks 0-3,7: Exited with exit code 3", 3),
        ("task 0: Exited with exit code 23", 0),
        ("task 1: Killed", 0),
    ],
)
def test_a_final_exit_code_is_read_from_what_srun_says(line, code):
    assert final_code(f"srun: error: roll1: {line}\n") == code


def test_a_program_ended_by_a_signal_ends_with_128_and_it():
    step = SrunStep(["sleep", f"{NEVER_S}"])
    assert step.wait(0.01) is None
    step.end()
    assert step.wait(PATIENCE_S) == 128 + signal.SIGTERM


def test_what_the_engines_srun_says_is_told_from_what_the_ranks_says(tmp_path, capfd):
    line = "srun: error: roll1: task 1: Killed"
    SrunStep(["sh", "-c", f"echo '{line}' >&2"]).wait(PATIENCE_S)
    with beside(["sh", "-c", f"echo '{line}' >&2; touch {tmp_path}/said"]):
        wait_until((tmp_path / "said").exists)
    assert capfd.readouterr().err == f"{line}\nengines: {line}\n"


def test_what_follows_on_ranks_that_are_ended_fits_before_the_time_limit():
    assert WATCH_S + POLL_S + KILL_S + ENGINES_S + KILL_S < LAST_S


def test_engines_that_do_not_leave_are_killed_once_their_time_is_over(monkeypatch):
    monkeypatch.setattr(supervise, "ENGINES_S", 0.1)
    began = time.monotonic()
    with beside(["sh", "-c", f"trap '' USR1; exec sleep {NEVER_S}"]):
        pass
    assert time.monotonic() - began < ENGINES_S


def test_every_step_and_every_checkpoint_is_a_sign_of_life(tmp_path):
    marks = [progress_mark(tmp_path)]
    for metrics in ("1\n", "1\n2\n"):
        (tmp_path / "metrics.jsonl").write_text(metrics)
        marks.append(progress_mark(tmp_path))
    checkpoint = tmp_path / "checkpoints/step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    assert len({*marks, progress_mark(tmp_path)}) == 4


def test_time_for_which_the_watcher_was_itself_suspended_is_not_stillness():
    clock = iter([0.0, 1.0, 2.0, 602.0, 603.0, 604.0])
    still = Stillness(lambda: next(clock))
    assert [still.seconds() for _ in range(4)] == [1.0, 2.0, 2.0 + GLANCE_S, 3.0 + GLANCE_S]
    still.moved()
    assert still.seconds() == 1.0


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "61007"}, {}),
        ({"MASTER_ADDR": "10.0.0.1"}, {"MASTER_ADDR": "10.0.0.1"}),
    ],
    ids=["enroot's hook", "the site"],
)
def test_ranks_of_srun_do_not_meet_where_enroots_hook_for_pytorch_says(given, left):
    env = {"PATH": "/bin", **given}
    forget_hook(env)
    assert env == {"PATH": "/bin", **left}


@pytest.mark.parametrize(
    ("tasks", "buried"), [("1", True), ("1(x2)", True), ("2", False), ("8(x2)", False)]
)
def test_a_rank_takes_its_group_along_only_where_no_other_rank_is_in_it(tasks, buried, monkeypatch):
    groups = []
    monkeypatch.setattr(place, "bury", groups.append)
    monkeypatch.setattr(os, "getpgrp", os.getpid)  # srun's first task of a node leads them all
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    place.end_with_launcher()
    assert groups == [os.getpid()] * buried


RANK = """
import ctypes, signal, subprocess, sys, time
from pathlib import Path
from qurl_megatron.cluster.tasks import stop_on_usr1
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
stop_on_usr1(Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", "input(); print('lives')"], stdin=subprocess.PIPE)
def stuck_here():
    print(child.pid, flush=True)
    if sys.argv[2] == "python":
        time.sleep(60)
    ctypes.PyDLL(None).sleep(60)  # holds the interpreter's lock, as a hanging extension does
try:
    stuck_here()
finally:
    child.communicate(b"\\n")
"""


@pytest.mark.parametrize("where", ["python", "native"])
def test_a_stuck_rank_writes_its_stacks_and_stops_when_told_and_its_children_do_not_mind(
    where, tmp_path
):
    path = tmp_path / "stack-0.txt"
    pipes = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE, "text": True}
    rank = subprocess.Popen([sys.executable, "-c", RANK, path, where], **pipes)
    child = int(rank.stdout.readline())
    assert path.read_text() == ""
    # It says where it is just before it sleeps.
    wait_until(lambda: psutil.Process(rank.pid).status() == psutil.STATUS_SLEEPING)
    for pid in (child, rank.pid):  # as clusters do that signal all descendants of a task
        os.kill(pid, signal.SIGUSR2)
    wait_until(lambda: "in stuck_here" in path.read_text())
    assert path.read_text().count("(most recent call first)") == 2  # and that for the signals
    assert psutil.Process(child).status() != psutil.STATUS_ZOMBIE
    if where == "native":
        rank.kill()
    for pid in (child, rank.pid):
        os.kill(pid, signal.SIGUSR1)
    printed, _ = rank.communicate()
    if where == "python":
        assert (rank.returncode, printed) == (5, "lives\n")
