"""The supervisor of a job, whose Slurm is a few shell scripts."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from qurl_megatron.cluster import folder, supervise
from qurl_megatron.cluster.attempt import attempt
from qurl_megatron.cluster.cluster import ClusterConfig, JobConfig, NodeConfig
from qurl_megatron.cluster.supervise import GLANCE_S, Received, Stillness
from qurl_megatron.cluster.verdict import BAD_NODE, NO_PROGRESS, STOPPED
from qurl_megatron.config import to_toml
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.training.state import latest
from tests.support.programs import Programs
from tests.support.slurm_runs import submitted
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Programs:
    """A job of its own in which ``slurm(program, body)`` makes Slurm's programs."""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("QURL_ATTEMPT", "")  # an attempt sets it for its ranks
    monkeypatch.setattr("qurl_megatron.cluster.attempt.LINGER_S", 0.0)  # then Slurm kills it
    monkeypatch.setattr(supervise, "POLL_S", 0.05)
    make = Programs(tmp_path, monkeypatch)
    make("squeue", "")
    make("scontrol", "")
    make("scancel", "")
    return make


def job(**values) -> ClusterConfig:
    return ClusterConfig(job=JobConfig(**{"examine_s": 0, **values}))


@pytest.fixture
def run_dir(slurm, tmp_path) -> Path:
    return submitted(tmp_path / "run", cluster=job())


def saves(run_dir: Path, step: int) -> str:
    """Shell lines that leave a checkpoint."""
    checkpoint = f"{run_dir}/checkpoints/step_{step:06d}"
    return f"mkdir -p {checkpoint}; echo '{{\"step\": {step}}}' > {checkpoint}/state.json"


def ranks_that_save(
    run_dir: Path, step: int, first: str = "kill -USR1 $PPID", told: str = ":"
) -> str:
    """Ranks that save once they are told to end.

    Args:
        first: what they do before; by default they send the supervisor Slurm's signal.
        told: what they do once they are told, before they save.
    """
    trap = f"told() {{ {told}; {saves(run_dir, step)}; exit 0; }}; trap told USR1"
    return f"{trap}; {first}; while :; do sleep 0.02; done"


ENDED_BY_SLURM = "trap '' USR1; kill -TERM $PPID; sleep 0.1"


def recorded(run_dir: Path) -> list[tuple]:
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


# ---- the run ends, or its time is up


def test_a_run_that_ends_well_is_recorded(slurm, run_dir, capfd):
    slurm("srun", saves(run_dir, 7))
    assert attempt(run_dir) == 0
    (record,) = folder.attempts(run_dir)
    assert (record.step_before, record.step_after, record.decision) == (0, 7, "done")
    assert any(f"qurl slurm task {run_dir}" in line for line in slurm.called)
    assert "all 7 steps are done" in capfd.readouterr().out
    assert os.readlink(run_dir / "slurm/latest") == "attempts/1"


def test_a_run_that_has_all_its_steps_starts_nothing(slurm, run_dir):
    subprocess.run(["sh", "-c", saves(run_dir, 7)], check=True)
    assert attempt(run_dir) == 0
    assert folder.attempts(run_dir) == [] and slurm.called == []


def test_time_that_is_up_is_told_to_the_ranks_and_the_job_requeued(slurm, run_dir, capfd):
    slurm("srun", ranks_that_save(run_dir, 3))
    assert attempt(run_dir) == 0
    assert "scontrol requeue 5" in slurm.called
    assert recorded(run_dir) == [("USR1", "again")]
    assert "qurl: time is up: the ranks save and end" in capfd.readouterr().out


def test_where_requeueing_is_forbidden_the_next_job_is_submitted_to_wait_for_this_one(
    slurm, run_dir, capfd
):
    slurm("srun", ranks_that_save(run_dir, 3))
    slurm("scontrol", "echo 'Requested operation is presently disabled' >&2; exit 1")
    slurm("sbatch", "cat > /dev/null; echo 6")
    assert attempt(run_dir) == 0
    assert "sbatch --parsable --dependency=afterany:5" in slurm.called
    assert folder.job(run_dir) == 6
    assert "presently disabled\nqurl: the run goes on in job 6" in capfd.readouterr().out


def test_what_slurm_sends_after_the_ranks_were_told_changes_nothing(slurm, run_dir):
    slurm("srun", ranks_that_save(run_dir, 3, told=ENDED_BY_SLURM))
    assert attempt(run_dir) == 0
    assert recorded(run_dir) == [("USR1", "again")]


def test_a_run_that_is_cancelled_while_it_saves_does_not_go_on(slurm, run_dir):
    slurm("srun", ranks_that_save(run_dir, 3, told=ENDED_BY_SLURM))
    slurm("scontrol", "echo EndTime=2099-01-01T00:00:00")
    assert attempt(run_dir) == STOPPED
    assert recorded(run_dir) == [("TERM", "stop")]
    assert not any("requeue" in line for line in slurm.called)


def test_a_mistake_ends_the_job_whatever_becomes_of_the_other_ranks(slurm, run_dir):
    # As srun says and ends where one rank ends with 3, and it ends the other one.
    slurm("srun", "echo 'srun: error: n1: task 0: Exited with exit code 3' >&2; exit 143")
    assert attempt(run_dir) == 3
    assert decisions(run_dir) == ["stop"]


def test_a_cancelled_run_does_not_wait_until_its_time_is_up():
    with Received() as received:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert received.newest == "TERM"


def test_where_ranks_that_were_killed_had_met_is_not_left_in_the_runs_folder(slurm, run_dir):
    (run_dir / ".meet-5-0-0-1.json").write_text("of a supervisor that was killed itself")
    seen = f"ls {run_dir}/.meet* >> {run_dir}/seen"
    slurm("srun", f"{seen}; echo {{}} > {run_dir}/.meet-5-1.json; false")
    assert attempt(run_dir) == NO_PROGRESS
    assert list(run_dir.glob(".meet-*")) == []
    assert (run_dir / "seen").read_text() == ""


# ---- failures


def test_a_failed_attempt_is_followed_by_another_in_the_same_job(slurm, run_dir, capfd):
    first, second = saves(run_dir, 3), saves(run_dir, 7)
    slurm("srun", f"if [ -e {run_dir}/checkpoints ]; then {second}; else {first}; exit 137; fi")
    assert attempt(run_dir) == 0
    steps = [(record.step_before, record.step_after) for record in folder.attempts(run_dir)]
    assert steps == [(0, 3), (3, 7)] and decisions(run_dir) == ["retry", "done"]
    assert not any("requeue" in line for line in slurm.called)
    assert "the training step ended with 137; step 3 is saved; failure 1" in capfd.readouterr().out


def test_two_failures_in_a_row_without_a_checkpoint_end_the_job_with_no_progress(slurm, run_dir):
    slurm("srun", "exit 1")
    assert attempt(run_dir) == NO_PROGRESS
    assert decisions(run_dir) == ["retry", "stop"]


def test_with_a_node_lost_the_next_attempt_is_in_another_job(slurm, tmp_path, capfd):
    run_dir = submitted(tmp_path / "run", cluster=job())
    slurm("scontrol", "echo JobId=5 NumNodes=0 EndTime=Unknown PreemptTime=None")
    slurm("srun", f"{saves(run_dir, 3)}; exit 137")
    attempt(run_dir)
    assert "scontrol requeue 5" in slurm.called
    assert "job 5 has 0 of its 1 nodes left" in capfd.readouterr().out
    assert decisions(run_dir) == ["retry"]


def back_in_the_queue(restarts: int) -> str:
    """What scontrol says of a job that Slurm has ended for a node that was lost."""
    return f"echo JobId=5 JobState=COMPLETING Requeue=1 Restarts={restarts} NumNodes=1"


def test_a_job_that_slurm_has_put_back_itself_has_failed_and_was_not_cancelled(
    slurm, run_dir, capfd
):
    slurm("scontrol", back_in_the_queue(restarts=1))
    slurm("srun", f"{ENDED_BY_SLURM}; {saves(run_dir, 3)}; exit 143")
    attempt(run_dir)
    assert recorded(run_dir) == [("", "retry")]
    assert not any("requeue" in line or "scancel" in line for line in slurm.called)
    assert "Slurm has ended the job, as where a node is lost" in capfd.readouterr().out


def test_a_job_that_slurm_puts_back_time_and_again_without_a_checkpoint_is_ended(
    slurm, run_dir, monkeypatch
):
    slurm("srun", f"{ENDED_BY_SLURM}; exit 143")
    for restarts in (0, 1):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        slurm("scontrol", back_in_the_queue(restarts + 1))
        code = attempt(run_dir)
    assert code == NO_PROGRESS
    assert decisions(run_dir) == ["retry", "stop"]
    assert slurm.called[-1] == "scancel 5"


def test_a_cancelled_job_that_slurm_has_started_anew_before_was_cancelled(
    slurm, run_dir, monkeypatch
):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    slurm("scontrol", "echo JobId=5 JobState=RUNNING Restarts=1 NumNodes=1")
    slurm("srun", f"{ENDED_BY_SLURM}; {saves(run_dir, 3)}")
    assert attempt(run_dir) == STOPPED


def test_a_preempted_run_goes_on_in_another_job_though_only_its_ranks_were_told(slurm, run_dir):
    slurm("scontrol", "echo JobId=5 NumNodes=1 PreemptTime=2026-11-22T09:34:46")
    slurm("srun", saves(run_dir, 3))
    assert attempt(run_dir) == 0
    assert recorded(run_dir) == [("preempted", "again")]
    assert "scontrol requeue 5" in slurm.called


def test_an_attempt_that_was_lost_with_its_node_counts_once_the_job_is_back(
    slurm, run_dir, monkeypatch
):
    folder.open_attempt(run_dir, job=5)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    slurm("srun", "exit 1")
    assert attempt(run_dir) == NO_PROGRESS
    assert decisions(run_dir) == ["retry", "stop"]


def test_a_node_that_takes_a_run_along_twice_ends_it_though_nobody_could_record_it(
    slurm, run_dir, monkeypatch
):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    lost = folder.open_attempt(run_dir, job=5)
    folder.write_attempt(run_dir, replace(lost, code=1, decision="retry"))
    folder.open_attempt(run_dir, job=5)
    assert attempt(run_dir) == NO_PROGRESS
    assert decisions(run_dir) == ["retry", "stop"]


def test_a_job_that_a_person_has_ended_is_no_failure_of_the_run(slurm, run_dir):
    folder.open_attempt(run_dir, job=5)
    slurm("srun", saves(run_dir, 7))
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
    first, second = saves(run_dir, 3), saves(run_dir, 7)
    slurm(
        "srun",
        f"if [ -e {run_dir}/checkpoints ]; then {second}; exit 0; fi; {first}"
        f"; trap 'echo here > {stack}' USR2; trap 'exit 137' TERM; while :; do sleep 0.02; done",
    )
    assert attempt(run_dir) == 0
    assert decisions(run_dir) == ["retry", "done"]
    printed = capfd.readouterr().out
    assert re.findall(r"rank (\d) did not answer", printed) == ["1"]
    assert re.search(r"attempt 1: hung: no new step for \d+ s; step 3 is saved", printed)


# ---- bad nodes


@pytest.fixture
def examined(slurm, monkeypatch):
    """A job on node a1 of which all nodes are bad."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a1")
    slurm("scontrol", '[ "$2" = hostnames ] && echo "$3" | tr , "\\n"; exit 0')
    slurm("sbatch", "echo it would start")
    reports = [json.dumps({"node": node, "faults": ["it is ill"]}) for node in ("a1", "t1", "r1")]
    slurm("srun", "; ".join(f"echo '{report}'" for report in reports))
    return slurm


def test_a_run_that_is_cancelled_while_its_nodes_are_examined_ends_without_starting_ranks(
    examined, tmp_path, capfd
):
    run_dir = submitted(tmp_path / "run")
    examined("srun", "kill -TERM $PPID; exec sleep 60")
    assert attempt(run_dir) == STOPPED
    assert recorded(run_dir) == [("TERM", "stop")]
    assert not any("slurm task" in line for line in examined.called)
    assert "bad" not in capfd.readouterr().out


def test_a_job_with_a_bad_node_goes_back_to_the_queue_and_keeps_off_it(examined, tmp_path, capfd):
    run_dir = submitted(tmp_path / "run")
    assert attempt(run_dir) == 0
    assert examined.called[-1] == "scontrol update JobId=5 ExcNodeList=a1"
    assert "scontrol requeue 5" in examined.called
    assert not any("slurm task" in line for line in examined.called)
    assert "node a1 is bad: it is ill" in capfd.readouterr().out
    (record,) = folder.attempts(run_dir)
    assert (record.decision, record.code) == ("without", BAD_NODE)


def test_a_bad_node_that_slurm_cannot_do_without_ends_the_run(examined, tmp_path, capfd):
    run_dir = submitted(tmp_path / "run")
    examined("sbatch", "echo 'Requested node configuration is not available' >&2; exit 1")
    assert attempt(run_dir) == BAD_NODE
    printed = capfd.readouterr().out
    assert "a1 cannot be excluded (sbatch --test-only refused (1): Requested node" in printed
    assert not any("requeue" in line for line in examined.called)


def test_where_all_nodes_are_bad_none_is_excluded_and_the_run_ends(
    examined, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "t1,r1")
    run_dir = tmp_path / "run"
    engines = ("rollout.engines=1", f"rollout.rendezvous={run_dir}/engines", "parallel.tensor=1")
    submitted(run_dir, *engines, cluster=ClusterConfig(node=NodeConfig(gpus=1)))
    assert attempt(run_dir) == BAD_NODE
    assert not any("requeue" in line or "ExcNodeList" in line for line in examined.called)
    assert "attempt 1: all 2 nodes are bad, so none is excluded" in capfd.readouterr().out
    (record,) = folder.attempts(run_dir)
    assert (record.decision, record.code) == ("stop", BAD_NODE)


# ---- the run's folder


@pytest.mark.parametrize("name", ['my "run"', "2026", "[x]"])
def test_what_is_submitted_is_read_back(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = submitted(Path(name), cluster=job(retries=7))
    assert folder.recipe(run_dir).train.run_dir == name
    assert folder.recipe(run_dir).train.steps == 7
    assert folder.cluster(run_dir).job.retries == 7
    assert to_toml(folder.cluster(run_dir)) == (run_dir / "slurm/cluster.toml").read_text()


def test_attempts_are_numbered_on(tmp_path):
    assert [folder.open_attempt(tmp_path, job=5).number for _ in range(3)] == [1, 2, 3]
    assert os.readlink(tmp_path / "slurm/latest") == "attempts/3"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"job": "1"}', "\0"])
def test_a_damaged_record_is_named(text, tmp_path):
    folder.put(tmp_path / "slurm/job.json", text)
    with pytest.raises(ConfigError, match=r"slurm/job.json is damaged .*submit the run again"):
        folder.job(tmp_path)


# ---- a rank


RANK = """
import signal, subprocess, sys, time
from qurl_megatron.cluster.tasks import stop_on_usr1
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
stop_on_usr1()
child = subprocess.Popen([sys.executable, "-c", "input(); print('lives')"], stdin=subprocess.PIPE)
try:
    print(child.pid, flush=True)
    time.sleep(60)
finally:
    child.communicate(b"\\n")
"""


def test_usr1_stops_a_rank_and_leaves_alone_what_it_has_started():
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True)
    child = int(rank.stdout.readline())
    for pid in (child, rank.pid):  # as clusters do that signal all descendants of a task
        os.kill(pid, signal.SIGUSR1)
    printed, _ = rank.communicate(timeout=PATIENCE_S)
    assert (rank.returncode, printed) == (5, "lives\n")
