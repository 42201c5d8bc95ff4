"""Slurm's programs are small scripts here, which say what the real ones do."""

import json

import pytest

from qurl_megatron.cluster import commands
from qurl_megatron.kit.errors import ConfigError
from tests.support.programs import Programs


@pytest.fixture
def program(tmp_path, monkeypatch) -> Programs:
    return Programs(tmp_path, monkeypatch)


def queue(program: Programs, *jobs: dict) -> None:
    program("squeue", f"echo '{json.dumps({'jobs': jobs})}'")


def test_without_slurm_it_is_said_that_sbatch_was_not_found(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch was not found: this machine has no Slurm"):
        commands.test_only("#!/bin/sh\n")


def test_a_refusal_names_the_program_and_what_it_said(program):
    program(
        "sbatch",
        "echo 'sbatch: error: Batch job submission failed: Requested node configuration is not "
        "available' >&2; exit 1",
    )
    with pytest.raises(ConfigError) as error:
        commands.test_only("")
    assert str(error.value) == (
        "sbatch --test-only refused (1): Batch job submission failed: Requested node configuration "
        "is not available"
    )


def test_what_slurm_says_of_a_script_that_it_would_take(program):
    program("sbatch", "cat >/dev/null; echo 'sbatch: Job 7 to start at noon' >&2")
    assert commands.test_only("#!/bin/sh\n") == "Job 7 to start at noon"


@pytest.mark.parametrize("said", ["17", "17;cluster"])
def test_the_id_of_a_submitted_job(said, program):
    program("sbatch", f"cat >/dev/null; echo '{said}'")
    assert commands.submit("") == 17


def test_an_answer_without_an_id_is_one_sentence(program):
    program("sbatch", "cat >/dev/null; echo Submitted")
    with pytest.raises(ConfigError, match="said 'Submitted' in place of a job id"):
        commands.submit("")


def test_variables_of_the_shell_do_not_overrule_the_script(program, monkeypatch):
    monkeypatch.setenv("SBATCH_EXPORT", "ALL")
    program("sbatch", 'cat >/dev/null; [ -z "$SBATCH_EXPORT" ] && echo 1')
    assert commands.submit("") == 1


@pytest.mark.parametrize("state", ["RUNNING", ["RUNNING"]], ids=["a word", "a list"])
def test_the_queue_of_old_and_new_slurms(state, program):
    queue(
        program,
        {"job_id": 5, "job_state": state, "nodes": "n[1-2]", "state_reason": "None"},
        {"job_id": 6, "job_state": "COMPLETED"},
        {"job_id": 7, "job_state": "PENDING"},
    )
    assert commands.queued([5, 6, 8]) == {5: commands.Queued(5, "RUNNING", "", "n[1-2]")}


@pytest.mark.parametrize("number", [int, lambda n: {"set": True, "number": n}], ids=["22", "23"])
def test_the_components_of_a_heterogeneous_job_are_one_job_on_all_of_their_nodes(number, program):
    queue(
        program,
        {"job_id": 6, "job_state": "RUNNING", "nodes": "b[1-2]", "het_job_id": number(5)},
        {"job_id": 5, "job_state": "RUNNING", "nodes": "a1", "het_job_id": number(5)},
        {"job_id": 7, "job_state": "RUNNING", "nodes": "c1", "het_job_id": number(0)},
    )
    queued = commands.queued([5, 7])
    assert {job: entry.nodes for job, entry in queued.items()} == {5: "a1,b[1-2]", 7: "c1"}


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        (90, 90.0),
        ({"set": True, "number": 90}, 90.0),
        ({"set": False, "number": 0}, 0.0),
        (None, 0),
    ],
)
def test_times_of_the_queue_of_old_and_new_slurms(time, seconds, program):
    queue(program, {"job_id": 5, "job_state": "RUNNING", "start_time": time, "end_time": time})
    entry = commands.queued([5])[5]
    assert (entry.starts, entry.ends) == (seconds, seconds)


@pytest.mark.parametrize("said", ["", "[]", '{"jobs": [{}]}', "squeue: unrecognized option"])
def test_a_queue_that_cannot_be_read_is_one_sentence(said, program):
    program("squeue", f"echo '{said}'")
    with pytest.raises(ConfigError, match="squeue --json said what cannot be read"):
        commands.queued([1])


def test_no_jobs_are_not_asked_for(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert commands.queued([]) == {}
    commands.cancel([])


def test_facts_of_a_job(program):
    program("scontrol", "echo 'JobId=12 Requeue=1 TimeLimit=00:20:00 Comment=(null)'")
    assert commands.job_facts(12)["TimeLimit"] == "00:20:00"


def test_the_facts_of_a_partition_are_those_of_the_default_one_where_none_is_named(program):
    one, other = "PartitionName=a Default=NO MaxTime=1-00:00:00", "PartitionName=b Default=YES"
    program(
        "scontrol", f'case "$4" in "") echo {one}; echo {other} GraceTime=60;; *) echo {one}; esac'
    )
    assert commands.partition_facts("") == {
        "PartitionName": "b",
        "Default": "YES",
        "GraceTime": "60",
    }
    assert commands.partition_facts("a")["MaxTime"] == "1-00:00:00"
