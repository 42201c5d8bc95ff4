"""The first cause of an attempt's end, from what ranks, engines and srun have left."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given

from qurl_megatron.cli import main
from qurl_megatron.cluster import folder
from qurl_megatron.cluster.cause import KINDS, Evidence, Log, exit_codes, first_cause, kind_of
from qurl_megatron.cluster.logs import section
from qurl_megatron.cluster.tracebacks import tracebacks
from qurl_megatron.observe.failures import Failure, read_failures
from tests.fuzz import damaged, damaged_bytes, examples

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
OUT_OF_MEMORY = """[2026-11-22 09:30:01 TP0] Scheduler failed: Traceback (most recent call last):
  File "scheduler.py", line 10, in run
    forward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB

[2026-11-22 09:30:02] Received sigquit from a child process.
"""


def failed(rank: int, kind: str, text: str, time: float = 100.0, **where) -> Failure:
    where = {"node": f"train{rank}", "phase": "train", "step": 7, "version": 6, **where}
    return Failure(time=time, rank=rank, kind=kind, text=text, traceback=f"... {text}", **where)


def engine(text: str, time: float = 90.0, who: str = "engine-0 on roll1") -> Log:
    return Log(who, text, time, Path("engine-0.log"), engine=True)


def test_a_reason_of_its_own_comes_before_collectives_that_failed_earlier():
    cause = first_cause(
        Evidence(
            [
                failed(0, "RuntimeError", GLOO, 99.9),
                failed(2, "DistBackendError", NCCL, 99.8),
                failed(3, "OutOfMemoryError", "CUDA out of memory.", 100.0),
            ]
        )
    )
    assert (cause.first.who, cause.first.node) == ("rank 3", "train3")
    assert cause.first.kind.name == "GPU memory is used up"
    assert [one.who for one in cause.followed] == ["rank 2", "rank 0"]


def test_the_earliest_of_several_reasons_is_the_cause():
    failures = [failed(0, "ValueError", "b", 5.0), failed(1, "ValueError", "a", 4.0)]
    assert first_cause(Evidence(failures)).first.who == "rank 1"


def test_a_rank_that_was_killed_comes_before_those_that_lost_it():
    cause = first_cause(Evidence([failed(0, "RuntimeError", GLOO)], (), KILLED))
    assert (cause.first.who, cause.first.node, cause.first.code) == ("rank 1", "roll1", 137)
    assert cause.first.said == "killed by SIGKILL"
    assert [(one.who, one.code) for one in cause.followed] == [("rank 0", 1)]


def test_memory_that_ran_out_is_the_cause_of_a_kill_whoever_had_the_line_in_its_log():
    line = "slurmstepd-roll1: error: Detected 1 oom_kill event in StepId=2.0. Some of the step"
    log = Log("rank 0", f"step 1/7\n{line}\n", 101.0, Path())
    cause = first_cause(Evidence([failed(0, "RuntimeError", GLOO)], [log], KILLED))
    assert cause.first.kind.name == "memory of the node is used up"
    assert (cause.first.who, cause.first.node) == ("a task", "roll1")
    assert [one.who for one in cause.followed] == ["rank 1", "rank 0"]


def test_a_task_of_the_rollout_nodes_that_was_killed_is_not_called_a_rank():
    lines = (
        "engines: srun: error: roll1: task 1: Killed",
        "srun: error: train1: task 1: Exited with exit code 1",
    )
    cause = first_cause(Evidence([failed(1, "EngineError", "no engine is left")], (), lines))
    assert (cause.first.who, cause.first.node, cause.first.code) == ("rollout node 1", "roll1", 137)
    assert cause.first.kind.name == "it was killed"
    assert [one.kind.name for one in cause.followed] == ["no engine is left"]
    assert exit_codes(lines) == {"1": 1}


def test_of_a_heterogeneous_job_the_node_that_was_lost_is_named_not_the_one_that_tells():
    lines = (
        "engines: srun: error: Node failure on train1",
        "slurmstepd-roll1: error: *** JOB 3 ON roll1 CANCELLED AT 2026 DUE TO NODE FAILURE ***",
        "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.",
        "srun: error: roll1: task 0: Terminated",
    )
    cause = first_cause(Evidence(srun=lines))
    assert (cause.first.who, cause.first.kind.name) == ("node train1", "the node is lost")


@pytest.mark.parametrize(
    ("line", "who"),
    [
        ("srun: error: Node failure on roll2", "node roll2"),
        ("srun: error: roll2: task 1: Killed", "rank 1"),
    ],
)
def test_a_rollout_node_that_was_lost_before_is_not_what_ended_a_run_that_went_on(line, who):
    before = "engines: srun: error: Node failure on train2"
    cause = first_cause(Evidence(srun=(before, line)))
    assert cause.first.who == who
    assert [one.who for one in cause.followed] == ["node train2"]


def test_a_rank_that_was_killed_is_the_cause_though_a_rollout_task_was_too():
    lines = ("engines: srun: error: roll1: task 0: Killed", KILLED[1])
    assert first_cause(Evidence(srun=lines)).first.who == "rank 1"


def test_engines_that_srun_has_ended_hide_no_rank_that_was_killed_later():
    ended = "engines: srun: launch/slurm: _step_signal: Terminating StepId=2.1"
    assert first_cause(Evidence(srun=(ended, KILLED[1]))).first.who == "rank 1"


@pytest.mark.parametrize("who", ["engines: ", "examine: "])
def test_a_step_beside_the_ranks_that_was_aborted_hides_no_rank_that_was_killed_later(who):
    aborted = f"{who}srun: Job step aborted: Waiting up to 7 seconds for job step to finish."
    assert first_cause(Evidence(srun=(aborted, KILLED[1]))).first.who == "rank 1"


def test_ranks_that_srun_itself_has_killed_are_no_cause():
    lines = ("srun: launch/slurm: _step_signal: Terminating StepId=2.0", KILLED[1])
    assert first_cause(Evidence(srun=lines)) is None


HUNG = (
    "qurl: attempt 1, job 2, from step 0; the ranks write run/slurm/attempts/1/train-RANK.log",
    "qurl: no new step for 46 s, where 45 are allowed (job.hung_s)",
    "qurl: the stacks of the ranks are in run/slurm/attempts/1/stack-RANK.txt",
    "qurl: rank 1 did not answer: it is stopped, or stuck in the kernel",
    "srun: forcing job termination",
    "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.",
    "srun: error: roll1: task 1: Killed",
    "srun: launch/slurm: _step_signal: Terminating StepId=2.0",
    "srun: error: roll1: task 0: Killed",
)


def test_ranks_that_the_supervisor_ended_for_a_hang_were_not_killed_by_somebody():
    cause = first_cause(Evidence(srun=HUNG))
    assert (cause.first.kind.name, cause.first.who) == ("the run hung", "rank 1")
    assert cause.first.said == "no new step for 46 s, where 45 are allowed (job.hung_s)"
    assert cause.followed == []


def test_where_all_ranks_wrote_their_stacks_a_hang_is_nobodys():
    lines = [line for line in HUNG if "did not answer" not in line]
    assert first_cause(Evidence(srun=lines)).first.who == "the supervisor"


def test_a_killed_rank_is_no_cause_where_another_says_why():
    failures = [failed(0, "ValueError", "the reason")]
    assert first_cause(Evidence(failures, (), KILLED)).first.said == "ValueError: the reason"


def test_what_ended_the_last_engine_is_the_cause_of_a_run_without_engines():
    lost = failed(0, "EngineError", "no engine is left", phase="rollout")
    cause = first_cause(Evidence([lost], [engine(OUT_OF_MEMORY)]))
    assert cause.first.who == "engine-0 on roll1"
    assert cause.first.kind.name == "GPU memory is used up"
    assert [one.kind.name for one in cause.followed] == ["no engine is left"]


def test_an_engine_that_died_and_was_replaced_is_not_the_cause_of_a_ranks_own_failure():
    cause = first_cause(Evidence([failed(0, "KeyError", "'x'")], [engine(OUT_OF_MEMORY)]))
    assert (cause.first.who, cause.first.kind.name) == ("rank 0", "a fault of the program")


def test_only_collectives_failed_so_the_nodes_are_suspected():
    cause = first_cause(Evidence([failed(1, "RuntimeError", GLOO, 2.0), failed(0, "E", NCCL, 1.0)]))
    assert (cause.first.who, cause.first.kind.name) == ("rank 0", "another rank is gone")


def test_a_rank_that_could_keep_nothing_is_read_from_its_log():
    log = Log(
        "rank 2", "Traceback (most recent call last):\n  File x\nImportError: no x\n", 5.0, Path()
    )
    cause = first_cause(
        Evidence(logs=[log], srun=["srun: error: t1: tasks 0,2-3: Exited with exit code 1"])
    )
    assert (cause.first.who, cause.first.said, cause.first.code) == (
        "rank 2",
        "ImportError: no x",
        1,
    )


@pytest.mark.parametrize(
    ("line", "who", "kind"),
    [
        ("srun: error: t1: task 3: Out Of Memory", "rank 3", "memory of the node is used up"),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0.",
            "srun",
            "memory of the node is used up",
        ),
        ("srun: error: t1: task 0: Segmentation fault (core dumped)", "rank 0", "it crashed"),
        ("srun: error: Node failure on train2", "node train2", "the node is lost"),
        (
            "slurmstepd: error: *** STEP 5.0 ON t1 CANCELLED AT 2026-11-22 DUE TO TIME LIMIT ***",
            "srun",
            "Slurm ended the job",
        ),
    ],
)
def test_what_only_srun_says_is_understood(line, who, kind):
    cause = first_cause(Evidence(srun=[line]))
    assert (cause.first.who, cause.first.kind.name) == (who, kind)


def test_a_job_that_goes_back_to_the_queue_has_not_failed():
    line = "slurmstepd-roll1: error: *** JOB 4 ON roll1 CANCELLED AT 2026 DUE TO JOB REQUEUE ***"
    assert first_cause(Evidence(srun=[line])) is None


def test_a_step_that_slurm_cancels_because_a_rank_failed_is_no_cause():
    log = Log(
        "rank 0",
        "slurmstepd-roll1: error: *** STEP 4.0 ON roll1 CANCELLED AT 2026 ***\n",
        1.0,
        Path(),
    )
    assert first_cause(Evidence(logs=[log])) is None


def test_a_disk_so_full_that_ranks_could_keep_nothing_is_told_by_the_supervisor():
    line = "qurl: attempt.json cannot be written (No space left on device): 0.0 MB are free"
    ended = "srun: error: roll1: task 1: Exited with exit code 120"
    cause = first_cause(Evidence(srun=[ended, line]))
    assert (cause.first.who, cause.first.kind.name) == ("the supervisor", "the disk is full")


def test_a_rank_that_ended_without_a_word_is_named_with_its_exit_code():
    cause = first_cause(Evidence(srun=["srun: error: t1: task 2: Exited with exit code 7"]))
    assert (cause.first.who, cause.first.code) == ("rank 2", 7)
    assert cause.first.said == "exited with exit code 7 and left no word"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (
            "ConfigError: run cannot be written (No space left on device): 1.0 MB are needed",
            "the disk is full",
        ),
        ("ConfigError: NCCL_IB_HCA is not set", "a mistake in the input"),
        ("Collapse: step 2 broke the policy", "numbers, or the guard, halted the run"),
        ("DistBackendError: NCCL error ... Cuda failure 'out of memory'", "GPU memory is used up"),
        ("RankLost: rank 1 lost contact with rank 0", "another rank is gone"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "a GPU fails"),
        ("OSError: [Errno 116] Stale file handle", "the file system fails"),
        ("AssertionError: ", "a fault of the program"),
    ],
)
def test_each_kind_of_failure_has_its_own_advice(said, kind):
    assert kind_of(said).name == kind
    assert len({one.advice for one in KINDS}) == len(KINDS)


def test_tasks_are_counted_one_by_one():
    lines = [
        "srun: error: t1: tasks 0-1,4: Exited with exit code 3",
        "srun: error: t2: task 5: Killed",
    ]
    assert exit_codes(lines) == {"0": 3, "1": 3, "4": 3, "5": 137}


# ---- tracebacks


def test_a_traceback_of_sglang_is_found_behind_its_time():
    (found,) = tracebacks("x\n" + OUT_OF_MEMORY)
    assert found.said.startswith("torch.OutOfMemoryError: CUDA out of memory.")
    assert found.text.endswith("2.00 GiB")
    assert found.time is not None


def test_chained_exceptions_are_one_traceback_and_the_last_is_what_was_raised():
    log = (
        "Traceback (most recent call last):\n  File a\nOSError: first\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n  File b\nRuntimeError: second\nafter\n"
    )
    (found,) = tracebacks(log)
    assert found.said == "RuntimeError: second"
    assert found.text.startswith("Traceback") and "OSError: first" in found.text
    assert not found.text.endswith("after")


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "asyncio.exceptions.CancelledError: x"])
def test_processes_that_were_asked_to_leave_did_not_fail(name):
    assert tracebacks(f"Traceback (most recent call last):\n  File a\n{name}\n") == []


@pytest.mark.parametrize("end", ["", "  File a", "\n\n"])
def test_a_traceback_that_is_cut_off_is_one_all_the_same(end):
    (found,) = tracebacks(f"Traceback (most recent call last):\n{end}")
    assert found.said == "cut off"


def test_the_last_words_of_native_code_are_found():
    log = "terminate called after throwing an instance of 'c10::Error'\n  what():  misaligned\n"
    (found,) = tracebacks(log)
    assert "c10::Error" in found.said and "misaligned" in found.said


# ---- the command


def attempted(run_dir: Path, srun: tuple[str, ...] = KILLED, **ended) -> Path:
    """A run with one attempt, as its supervisor leaves it."""
    number = folder.open_attempt(run_dir, gpus=2)
    where = folder.attempt_folder(run_dir, number)
    (where / "train-0.log").write_text("step 1/7\n")
    lines = [line.replace("attempt 1", f"attempt {number}") for line in srun]
    with (run_dir / "slurm/job.log").open("a") as out:
        out.write("\n".join(lines) + "\n")
    if ended:
        record = {"job": 2, "restarts": 0, "step_before": 0, "step_after": 4, "signal": "", **ended}
        folder.close_attempt(run_dir, folder.Attempt(number=number, **record))
    return where


def test_the_operator_reads_the_cause_first_with_its_place_and_mend(tmp_path, capsys):
    outcome = "qurl: attempt 1: the training step ended with 137"
    where = attempted(tmp_path, (*KILLED, outcome), code=137, decision="stop")
    (where / "stack-0.txt").write_text("")  # made in advance, for a rank that is asked
    (where / "stack-1.txt").write_text("Thread 0x00007f (most recent call first):\n")
    (where / "failure-0.json").write_text(json.dumps(asdict(failed(0, "RuntimeError", GLOO))))
    assert main(["slurm", "logs", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("attempt 1, job 2: ended with 137 (stop); steps 0 to 4 are saved")
    assert said[1] == "The supervisor says: the training step ended with 137"
    assert said[3] == (
        "First cause: it was killed: rank 1 on roll1, while rank 0 was in train of step 7, "
        "exit code 137"
    )
    assert said[4] == "  killed by SIGKILL"
    assert said[5].startswith("What to do: somebody, or Linux where memory ran out")
    assert "1 followed from it, or came later" in said
    assert any(line.endswith("train-0.log  rank 0") for line in said)
    assert any(line.endswith("stack-1.txt  what a rank was doing") for line in said)
    assert not any("stack-0.txt" in line for line in said)


@pytest.mark.parametrize(("decision", "follows"), [("retry", True), ("stop", False)])
def test_who_need_not_submit_again_is_not_told_to(decision, follows, tmp_path, capsys):
    attempted(tmp_path, code=137, decision=decision)
    assert main(["slurm", "logs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert ("on the node says so; the run goes on by itself" in said) == follows
    assert ("submit again" in said) != follows


def test_what_failed_when_slurm_took_the_nodes_back_is_not_called_the_cause(tmp_path, capsys):
    where = attempted(tmp_path, KILLED[:1], code=1, decision="again", signal="preempted")
    lost = failed(1, "EngineError", "no engine came back", phase="publish")
    (where / "failure-1.json").write_text(json.dumps(asdict(lost)))
    assert main(["slurm", "logs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "First cause" not in said
    assert "Failed while it ended: no engine is left: rank 1 on train1" in said


def test_what_a_log_holds_does_not_steer_the_operators_terminal(tmp_path, capsys):
    where = attempted(tmp_path, KILLED[:1], code=1, decision="stop")
    broken = failed(0, "ValueError", "odd \x1b[2J\x1b]0;title\x07")
    (where / "failure-0.json").write_text(json.dumps(asdict(broken)))
    assert main(["slurm", "logs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "odd ?[2J?]0;title?" in said and "\x1b" not in said


def test_an_attempt_can_be_chosen_and_one_that_is_not_there_is_named(tmp_path, capsys):
    attempted(tmp_path, code=137, decision="stop")
    attempted(tmp_path, KILLED[:1], code=0, decision="done")
    assert main(["slurm", "logs", str(tmp_path), "--attempt", "1"]) == 0
    assert "First cause: it was killed" in capsys.readouterr().out
    assert main(["slurm", "logs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "no rank and no engine has failed" in said
    assert f"The attempt before it: `qurl slurm logs {tmp_path} --attempt 1`" in said
    assert main(["slurm", "logs", str(tmp_path), "--attempt", "3"]) == 2
    assert "--attempt 3: " in capsys.readouterr().err


def test_engines_logs_of_a_later_attempt_are_not_read_for_an_earlier_one(tmp_path, capsys):
    attempted(tmp_path, KILLED[:1], code=1, decision="stop")
    log = tmp_path / "logs/engine-0.log"
    log.parent.mkdir()
    log.write_text(OUT_OF_MEMORY)
    assert main(["slurm", "logs", str(tmp_path)]) == 0
    assert "GPU memory is used up: engine-0" in capsys.readouterr().out
    later = log.stat().st_mtime + 1000
    os.utime(log, (later, later))
    assert main(["slurm", "logs", str(tmp_path)]) == 0
    assert "no rank and no engine has failed" in capsys.readouterr().out


def test_lines_of_job_log_belong_to_the_attempt_that_said_so_before():
    text = "qurl: attempt 1, job 2, a\nx\nqurl: attempt 2, job 2, b\ny\n"
    assert section(text, 1) == ["qurl: attempt 1, job 2, a", "x"]
    assert section(text, 2) == ["qurl: attempt 2, job 2, b", "y"]


# ---- any bytes at all

LEFT = asdict(failed(0, "RuntimeError", GLOO))
JOB_LOG = "\n".join((*KILLED, "srun: error: t1: tasks 0-1,4: Exited with exit code 3")).encode()


@given(content=damaged(LEFT))
@examples(60)
def test_a_damaged_failure_is_left_out_and_hides_no_other(content, tmp_path_factory):
    folder = tmp_path_factory.mktemp("attempt")
    (folder / "failure-0.json").write_bytes(content)
    (folder / "failure-1.json").write_text(json.dumps({**LEFT, "rank": 1}))
    found = read_failures(folder)
    assert 1 in [one.rank for one in found]
    assert first_cause(Evidence(found)) is not None


@given(job_log=damaged_bytes(JOB_LOG), log=damaged_bytes(OUT_OF_MEMORY.encode()))
@examples(60)
def test_whatever_a_log_holds_there_is_a_cause_or_none(job_log, log):
    lines = job_log.decode("utf-8", "replace").splitlines()
    cause = first_cause(Evidence((), [engine(log.decode("utf-8", "replace"))], lines))
    assert cause is None or cause.first.said
