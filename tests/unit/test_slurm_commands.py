"""Slurm's programs are small scripts here, which say what the real ones do."""

from datetime import datetime

import pytest

from qurl_megatron.cluster import commands
from qurl_megatron.kit.errors import ConfigError
from tests.support.programs import Programs


@pytest.fixture
def program(tmp_path, monkeypatch) -> Programs:
    return Programs(tmp_path, monkeypatch)


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


def test_a_job_is_found_in_the_queue_with_what_is_known_of_its_times(program):
    lines = "7|PENDING|Priority|N/A|N/A|\\n5|RUNNING|None|2026-11-22T09:00:00|Unknown|n[1-2]\\n"
    program("squeue", f"printf '{lines}'")
    assert commands.queued(7) == commands.Queued("PENDING", "Priority", "")
    began = datetime(2026, 11, 22, 9).timestamp()
    assert commands.queued(5) == commands.Queued("RUNNING", "", "n[1-2]", began)
    assert commands.queued(6) is None


def test_facts_of_a_job(program):
    program("scontrol", "echo 'JobId=12 Requeue=1 TimeLimit=00:20:00 Comment=(null)'")
    assert commands.job_facts(12)["TimeLimit"] == "00:20:00"


def test_the_facts_of_a_partition_are_those_of_the_default_one_where_none_is_named(program):
    one, other = "PartitionName=a Default=NO MaxTime=1-00:00:00", "PartitionName=b Default=YES"
    program("scontrol", f'case "$4" in "") echo {one}; echo {other};; *) echo {one}; esac')
    assert commands.partition_facts("")["PartitionName"] == "b"
    assert commands.partition_facts("a")["MaxTime"] == "1-00:00:00"
