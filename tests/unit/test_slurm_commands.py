"""Slurm's programs are small scripts here, which say what the real ones do."""

from datetime import datetime

import pytest

from qurl_megatron.cluster import commands
from qurl_megatron.kit.errors import ConfigError
from tests.support.programs import Programs


@pytest.fixture
def program(tmp_path, monkeypatch) -> Programs:
    return Programs(tmp_path, monkeypatch)


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


def test_the_facts_of_a_partition_are_those_of_the_default_one_where_none_is_named(program):
    one, other = "PartitionName=a Default=NO MaxTime=1-00:00:00", "PartitionName=b Default=YES"
    program("scontrol", f'case "$4" in "") echo {one}; echo {other};; *) echo {one}; esac')
    assert commands.partition_facts("")["PartitionName"] == "b"
    assert commands.partition_facts("a")["MaxTime"] == "1-00:00:00"
