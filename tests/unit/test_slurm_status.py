"""How a run is, from its folder, the queue and the time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from qurl_megatron.cli import main
from qurl_megatron.cluster import folder
from qurl_megatron.cluster.cluster import ClusterConfig, JobConfig
from qurl_megatron.cluster.commands import Queued
from qurl_megatron.cluster.status import Facts, describe, render
from qurl_megatron.config import load
from qurl_megatron.observe.attempts import Attempt, Began, Step, Tried
from qurl_megatron.observe.sinks import Record
from tests.support.programs import Programs

QUICK = Path(__file__).parents[2] / "launch/recipes/quickstart.toml"
NOW = 10_000.0
RUNNING = Queued(7, "RUNNING", "None", "train[1-2]", NOW - 500, NOW + 700)
ENDED = Attempt(1, 7, 0, 0, 40, "", 0, "done", NOW - 500, NOW - 100, 2)
STEP = {"time/step": 10.0, "time/rollout": 6.0, "time/train": 3.0}


def records(count: int) -> list[Record]:
    """Steps of ten seconds each, the last 5 s ago."""
    metrics = {**STEP, "reward/mean": 0.5, "fleet/serving": 1.0}
    ends = [NOW - 5 - 10 * (count - number) for number in range(1, count + 1)]
    return [Record(number, end, metrics) for number, end in enumerate(ends, 1)]


def tried(ended: Attempt | None = None) -> Tried:
    """An attempt of 20 steps, of which each takes ten seconds and the way to the next two."""
    steps = [Step(number, NOW - 245 + 12 * number, 10.0) for number in range(1, 21)]
    return Tried(1, Began(NOW - 500, 2, 0), ended, steps, NOW - 5)


@pytest.fixture
def facts(tmp_path) -> Facts:
    """A running job of 20 minutes with 20 of 200 steps done."""
    return Facts(
        tmp_path,
        load(QUICK, ["train.steps=200"]),
        ClusterConfig(job=JobConfig(time_limit="00:20:00", signal_s=100)),
        [7],
        {7: RUNNING},
        attempts=[tried()],
        records=records(20),
        checkpoint=(16, NOW - 45),
    )


def test_a_running_job_says_how_many_more_steps_fit_in_it(facts):
    status = describe(facts, NOW)
    assert (status.state, status.job, status.attempt) == ("running", 7, 1)
    assert status.job_left_s == 700
    assert status.steps_fit == 50  # (700 s left - 100 s for the signal) / 12 s
    assert (status.checkpoint, status.checkpoint_s) == (16, 45)
    text = render(status)
    assert "11m40s left, room for 50 more steps, of 180 that are missing" in text
    assert "10.0 s: rollout 6.00 s, train 3.00 s (medians)" in text
    assert "step 20 of 200, the last 5.00 s ago, reward 0.500\n" in text
    assert "1 of 2 serve" in text


def test_a_job_with_room_for_all_steps_says_that_it_is_enough(facts):
    job = replace(RUNNING, ends=NOW + 9000)
    assert "enough for the 180 that are missing" in render(
        describe(replace(facts, queue={7: job}), NOW)
    )
    done = describe(replace(facts, records=records(200)), NOW)
    assert "11m40s left; all steps are done" in render(done)


@pytest.mark.parametrize(
    ("name", "text"),
    [("accuracy", "held-out accuracy 25.0 %"), ("reward", "held-out reward 0.250")],
)
def test_a_held_out_score_is_a_percentage_where_it_is_an_accuracy(name, text, facts):
    evaluated = Record(20, NOW - 4, {f"eval/{name}": 0.25})
    status = describe(replace(facts, records=[*facts.records, evaluated]), NOW)
    assert f"reward 0.500, {text}\n" in render(status)


@pytest.mark.parametrize(
    ("job", "what"),
    [
        (
            Queued(7, "PENDING", "Priority", "", NOW + 90),
            "waiting, job 7 (Priority), expected to start in 1m30s",
        ),
        (Queued(7, "PENDING", "", "", 0.0, 0.0), "waiting, job 7"),
    ],
)
def test_a_waiting_job_says_why_and_until_when(job, what, facts):
    waits = replace(facts, queue={7: job}, attempts=(), records=(), checkpoint=None)
    status = describe(waits, NOW)
    assert (status.what, status.job_left_s) == (what, None)
    assert "squeue --start --jobs=7" in render(status)


def test_of_a_chain_the_job_that_runs_is_shown(facts):
    waits = Queued(6, "PENDING", "Dependency", "")
    status = describe(replace(facts, jobs=[6, 7], queue={6: waits, 7: RUNNING}), NOW)
    assert (status.state, status.job) == ("running", 7)


@pytest.mark.parametrize(
    ("ended", "verdict", "what", "next"),
    [
        ({}, "all 200 steps are done", "all 200 steps are done", "report.html"),
        (
            {"code": 3, "decision": "stop"},
            "it ended with 3",
            "it ended with 3 (the guard, or numbers that are not finite, halted it)",
            "logs",
        ),
        ({"code": 137, "decision": "stop"}, "", "a rank was killed, exit code 137", "logs"),
        ({"decision": "stop", "signal": "TERM"}, "", "step 40 is saved (stop)", "goes on"),
        ({"decision": "again"}, "time is up", "time is up", "goes on"),
    ],
)
def test_an_ended_run_says_how_and_what_to_do(ended, verdict, what, next, facts):
    attempts = [tried(replace(ENDED, **ended))]
    status = describe(replace(facts, queue={}, attempts=attempts, verdict=verdict), NOW)
    assert status.what == f"ended, job 7, attempt 1: {what}"
    assert next in status.next


def test_a_job_that_left_the_queue_without_a_word_is_not_said_to_run(facts):
    status = describe(replace(facts, queue={}), NOW)
    assert status.what == "job 7 has left the queue in attempt 1, without a last word"
    assert "slurm logs" in status.next


def test_of_a_job_that_never_began_it_is_said_who_remembers_it(facts):
    gone = replace(facts, queue={}, attempts=(), records=())
    assert "left the queue without an attempt" in describe(gone, NOW).what
    assert f"{facts.run_dir}/slurm/job.log, or `sacct -j 7`, says why" in describe(gone, NOW).next


def test_without_slurm_at_hand_the_folder_tells_what_it_knows(facts):
    away = replace(facts, queue=None, queue_error="squeue was not found")
    status = describe(away, NOW)
    assert status.state == "unknown"
    assert status.what.startswith("the queue cannot be asked (squeue was not found), attempt 1")
    assert (status.step, status.checkpoint) == (20, 16)
    assert describe(replace(away, attempts=[tried(ENDED)]), NOW).state == "ended"


# ---- the command


@pytest.fixture
def submitted(tmp_path, monkeypatch) -> Path:
    """A run that waits in the queue."""
    squeue = '{"jobs": [{"job_id": 7, "job_state": "PENDING", "state_reason": "Resources"}]}'
    Programs(tmp_path, monkeypatch)("squeue", f"echo '{squeue}'")
    run_dir = tmp_path / "run"
    folder.write(run_dir, QUICK, ["train.steps=7"], ClusterConfig(), "")
    folder.write_jobs(run_dir, [7])
    return run_dir


def status_of(run_dir: Path, capsys, *options: str) -> str:
    assert main(["slurm", "status", str(run_dir), *options]) == 0
    return capsys.readouterr().out


def test_a_run_that_has_not_begun_has_a_status(submitted, capsys):
    text = status_of(submitted, capsys)
    assert text.startswith(f"{submitted}: waiting, job 7 (Resources)\n")
    assert "step 0 of 7" in text


def test_the_supervisors_words_are_those_of_the_newest_attempt(submitted, capsys):
    Path(submitted.parent / "bin/squeue").write_text("#!/bin/sh\necho '{\"jobs\": []}'\n")
    for number in (1, 2):
        folder.open_attempt(submitted, gpus=1)
        folder.close_attempt(submitted, replace(ENDED, number=number, code=1, decision="stop"))
        with (submitted / "slurm/job.log").open("a") as out:
            out.write(f"qurl: attempt {number}, job 7, x\nqurl: attempt {number}: why {number}\n")
    assert "ended, job 7, attempt 2: why 2 (a fault: " in status_of(submitted, capsys)


def test_a_program_can_read_the_status(submitted, capsys):
    (submitted / "metrics.jsonl").write_text('{"step": 0, "tim')  # the line in flight
    status = json.loads(status_of(submitted, capsys, "--json"))
    assert [status[key] for key in ("state", "job", "steps", "step_s")] == ["waiting", 7, 7, None]


def test_a_machine_without_slurm_says_so_and_fails_not(submitted, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    text = status_of(submitted, capsys)
    assert "squeue was not found" in text and "no attempt has begun" in text


@pytest.mark.parametrize("action", ["status", "logs", "hours", "cancel"])
@pytest.mark.parametrize("name", ["nowhere", "other"])
def test_a_folder_without_a_job_is_named(name, action, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    assert main(["slurm", action, f"{tmp_path}/{name}"]) == 2
    assert f"{tmp_path}/{name}: no job was submitted for this folder" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["logs", "hours"])
def test_a_run_that_waits_has_no_attempt_to_look_at(action, tmp_path, capsys):
    folder.write_jobs(tmp_path, [7])
    assert main(["slurm", action, str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path} has no attempt yet; `qurl slurm status {tmp_path}`" in error
