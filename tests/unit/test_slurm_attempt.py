"""The supervisor of a job, whose Slurm is a few shell scripts; its decision after an attempt."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from qurl_megatron.cluster import folder, supervise
from qurl_megatron.cluster.attempt import attempt
from qurl_megatron.cluster.cluster import ClusterConfig, ContainerConfig, JobConfig, NodeConfig
from qurl_megatron.cluster.submit import render, training_job
from qurl_megatron.cluster.supervise import GLANCE_S, Stillness
from qurl_megatron.cluster.verdict import BAD_NODE, NO_PROGRESS, STOPPED, Decision, decide
from qurl_megatron.config import load
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.training.state import latest
from tests.support.programs import Programs
from tests.support.slurm_runs import submitted


class Slurm(Programs):
    """``slurm(program, body)`` makes one of Slurm's programs; ``ranks`` makes srun."""

    def ranks(self, run_dir: Path, body: str) -> None:
        """Make an srun whose body may call ``saves STEP``, ``first`` and ``ended_by_slurm``."""
        own = f"{run_dir}/checkpoints"
        self(
            "srun",
            f"saves() {{ mkdir -p {own}/step_00000$1; "
            f"echo '{{\"step\": '$1'}}' > {own}/step_00000$1/state.json; }}\n"
            f"first() {{ [ ! -e {own} ]; }}\n"
            "ended_by_slurm() { trap '' USR1; kill -TERM $PPID; sleep 0.1; }\n"
            f"{body}",
        )

    @property
    def requeued(self) -> bool:
        return "scontrol requeue 5" in self.called


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Slurm:
    """A job of its own, on node a1."""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a1")
    monkeypatch.setenv("QURL_ATTEMPT", "")  # an attempt sets it for its ranks
    monkeypatch.setattr("qurl_megatron.cluster.attempt.LINGER_S", 0.0)  # then Slurm kills it
    monkeypatch.setattr(supervise, "POLL_S", 0.05)
    make = Slurm(tmp_path, monkeypatch)
    for program in ("squeue", "scontrol", "scancel"):
        make(program, "")
    return make


def job(**values) -> ClusterConfig:
    return ClusterConfig(job=JobConfig(**{"examine_s": 0, **values}))


@pytest.fixture
def run_dir(slurm, tmp_path) -> Path:
    return submitted(tmp_path / "run", cluster=job())


def recorded(run_dir: Path) -> list[tuple[str, str]]:
    return [(record.signal, record.decision) for record in folder.attempts(run_dir)]


def decisions(run_dir: Path) -> list[str]:
    return [record.decision for record in folder.attempts(run_dir)]


def test_the_supervisor_needs_neither_torch_nor_megatron():
    looks = "import sys, qurl_megatron.cli\nfrom qurl_megatron.cluster import attempt, submit\n"
    heavy = "sorted({'torch', 'megatron', 'numpy', 'psutil'} & set(sys.modules))"
    command = [sys.executable, "-c", f"{looks}print({heavy})"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "[]\n"


def test_outside_of_a_job_it_is_said_what_it_is_for(monkeypatch, tmp_path):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="SLURM_JOB_ID is not set: `qurl slurm attempt` runs"):
        attempt(tmp_path)


def test_the_script_shows_the_steps_as_the_job_starts_them(slurm, tmp_path):
    container = ContainerConfig(kind="apptainer", image="/images/q.sif", mounts=("/shared",))
    run_dir, cluster = tmp_path / "run", ClusterConfig(container=container)
    submitted(run_dir, "rollout.backend=sglang", f"rollout.rendezvous={run_dir}/e", cluster=cluster)
    slurm.ranks(run_dir, 'case "$*" in *=train*) saves 7 ;; *=engines*) sleep 60 ;; esac')
    assert attempt(run_dir) == 0
    script = render(training_job(load(run_dir / "slurm/config.toml"), cluster), cluster)
    shown = [line.removeprefix("#   ") for line in script.splitlines() if "#   srun" in line]
    started = [line for line in slurm.called if line.startswith("srun")]
    assert [line.replace("/attempts/N/", "/attempts/1/") for line in shown] == started
    assert len(shown) == 3 and all(
        f" apptainer exec --nv --bind /shared --pwd {Path.cwd()} /images/q.sif qurl slurm " in line
        for line in shown
    )


def told(then: str) -> str:
    """Ranks that send the supervisor Slurm's signal, and do this once they are told to end."""
    return f"trap '{then}; exit 0' USR1; kill -USR1 $PPID; while :; do sleep 0.02; done"


def facts(**values) -> str:
    """What scontrol says of the job."""
    return "echo " + " ".join(f"{name}={value}" for name, value in values.items())


MISTAKE = "echo 'srun: error: n1: task 0: Exited with exit code 3' >&2; exit 143"
CASES = {
    "it ends well": ("", "saves 7", 0, [("", "done")], False, "attempt 1: all 7 steps are done"),
    "its time is up": (
        *("", told("saves 3"), 0, [("USR1", "again")], True),
        "qurl: time is up: the ranks save and end",
    ),
    "what Slurm sends after the ranks were told changes nothing": (
        *("", told("ended_by_slurm; saves 3"), 0, [("USR1", "again")], True),
        "time is up; step 3 is saved",
    ),
    "cancelled while it saves": (
        facts(EndTime="2099-01-01T00:00:00"),
        *(told("ended_by_slurm; saves 3"), STOPPED, [("TERM", "stop")], False),
        "stopped by SIGTERM",
    ),
    "a mistake, whatever becomes of the other ranks": (
        *("", MISTAKE, 3, [("", "stop")], False),
        "ended with 3",
    ),
    "a failure is followed by another attempt in the same job": (
        *("", "first && { saves 3; exit 137; }; saves 7", 0, [("", "retry"), ("", "done")], False),
        "the training step ended with 137; step 3 is saved\n",
    ),
    "preempted, though only its ranks were told": (
        facts(NumNodes=1, PreemptTime="2026-11-22T09:34:46"),
        *("saves 3", 0, [("preempted", "again")], True),
        "preempted by another job",
    ),
}


@pytest.mark.parametrize(
    ("scontrol", "ranks", "code", "records", "requeued", "printed"), CASES.values(), ids=CASES
)
def test_a_job_ends_or_goes_on(
    scontrol, ranks, code, records, requeued, printed, slurm, run_dir, capfd
):
    slurm("scontrol", scontrol)
    slurm.ranks(run_dir, ranks)
    assert attempt(run_dir) == code
    assert recorded(run_dir) == records and slurm.requeued == requeued
    assert printed in capfd.readouterr().out


def test_a_run_that_has_all_its_steps_starts_nothing(slurm, run_dir):
    slurm.ranks(run_dir, "saves 7")
    for _ in range(2):
        assert attempt(run_dir) == 0
    (line,) = (line for line in slurm.called if line.startswith("srun"))
    assert f"qurl slurm task {run_dir}" in line
    assert os.readlink(run_dir / "slurm/latest") == "attempts/1"


def test_where_requeueing_is_forbidden_the_next_job_is_submitted_to_wait_for_this_one(
    slurm, run_dir, capfd
):
    slurm.ranks(run_dir, told("saves 3"))
    slurm("scontrol", "echo 'Requested operation is presently disabled' >&2; exit 1")
    slurm("sbatch", "cat > /dev/null; echo 6")
    assert attempt(run_dir) == 0
    assert "sbatch --parsable --dependency=afterany:5" in slurm.called
    assert folder.job(run_dir) == 6
    assert "presently disabled\nqurl: the run goes on in job 6" in capfd.readouterr().out


def test_where_ranks_that_were_killed_had_met_is_not_left_in_the_runs_folder(slurm, run_dir):
    (run_dir / ".meet-5-0-0-1.json").write_text("of a supervisor that was killed itself")
    seen = f"ls {run_dir}/.meet* >> {run_dir}/seen"
    slurm("srun", f"{seen}; echo {{}} > {run_dir}/.meet-5-1.json; false")
    assert attempt(run_dir) == NO_PROGRESS
    assert decisions(run_dir) == ["retry", "stop"]
    assert list(run_dir.glob(".meet-*")) == []
    assert (run_dir / "seen").read_text() == ""


def test_with_a_node_lost_the_next_attempt_is_in_another_job(slurm, run_dir, capfd):
    slurm("scontrol", facts(NumNodes=0, EndTime="Unknown", PreemptTime="None"))
    slurm.ranks(run_dir, "saves 3; exit 137")
    attempt(run_dir)
    assert slurm.requeued and decisions(run_dir) == ["retry"]
    assert "job 5 has 0 of its 1 nodes left" in capfd.readouterr().out


def test_a_job_that_slurm_has_put_back_itself_has_failed_and_was_not_cancelled(
    slurm, run_dir, capfd
):
    slurm("scontrol", facts(Restarts=1, NumNodes=1))
    slurm.ranks(run_dir, "ended_by_slurm; saves 3; exit 143")
    attempt(run_dir)
    assert recorded(run_dir) == [("", "retry")]
    assert not any("requeue" in line or "scancel" in line for line in slurm.called)
    assert "Slurm has ended the job, as where a node is lost" in capfd.readouterr().out


def test_a_job_that_slurm_puts_back_time_and_again_without_a_checkpoint_is_ended(
    slurm, run_dir, monkeypatch
):
    slurm.ranks(run_dir, "ended_by_slurm; exit 143")
    for restarts in (0, 1):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        slurm("scontrol", facts(Restarts=restarts + 1, NumNodes=1))
        code = attempt(run_dir)
    assert code == NO_PROGRESS
    assert decisions(run_dir) == ["retry", "stop"]
    assert slurm.called[-1] == "scancel 5"


def test_a_cancelled_job_that_slurm_has_started_anew_before_was_cancelled(
    slurm, run_dir, monkeypatch
):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    slurm("scontrol", facts(Restarts=1, NumNodes=1))
    slurm.ranks(run_dir, "ended_by_slurm; saves 3")
    assert attempt(run_dir) == STOPPED


def test_a_node_that_takes_a_run_along_twice_ends_it_though_nobody_could_record_it(
    slurm, run_dir, monkeypatch
):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    lost = folder.open_attempt(run_dir, job=5)
    folder.write_attempt(run_dir, replace(lost, code=1, decision="retry"))
    folder.open_attempt(run_dir, job=5)
    assert attempt(run_dir) == NO_PROGRESS
    assert decisions(run_dir) == ["retry", "stop"]


def test_an_attempt_that_was_lost_with_its_node_counts_once_the_job_is_back(
    slurm, run_dir, monkeypatch
):
    folder.open_attempt(run_dir, job=5)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    slurm("srun", "exit 1")
    assert attempt(run_dir) == NO_PROGRESS
    assert decisions(run_dir) == ["retry", "stop"]


def test_a_job_that_a_person_has_ended_is_no_failure_of_the_run(slurm, run_dir):
    folder.open_attempt(run_dir, job=5)
    slurm.ranks(run_dir, "saves 7")
    assert attempt(run_dir) == 0
    assert decisions(run_dir) == ["", "done"]


def test_a_run_that_hangs_is_ended_and_tried_again(slurm, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(supervise, "WATCH_S", 0.1)
    monkeypatch.setattr(supervise, "STACKS_S", 1.0)
    run_dir = submitted(tmp_path / "run", cluster=job(hung_s=60))
    stack = run_dir / "slurm/attempts/1/stack-0.txt"
    seconds = 0.0

    def clock() -> float:
        """Time passes while the first attempt hangs: from its checkpoint to its stacks."""
        nonlocal seconds
        if latest(run_dir) and not stack.exists():
            seconds += GLANCE_S
        return seconds

    monkeypatch.setattr(supervise, "Stillness", partial(Stillness, clock))
    slurm.ranks(
        run_dir,
        "first || { saves 7; exit 0; }; saves 3"
        f"; trap 'echo here > {stack}' USR2; trap 'exit 137' TERM; while :; do sleep 0.02; done",
    )
    assert attempt(run_dir) == 0
    assert decisions(run_dir) == ["retry", "done"]
    printed = capfd.readouterr().out
    assert re.findall(r"rank (\d) did not answer", printed) == ["1"]
    assert re.search(r"attempt 1: hung: no new step for \d+ s; step 3 is saved", printed)


@pytest.fixture
def examined(slurm, tmp_path):
    """A job whose nodes are all bad, and its run."""
    slurm("scontrol", '[ "$2" = hostnames ] && echo "$3" | tr , "\\n"; exit 0')
    slurm("sbatch", "echo it would start")
    reports = [json.dumps({"node": node, "faults": ["it is ill"]}) for node in ("a1", "t1", "r1")]
    slurm("srun", "; ".join(f"echo '{report}'" for report in reports))
    yield slurm, submitted(tmp_path / "run")
    assert not any("slurm task" in line for line in slurm.called)


def test_a_run_that_is_cancelled_while_its_nodes_are_examined_ends_without_starting_ranks(
    examined, capfd
):
    slurm, run_dir = examined
    slurm("srun", "kill -TERM $PPID; exec sleep 60")
    assert attempt(run_dir) == STOPPED
    assert recorded(run_dir) == [("TERM", "stop")]
    assert "bad" not in capfd.readouterr().out


def test_a_job_with_a_bad_node_goes_back_to_the_queue_and_keeps_off_it(examined, capfd):
    slurm, run_dir = examined
    assert attempt(run_dir) == 0
    assert slurm.requeued and slurm.called[-1] == "scontrol update JobId=5 ExcNodeList=a1"
    assert "node a1 is bad: it is ill" in capfd.readouterr().out
    (record,) = folder.attempts(run_dir)
    assert (record.decision, record.code) == ("without", BAD_NODE)


def test_a_bad_node_that_slurm_cannot_do_without_ends_the_run(examined, capfd):
    slurm, run_dir = examined
    slurm("sbatch", "echo 'Requested node configuration is not available' >&2; exit 1")
    assert attempt(run_dir) == BAD_NODE and not slurm.requeued
    printed = capfd.readouterr().out
    assert "a1 cannot be excluded (sbatch --test-only refused (1): Requested node" in printed


def test_where_all_nodes_are_bad_none_is_excluded_and_the_run_ends(examined, monkeypatch, capfd):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "t1,r1")
    slurm, run_dir = examined
    engines = ("rollout.engines=1", f"rollout.rendezvous={run_dir}/engines", "parallel.tensor=1")
    submitted(run_dir, *engines, cluster=ClusterConfig(node=NodeConfig(gpus=1)))
    assert attempt(run_dir) == BAD_NODE
    assert not any("requeue" in line or "ExcNodeList" in line for line in slurm.called)
    assert "attempt 1: all 2 nodes are bad, so none is excluded" in capfd.readouterr().out
    (record,) = folder.attempts(run_dir)
    assert (record.decision, record.code) == ("stop", BAD_NODE)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"job": "1"}', "\0"])
def test_a_damaged_record_is_named(text, tmp_path):
    folder.put(tmp_path / "slurm/job.json", text)
    with pytest.raises(ConfigError, match=r"slurm/job.json is damaged .*submit the run again"):
        folder.job(tmp_path)


AGAIN, DONE, RETRY, STOP = Decision.AGAIN, Decision.DONE, Decision.RETRY, Decision.STOP
SAVED, IDLE = (0, 8), (8, 8)


def made(code: int, steps: tuple[int, int], signal: str = "", **values) -> folder.Attempt:
    return folder.Attempt(9, 5, 0.0, *steps, signal, code, **values)


FAILED_IDLE, FAILED = (RETRY, IDLE), (RETRY, SAVED)
VERDICTS = {
    "all steps": (0, "", (0, 40), None, DONE, 0),
    "and a rank died in its goodbye": (143, "", (20, 40), None, DONE, 0),
    "all steps, and the guard": (3, "", (20, 40), None, STOP, 3),
    "time is up": (0, "USR1", (0, 12), None, AGAIN, 0),
    "time is up, no new step": (0, "USR1", IDLE, None, AGAIN, 0),
    "twice": (0, "USR1", IDLE, FAILED_IDLE, STOP, NO_PROGRESS),
    "a mistake in the last minute": (2, "USR1", (0, 12), None, STOP, 2),
    "cancelled": (0, "TERM", (0, 12), None, STOP, STOPPED),
    "cancelled, and it failed": (137, "TERM", (0, 12), None, STOP, 137),
    "a signal past the supervisor": (0, "", (0, 12), None, STOP, STOPPED),
    "it failed": (1, "", (0, 12), None, RETRY, 1),
    "and again before a checkpoint": (137, "", IDLE, FAILED_IDLE, STOP, NO_PROGRESS),
    "but it saved this time": (137, "", (8, 9), FAILED_IDLE, RETRY, 137),
    "the last one had saved": (137, "", IDLE, FAILED, RETRY, 137),
    "somebody has looked since": (137, "", IDLE, (STOP, IDLE), RETRY, 137),
    "preempted": (1, "preempted", (8, 9), FAILED, AGAIN, 0),
    "preempted twice before one": (0, "preempted", IDLE, (AGAIN, IDLE), STOP, NO_PROGRESS),
}


@pytest.mark.parametrize(
    ("code", "signal", "steps", "before", "decision", "ends_with"), VERDICTS.values(), ids=VERDICTS
)
def test_what_follows_on_an_attempt(code, signal, steps, before, decision, ends_with):
    if before is not None:
        before = made(137, before[1], decision=before[0])
    outcome = decide(made(code, steps, signal), before, steps=40)
    assert (outcome.decision, outcome.exit_code) == (decision, ends_with)


@pytest.mark.parametrize(
    ("ended", "mend"),
    [
        (made(137, IDLE, failure="hung"), "step 8 is saved; fix the cause, then `qurl slurm"),
        (made(0, IDLE, "USR1"), "raise job.time_limit or job.signal_s in the cluster file"),
    ],
)
def test_two_attempts_without_a_checkpoint_are_one_sentence_with_the_mend(ended, mend):
    outcome = decide(ended, made(137, IDLE, decision=RETRY), steps=40)
    assert ", the second attempt in a row without a new checkpoint" in outcome.reason
    assert mend in outcome.reason
