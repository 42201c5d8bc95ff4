"""The first cause of an attempt's end, from the traces of ranks, engines and srun."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given

from qurl_megatron.cli import main
from qurl_megatron.cluster import folder
from qurl_megatron.cluster.logs import KINDS, Log, causes, kind_of
from qurl_megatron.kit.clock import now
from qurl_megatron.observe.failures import Failure
from tests.support.fuzz import damaged_bytes, examples

GLOO = (
    "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:39057. This is typically caused by a remote worker crashing."
)
NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited or there was a network error"
)
KILLED = (
    "qurl: attempt 1, job 2, from step 0; the ranks write run/slurm/attempts/1/train-RANK.log",
    "srun: error: roll1: task 1: Killed",
    "srun: launch/slurm: _step_signal: Terminating StepId=2.0",
    "srun: error: roll1: task 0: Exited with exit code 1",
    "srun: error: roll1: task 2: Killed",
    "srun: Force Terminated StepId=2.0",
)
RANK_KILLED = KILLED[1]
HUNG = (
    KILLED[0],
    "qurl: no new step for 46 s, where 45 are allowed (job.hung_s)",
    "qurl: the stacks of the ranks are in run/slurm/attempts/1/stack-RANK.txt",
    "qurl: rank 1 did not answer: it is stopped, or stuck in the kernel",
    "srun: forcing job termination",
    "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.",
    "srun: error: roll1: task 1: Killed",
    "srun: launch/slurm: _step_signal: Terminating StepId=2.0",
    "srun: error: roll1: task 0: Killed",
)
OUT_OF_MEMORY = """[2026-11-22 09:30:01 TP0] Scheduler failed: Traceback (most recent call last):
  File "scheduler.py", line 10, in run
    forward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB

[2026-11-22 09:30:02] Received sigquit from a child process.
"""
DISK = "qurl: attempt.json cannot be written (No space left on device): 0.0 MB are free"


def failed(rank: int, kind: str, text: str, time: float = 100.0, **where) -> Failure:
    where = {"node": f"train{rank}", "phase": "train", "step": 7, "version": 6, **where}
    return Failure(time=time, rank=rank, kind=kind, text=text, traceback=f"... {text}", **where)


def engine(text: str, time: float = 90.0) -> Log:
    return Log("engine-0 on roll1", text, time, engine=True)


def rank_log(number: int, text: str) -> Log:
    return Log(f"rank {number}", text, 101.0)


LOST_PEER = failed(0, "RuntimeError", GLOO)
NO_ENGINE = failed(0, "EngineError", "no engine is left", phase="rollout")
MEMORY, KILL = "memory of the node is used up", "it was killed"


def srun(*lines: str) -> dict:
    return {"srun": lines}


COLLECTIVES = [
    failed(0, "RuntimeError", GLOO, 99.9),
    failed(2, "DistBackendError", NCCL, 99.8),
    failed(3, "OutOfMemoryError", "CUDA out of memory.", 100.0),
]
ENGINE_TASK = "engines: srun: error: roll1: task 0: Killed"
ENGINES_ENDED = "engines: srun: _step_signal: Terminating StepId=2.1"
EXAMINED = "examine: srun: Job step aborted: Waiting up to 7 seconds"
FAULT, NODE_LOST = "a fault of the program", "the node fails"
LOST_NODE = "srun: error: Node failure on train1"
TWO = [failed(0, "ValueError", "b", 5.0), failed(1, "ValueError", "a", 4.0)]
HEAD = "Traceback (most recent call last):\n"
UNKEPT = rank_log(2, f"{HEAD}  x\nImportError: y")
CASES = {
    "a reason of its own before collectives that failed earlier": (
        *({"failures": COLLECTIVES}, "rank 3", "GPU memory is used up", ["rank 2", "rank 0"]),
    ),
    "the earliest of several reasons": ({"failures": TWO}, "rank 1", FAULT, ["rank 0"]),
    "a killed rank before those that lost it, and none that srun killed": (
        *({"failures": [LOST_PEER], "srun": KILLED}, "rank 1", KILL, ["rank 0"]),
    ),
    "a task of the rollout nodes before ranks without engines": (
        *({"failures": [NO_ENGINE], "srun": [ENGINE_TASK]}, "rollout node 0", KILL, ["rank 0"]),
    ),
    "a killed rank before a killed rollout task": (
        *(srun(ENGINE_TASK, RANK_KILLED), "rank 1", KILL, ["rollout node 0"]),
    ),
    "a node that was lost": (srun(LOST_NODE), "node train1", NODE_LOST, []),
    "a rollout node that was lost before did not end the run": (
        *(srun(f"engines: {LOST_NODE}", RANK_KILLED), "rank 1", KILL, ["node train1"]),
    ),
    "engines and an examination that srun has ended hide no rank": (
        *(srun(ENGINES_ENDED, EXAMINED, RANK_KILLED), "rank 1", KILL, []),
    ),
    "hung, and nobody killed it": (srun(*HUNG), "rank 1", "the run hung", []),
    "the end of the last engine": (
        {"failures": [NO_ENGINE], "logs": [engine(OUT_OF_MEMORY)]},
        "engine-0 on roll1",
        "GPU memory is used up",
        ["rank 0"],
    ),
    "an engine that was replaced is not the cause": (
        {"failures": [failed(0, "KeyError", "'x'")], "logs": [engine(OUT_OF_MEMORY)]},
        "rank 0",
        FAULT,
        ["engine-0 on roll1"],
    ),
    "collectives alone": (
        *({"failures": COLLECTIVES[:2]}, "rank 2", "another rank is gone", ["rank 0"]),
    ),
    "a traceback that is cut off": ({"logs": [rank_log(2, f"x\n{HEAD}")]}, "rank 2", FAULT, []),
    "a rank that could keep nothing is read from its log": (
        *({"logs": [UNKEPT]}, "rank 2", "the environment lacks something", []),
    ),
    "out of memory": (srun("srun: error: t1: task 3: Out Of Memory"), "rank 3", MEMORY, []),
    "a crash": (
        *(srun("srun: error: t1: tasks 0,2-3: Segmentation fault (core dumped)"), "rank 0"),
        *(KILL, ["rank 2", "rank 3"]),
    ),
    "a disk so full that ranks could keep nothing": (
        srun("srun: error: r1: task 1: Exited with exit code 120", DISK),
        "the supervisor",
        "the disk is full",
        [],
    ),
    "a rank without a word": (
        srun("srun: error: t1: task 2: Exited with exit code 7"),
        "rank 2",
        FAULT,
        [],
    ),
}


@pytest.mark.parametrize(("evidence", "source", "kind", "followed"), CASES.values(), ids=CASES)
def test_the_first_cause_is_told_from_what_followed(evidence, source, kind, followed):
    first, *others = causes(**evidence)
    assert (first.source, first.kind.name) == (source, kind)
    assert [event.source for event in others] == followed


def test_the_node_is_that_of_the_rank_or_of_the_line():
    assert causes(COLLECTIVES)[0].node == "train3"
    assert causes(**srun(RANK_KILLED))[0].node == "roll1"


@pytest.mark.parametrize(
    "evidence",
    [
        srun(KILLED[2], RANK_KILLED),
        srun("slurmstepd-r1: error: *** JOB 4 ON r1 CANCELLED DUE TO JOB REQUEUE"),
        {"logs": [rank_log(0, "slurmstepd-r1: error: *** STEP 4.0 ON r1 CANCELLED AT 2")]},
        {"logs": [rank_log(0, f"{HEAD}  File a\nKeyboardInterrupt\n")]},
        {"logs": [engine(f"{HEAD}  File a\nasyncio.exceptions.CancelledError: x\n")]},
    ],
    ids=["ranks that srun killed", "a requeue", "a step that is cancelled", "^C", "a task's end"],
)
def test_what_only_follows_is_no_cause(evidence):
    assert causes(**evidence) == []


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("ConfigError: run cannot be written (No space left on device): 1 MB", "the disk is full"),
        ("ConfigError: NCCL_IB_HCA is not set", "a mistake in the input"),
        ("Collapse: step 2 broke the policy", "numbers, or the guard, halted the run"),
        ("DistBackendError: NCCL error ... Cuda failure 'out of memory'", "GPU memory is used up"),
        ("RankLost: rank 1 lost contact with rank 0", "another rank is gone"),
        ("OSError: [Errno 116] Stale file handle", NODE_LOST),
        ("AssertionError: ", "a fault of the program"),
    ],
)
def test_each_kind_of_failure_has_its_own_advice(message, kind):
    assert kind_of(message).name == kind
    assert len({kind.advice for kind in KINDS}) == len(KINDS)


def attempted(run_dir: Path, srun: tuple[str, ...] = KILLED, **ended) -> Path:
    """A run with one attempt, as its supervisor leaves it."""
    begun = folder.open_attempt(run_dir, job=2)
    where = folder.attempt_folder(run_dir, begun.number)
    (where / "train-0.log").write_text("step 1/7\n")
    lines = [line.replace("attempt 1", f"attempt {begun.number}") for line in srun]
    with (run_dir / "slurm/job.log").open("a") as out:
        out.write("\n".join(lines) + "\n")
    if ended:
        record = replace(begun, step_after=4, ended_at=now(), **ended)
        folder.write_attempt(run_dir, record)
    return where


def logs_of(run_dir: Path, capsys, *options: str) -> str:
    assert main(["slurm", "logs", str(run_dir), *options]) == 0
    return capsys.readouterr().out


def test_the_operator_reads_the_cause_first_with_its_place_and_mend(tmp_path, capsys):
    reason = "the training step ended with 137"
    where = attempted(tmp_path, code=137, decision="stop", reason=reason)
    (where / "failure-0.json").write_text(json.dumps(asdict(LOST_PEER)))
    lines = logs_of(tmp_path, capsys).splitlines()
    assert lines[0].endswith("attempt 1, job 2: ended with 137 (stop); steps 0 to 4 are saved")
    assert lines[1] == "The supervisor says: the training step ended with 137"
    assert lines[3] == "First cause: it was killed: rank 1 on roll1"
    assert lines[4] == "  killed by SIGKILL"
    assert lines[5].startswith("What to do: find out what killed it: a person; Linux, where memory")
    assert "1 followed from it, or came later" in lines
    assert any(str(where) in line for line in lines)


@pytest.mark.parametrize(("decision", "goes_on"), [("retry", True), ("stop", False)])
def test_who_need_not_submit_again_is_not_told_to(decision, goes_on, tmp_path, capsys):
    attempted(tmp_path, code=137, decision=decision)
    text = logs_of(tmp_path, capsys)
    assert ("the run goes on by itself" in text) == goes_on
    assert ("`qurl slurm submit`, as before, goes on" in text) != goes_on


def test_what_failed_when_slurm_took_the_nodes_back_is_not_called_the_cause(tmp_path, capsys):
    where = attempted(tmp_path, KILLED[:1], code=1, decision="again", signal="preempted")
    (where / "failure-0.json").write_text(json.dumps(asdict(NO_ENGINE)))
    text = logs_of(tmp_path, capsys)
    assert "First cause" not in text
    assert "Failed while it ended: no engine is left: rank 0 on train0" in text


def test_an_attempt_can_be_chosen_and_one_that_is_not_there_is_named(tmp_path, capsys):
    attempted(tmp_path, code=137, decision="stop")
    attempted(tmp_path, KILLED[:1], code=0, decision="done")
    assert "First cause: it was killed" in logs_of(tmp_path, capsys, "--attempt", "1")
    text = logs_of(tmp_path, capsys)
    assert "no rank and no engine has failed" in text
    assert main(["slurm", "logs", str(tmp_path), "--attempt", "3"]) == 2
    assert "--attempt 3: " in capsys.readouterr().err


def test_engines_logs_of_a_later_attempt_are_not_read_for_an_earlier_one(tmp_path, capsys):
    attempted(tmp_path, KILLED[:1], code=1, decision="stop")
    log = tmp_path / "logs/engine-0.log"
    log.parent.mkdir()
    log.write_text(OUT_OF_MEMORY)
    assert "GPU memory is used up: engine-0" in logs_of(tmp_path, capsys)
    later = log.stat().st_mtime + 1000
    os.utime(log, (later, later))
    assert "no rank and no engine has failed" in logs_of(tmp_path, capsys)


JOB_LOG = "\n".join((*KILLED, "srun: error: t1: tasks 0-1,4: Exited with exit code 3")).encode()


@given(job_log=damaged_bytes(JOB_LOG), log=damaged_bytes(OUT_OF_MEMORY.encode()))
@examples(60)
def test_whatever_a_log_holds_there_is_a_cause_or_none(job_log, log):
    lines = job_log.decode("utf-8", "replace").splitlines()
    events = causes((), [engine(log.decode("utf-8", "replace"))], lines)
    assert all(event.message for event in events)
