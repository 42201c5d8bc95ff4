"""How a run is, from its folder, the queue and the time."""

from dataclasses import replace
from pathlib import Path

import pytest

from qurl_megatron.cli import main
from qurl_megatron.cluster import folder
from qurl_megatron.cluster.commands import Queued
from qurl_megatron.cluster.folder import Attempt
from qurl_megatron.cluster.status import Facts, render
from qurl_megatron.config import load
from qurl_megatron.observe.sinks import Record
from tests.support.programs import Programs
from tests.support.slurm_runs import QUICK
from tests.support.slurm_runs import submitted as submitted_run

NOW = 10_000.0
RUNNING = Queued("RUNNING", "", "train[1-2]", NOW - 500, NOW + 700)
BEGUN = Attempt(1, 7, NOW - 500, 0)
ENDED = replace(BEGUN, step_after=40, decision="done", ended_at=NOW - 100)


def records(count: int) -> list[Record]:
    """Steps of ten seconds each, the last 5 s ago."""
    metrics = {"time/step": 10.0, "time/rollout": 6.0, "reward/mean": 0.5}
    ends = [NOW - 5 - 10 * (count - number) for number in range(1, count + 1)]
    return [Record(number, end, metrics) for number, end in enumerate(ends, 1)]


@pytest.fixture
def facts(tmp_path) -> Facts:
    """A running job of 20 minutes with 20 of 200 steps done."""
    return Facts(
        tmp_path,
        load(QUICK, ["train.steps=200"]),
        7,
        RUNNING,
        attempts=[BEGUN],
        records=records(20),
        checkpoint=(16, NOW - 45),
    )


def test_a_running_job_says_how_far_it_is_and_how_long_it_has(facts):
    text = render(facts, NOW)
    assert text.startswith(f"{facts.run_dir}: running, job 7 on train[1-2], attempt 1\n")
    assert "11m40s left" in text and "of step 16, 45.0 s old" in text
    assert "10.0 s (median)" in text
    assert "step 20 of 200, the last 5.00 s ago, reward 0.500\n" in text


def ended(decision: str) -> dict:
    return {"queued": None, "attempts": [replace(ENDED, decision=decision, reason="it ended so")]}


WAITS = {"attempts": (), "records": (), "checkpoint": None}
AWAY = {"queued": None, "queue_error": "squeue was not found"}
STATES = {
    "waiting": (
        {"queued": Queued("PENDING", "Priority", "", NOW + 90), **WAITS},
        *("waiting, job 7 (Priority), expected to start in 1m30s", "squeue --start --jobs=7"),
    ),
    "done": (ended("done"), "ended, job 7, attempt 1: it ended so", "report.html"),
    "stopped": (ended("stop"), "ended, job 7, attempt 1: it ended so", "slurm logs"),
    "to go on": (ended("again"), "ended, job 7, attempt 1: it ended so", "goes on"),
    "gone without a word": (
        {"queued": None},
        *("job 7 has left the queue, attempt 1, without a last word", "slurm logs"),
    ),
    "never begun": (
        {"queued": None, **WAITS},
        "job 7 has left the queue without an attempt",
        "/slurm/job.log, or `sacct -j 7`, says why",
    ),
    "without Slurm at hand": (
        AWAY,
        "the queue cannot be asked (squeue was not found), attempt 1 of this folder has not ended",
        "on a login node of the cluster",
    ),
    "without Slurm at hand, but it has ended": (
        *({**AWAY, "attempts": [ENDED]}, "ended, job 7, attempt 1: ", "report.html"),
    ),
}


@pytest.mark.parametrize(("changed", "sentence", "what_next"), STATES.values(), ids=STATES)
def test_each_state_is_a_sentence_and_the_next_thing_to_do(changed, sentence, what_next, facts):
    changed = replace(facts, **changed)
    first, *rows = render(changed, NOW).splitlines()
    assert first == f"{facts.run_dir}: {sentence}" and "this job" not in " ".join(rows)
    assert what_next in rows[-1]
    assert rows[0].startswith("  progress    step 20 of 200") == bool(changed.records)


@pytest.fixture
def submitted(tmp_path, monkeypatch) -> Path:
    """A run that waits in the queue."""
    Programs(tmp_path, monkeypatch)("squeue", "echo '7|PENDING|Resources|N/A|N/A|'")
    run_dir = submitted_run(tmp_path / "run")
    folder.write_job(run_dir, 7)
    return run_dir


def status_of(run_dir: Path, capsys) -> str:
    assert main(["slurm", "status", str(run_dir)]) == 0
    return capsys.readouterr().out


def test_a_run_that_has_not_begun_has_a_status(submitted, capsys):
    (submitted / "metrics.jsonl").write_text('{"step": 0, "tim')  # the line in flight
    text = status_of(submitted, capsys)
    assert text.startswith(f"{submitted}: waiting, job 7 (Resources)\n")
    assert "step 0 of 7" in text


def test_a_machine_without_slurm_says_so_and_fails_not(submitted, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    text = status_of(submitted, capsys)
    assert (
        "squeue was not found: this machine has no Slurm" in text and "no attempt has begun" in text
    )


@pytest.mark.parametrize("action", ["status", "logs", "cancel"])
@pytest.mark.parametrize("name", ["nowhere", "other"])
def test_a_folder_without_a_job_is_named(name, action, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    assert main(["slurm", action, f"{tmp_path}/{name}"]) == 2
    assert f"{tmp_path}/{name}: no job was submitted for this folder" in capsys.readouterr().err


def test_a_run_that_waits_has_no_attempt_to_look_at(tmp_path, capsys):
    folder.write_job(tmp_path, 7)
    assert main(["slurm", "logs", str(tmp_path)]) == 2
    assert f"{tmp_path} has no attempt yet; `squeue --jobs=7`" in capsys.readouterr().err
