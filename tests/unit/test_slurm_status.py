"""How a run is, from its folder, the queue and the time."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from qurl_megatron.cli import main
from qurl_megatron.cluster import folder
from qurl_megatron.cluster.cluster import ClusterConfig, JobConfig
from qurl_megatron.cluster.commands import Queued
from qurl_megatron.cluster.status import Facts, describe, pace, render
from qurl_megatron.config import load
from qurl_megatron.observe.attempts import Attempt, Began, Step, Tried
from qurl_megatron.observe.sinks import Record

QUICK = Path(__file__).parents[2] / "launch/recipes/quickstart.toml"
NOW = 10_000.0
RUNNING = Queued(7, "RUNNING", "None", "train[1-2]", NOW - 500, NOW + 700)
ENDED = Attempt(1, 7, 0, 0, 40, "", 0, "done", NOW - 500, NOW - 100, 2)


def records(count: int, *, last: float = NOW - 5, step: float = 10.0) -> list[Record]:
    """Steps of ten seconds each, the last at ``last``."""
    return [
        Record(
            number,
            last - (count - number) * step,
            {
                "time/step": step,
                "time/rollout": 6.0,
                "time/train": 3.0,
                "reward/mean": 0.5,
                "fleet/serving": 1.0,
            },
        )
        for number in range(1, count + 1)
    ]


def tried(ended: Attempt | None = None, number: int = 1) -> Tried:
    first = Step(1, NOW - 300, 10.0)
    return Tried(number, Began(NOW - 500, 2, 0), ended, [first], NOW - 5)


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


def test_a_running_job_says_how_many_more_steps_fit_in_it_and_in_how_many_jobs_the_run_ends(facts):
    found = describe(facts, NOW)
    assert (found.state, found.job, found.attempt) == ("running", 7, 1)
    assert found.job_left_s == 700
    # (700 s left - 100 s for the signal) / 10 s a step; a further job: 1200 - 100 - 190 of set-up.
    assert found.steps_fit == 60
    assert found.jobs_more == 2  # 180 missing, 60 in this one, 91 in each of the next
    assert (found.checkpoint, found.checkpoint_s) == (16, 45)
    assert "room for 60 more steps, of 180 that are missing: 2 more jobs" in render(found)


def test_a_job_with_room_for_all_steps_says_that_it_is_enough(facts):
    job = replace(RUNNING, ends=NOW + 9000)
    found = describe(replace(facts, queue={7: job}), NOW)
    assert (found.steps_fit, found.jobs_more) == (180, 0)
    assert "enough for the 180 that are missing" in render(found)


def test_of_a_run_that_ends_it_is_not_said_how_many_steps_fit(facts):
    found = render(describe(replace(facts, records=records(200)), NOW))
    assert "11m40s left; all steps are done" in found


def test_where_a_step_spends_its_time_is_shown_longest_first(facts):
    text = render(describe(facts, NOW))
    assert "10.0 s: rollout 6.00 s, train 3.00 s (medians)" in text
    assert "step 20 of 200, the last 5.00 s ago, reward 0.500\n" in text
    assert "1 of 2 serve" in text


def test_a_held_out_score_is_a_percentage_where_it_is_an_accuracy(facts):
    for name, said in (
        ("accuracy", "held-out accuracy 25.0 %"),
        ("reward", "held-out reward 0.250"),
    ):
        evaluated = Record(20, NOW - 4, {f"eval/{name}": 0.25})
        found = describe(replace(facts, records=[*facts.records, evaluated]), NOW)
        assert f"reward 0.500, {said}\n" in render(found)


def test_saving_and_evaluating_are_part_of_what_a_step_costs():
    steps = [Step(n, 100 + 10 * n + 20 * (n > 4), 10.0) for n in range(1, 9)]
    found = pace(steps, every=4)
    assert (found.step, found.save) == (10, 20)
    assert found.all_in == pytest.approx(10 + 20 / 7)
    assert pace([], every=4) is None


def test_a_waiting_job_says_why_and_until_when(facts):
    job = Queued(7, "PENDING", "Priority", "", NOW + 90)
    found = describe(replace(facts, queue={7: job}, attempts=(), records=(), checkpoint=None), NOW)
    assert found.what == "waiting, job 7 (Priority), expected to start in 1m30s"
    assert found.job_left_s is None
    assert "squeue --start --jobs=7" in render(found)


def test_of_a_chain_the_job_that_runs_is_shown(facts):
    waits = Queued(6, "PENDING", "Dependency", "")
    found = describe(replace(facts, jobs=[6, 7], queue={6: waits, 7: RUNNING}), NOW)
    assert (found.state, found.job) == ("running", 7)


@pytest.mark.parametrize(
    ("ended", "what", "next"),
    [
        ({}, "all steps are done", "report.html"),
        ({"code": 3, "decision": "stop"}, "the guard, or numbers that are not finite", "logs"),
        ({"code": 137, "decision": "stop"}, "a rank was killed, exit code 137", "logs"),
        ({"code": 0, "decision": "stop", "signal": "TERM"}, "it was cancelled", "goes on"),
        ({"code": 0, "decision": "stop", "signal": "USR1"}, "no progress", "job.signal_s"),
        ({"code": 0, "decision": "again"}, "no job is left that goes on", "goes on"),
    ],
)
def test_an_ended_run_says_how_and_what_to_do(ended, what, next, facts):
    record = replace(ENDED, **ended)
    found = describe(replace(facts, queue={}, attempts=[tried(record)]), NOW)
    assert found.state == "ended"
    assert what in found.what and next in found.next


def test_the_supervisors_own_words_say_best_how_a_run_ended(facts):
    record = replace(ENDED, code=3, decision="stop")
    ended = replace(facts, queue={}, attempts=[tried(record)], verdict="it ended with 3")
    assert describe(ended, NOW).what == (
        "ended, job 7, attempt 1: it ended with 3 (the guard, or numbers that are not finite, "
        "halted it)"
    )
    ended = replace(ended, attempts=[tried(ENDED)], verdict="all 200 steps are done")
    assert describe(ended, NOW).what == "ended, job 7, attempt 1: all 200 steps are done"


def test_a_job_that_left_the_queue_without_a_word_is_not_said_to_run(facts):
    found = describe(replace(facts, queue={}), NOW)
    assert found.what == "job 7 has left the queue in attempt 1, without a last word"
    assert "slurm logs" in found.next
    found = describe(replace(facts, queue={}, attempts=(), records=()), NOW)
    assert "left the queue without an attempt" in found.what


def test_without_slurm_at_hand_the_folder_tells_what_it_knows(facts):
    found = describe(replace(facts, queue=None, queue_error="squeue was not found"), NOW)
    assert found.state == "unknown"
    assert found.what.startswith("the queue cannot be asked (squeue was not found), attempt 1")
    assert (found.step, found.checkpoint) == (20, 16)
    ended = replace(facts, queue=None, queue_error="x", attempts=[tried(ENDED)])
    assert describe(ended, NOW).state == "ended"


# ---- the command


@pytest.fixture
def submitted(tmp_path, monkeypatch) -> Path:
    """A run that was submitted from a machine whose squeue says what ``queue.json`` holds."""
    program = tmp_path / "bin/squeue"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/queue.json\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}/usr/bin{os.pathsep}/bin")
    (tmp_path / "queue.json").write_text(
        '{"jobs": [{"job_id": 7, "job_state": "PENDING", "state_reason": "Resources"}]}'
    )
    run_dir = tmp_path / "run"
    folder.write(run_dir, QUICK, ["train.steps=7"], ClusterConfig(), "")
    folder.write_submitted(run_dir, folder.Submitted([7], ""))
    return run_dir


def test_a_run_that_has_not_begun_has_a_status(submitted, capsys):
    assert main(["slurm", "status", str(submitted)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{submitted}: waiting, job 7 (Resources)\n")
    assert "step 0 of 7" in said


def test_the_supervisors_words_are_those_of_the_newest_attempt(submitted, capsys):
    (submitted.parent / "queue.json").write_text('{"jobs": []}')
    for number in (1, 2):
        folder.open_attempt(submitted, gpus=1)
        folder.close_attempt(submitted, replace(ENDED, number=number, code=1, decision="stop"))
        with (submitted / "slurm/job.log").open("a") as out:
            out.write(f"qurl: attempt {number}, job 7, x\nqurl: attempt {number}: why {number}\n")
    assert main(["slurm", "status", str(submitted)]) == 0
    assert "ended, job 7, attempt 2: why 2 (a fault: " in capsys.readouterr().out


def test_a_program_can_read_the_status(submitted, capsys):
    (submitted / "metrics.jsonl").write_text('{"step": 0, "tim')  # the line in flight
    assert main(["slurm", "status", str(submitted), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["job"], found["steps"], found["step_s"]) == (
        "waiting",
        7,
        7,
        None,
    )


def test_a_machine_without_slurm_says_so_and_fails_not(submitted, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert main(["slurm", "status", str(submitted)]) == 0
    said = capsys.readouterr().out
    assert "squeue was not found" in said and "no attempt has begun" in said


@pytest.mark.parametrize("action", ["status", "logs", "hours", "cancel"])
def test_what_was_never_a_job_is_told_from_a_wrong_name(action, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    Path("trained").mkdir()
    Path("trained/metrics.jsonl").touch()
    Path("file").touch()
    for name, said in {
        "nowhere": "nowhere is not a folder; name the run's, train.run_dir of its recipe",
        "file": "file is not a folder; name the run's, train.run_dir of its recipe",
        "other": "other: nothing was submitted for this folder; name the run's, train.run_dir of "
        "its recipe",
        "trained": "trained: this run was never submitted to Slurm; `qurl report trained` shows "
        "how it went",
    }.items():
        assert main(["slurm", action, name]) == 2
        assert capsys.readouterr().err == f"qurl: {said}\n"


def test_a_job_that_waits_for_no_reason_is_given_none(facts):
    pending = Queued(7, "PENDING", "", "", 0.0, 0.0)
    waits = replace(facts, queue={7: pending}, attempts=(), records=())
    assert describe(waits, NOW).what == "waiting, job 7"


@pytest.mark.parametrize("action", ["logs", "hours"])
def test_a_run_that_waits_has_no_attempt_to_look_at(action, tmp_path, capsys):
    folder.write_submitted(tmp_path, folder.Submitted([7], ""))
    assert main(["slurm", action, str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"qurl: {tmp_path} has no attempt yet; `qurl slurm status {tmp_path}` says what it waits "
        "for\n"
    )


def test_of_a_job_that_never_began_it_is_said_who_remembers_it(facts):
    gone = replace(facts, queue={}, attempts=(), records=())
    assert describe(gone, NOW).next == (
        "`scontrol show job 7`, or later `sacct -j 7`, says why; `qurl slurm submit`, as before, "
        "submits it again"
    )
    began = replace(gone, logged=True)
    assert describe(began, NOW).next == f"{facts.run_dir}/slurm/job.log says why"
