"""Where the GPU-hours of a run went."""

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from qurl_megatron.cli import main
from qurl_megatron.cluster import folder
from qurl_megatron.observe import attempts as records
from qurl_megatron.observe.attempts import Began, Step, tried
from qurl_megatron.observe.hours import accepted, hours_of, split
from qurl_megatron.observe.report import write_report
from qurl_megatron.observe.sinks import Record

INFINITE = float("inf")


def taken(*seconds: float, start: float = 100.0, gap: float = 0.0, first: int = 1) -> list[Step]:
    """Steps one after another, from ``start`` on."""
    steps = []
    for number, took in enumerate(seconds, first):
        start += took
        steps.append(Step(number, start, took))
        start += gap
    return steps


CLEAN, FAILED, RUNS = (
    {"failed": failed, "runs": runs}
    for failed, runs in ((False, False), (True, False), (False, True))
)


@pytest.mark.parametrize(
    ("ended", "steps", "saved", "how", "seconds"),
    [
        pytest.param(150, taken(10, 10, 10, gap=2.0), 3, CLEAN, (100, 30, 20, 0, 0), id="clean"),
        pytest.param(145, taken(10, 10, 10, 10), 2, FAILED, (100, 20, 0, 0, 25), id="failed"),
        pytest.param(430, taken(10, 10, 300, 10), 4, CLEAN, (100, 60, 0, 270, 0), id="stalled"),
        pytest.param(60, [], 0, FAILED, (60, 0, 0, 0, 0), id="no step"),
        pytest.param(220, taken(10, 10), INFINITE, RUNS, (100, 50, 0, 70, 0), id="hangs"),
    ],
)
def test_the_seconds_of_an_attempt_are_split(ended, steps, saved, how, seconds):
    """Set up, trained, saved, stalled, lost."""
    spent = split(0.0, float(ended), steps, saved, **how)
    assert tuple(asdict(spent).values()) == seconds


@pytest.mark.parametrize("seed", range(10))
def test_the_parts_add_up_to_the_whole_whatever_the_clocks_say(seed):
    rng = random.Random(seed)
    began = rng.uniform(0, 1e9)
    ended = began + rng.uniform(0, 1e5)
    steps = [
        Step(number, rng.uniform(began - 100, ended + 100), rng.expovariate(1 / 50))
        for number in range(rng.randrange(20))
    ]
    if rng.random() < 0.8:
        steps.sort(key=lambda one: one.ended_at)
    saved = rng.choice([0, 5, INFINITE])
    flags = {"failed": rng.random() < 0.5, "runs": rng.random() < 0.5}
    spent = split(began, ended, steps, saved, **flags)
    assert spent.total == pytest.approx(ended - began, rel=1e-9, abs=1e-6)
    assert min(asdict(spent).values()) >= 0


# ---- the run's folder


def measure(run_dir: Path, steps: list[Step]) -> None:
    run_dir.mkdir(exist_ok=True)
    with (run_dir / "metrics.jsonl").open("w") as out:
        for one in steps:
            metrics = {"time/step": one.seconds, "reward/mean": 0.5}
            line = {"step": one.step, "time": one.ended_at, "metrics": metrics}
            out.write(json.dumps(line) + "\n")


@pytest.fixture
def clock(monkeypatch):
    """``clock(t)`` sets the supervisor's time."""

    def at(seconds: float) -> None:
        monkeypatch.setattr(folder, "now", lambda: seconds)

    return at


def close(run_dir: Path, number: int, *, after: int, code: int, decision: str = "stop") -> None:
    record = {"job": 5, "restarts": 0, "step_before": 0, "signal": "", "decision": decision}
    ended = folder.Attempt(number=number, step_after=after, code=code, **record)
    folder.close_attempt(run_dir, ended)


@pytest.fixture
def twice(tmp_path, clock) -> Path:
    """Four steps of which two are saved, a failure, and the other two again."""
    clock(1000.0)
    folder.open_attempt(tmp_path, gpus=36, step=0)
    measure(tmp_path, taken(10, 10, 10, 10, start=1100.0))
    clock(1150.0)
    close(tmp_path, 1, after=2, code=137)
    clock(2000.0)
    folder.open_attempt(tmp_path, gpus=36, step=2)
    first = taken(10, 10, start=1100.0)
    measure(tmp_path, first + taken(10, 10, start=2050.0, first=3))
    clock(2080.0)
    close(tmp_path, 2, after=4, code=0, decision="done")
    (tmp_path / "config.toml").write_text(
        "[data]\nprompts_per_step = 4\n[rollout]\nsamples_per_prompt = 8\n"
    )
    return tmp_path


def test_steps_that_were_done_again_are_counted_as_lost_although_metrics_forget_them(twice):
    first, second = hours_of(twice).rows
    # Set up, trained, saved, stalled, lost; a second of 36 GPUs is 0.01 GPU-hours.
    assert list(asdict(first.hours).values()) == pytest.approx([1.0, 0.2, 0, 0, 0.3])
    assert list(asdict(second.hours).values()) == pytest.approx([0.5, 0.2, 0.1, 0, 0])


def test_samples_of_lost_steps_are_not_accepted(twice, clock):
    clock(2080.0)
    close(twice, 2, after=3, code=137)
    assert hours_of(twice).samples == 3 * 32


def test_the_attempts_add_up_to_the_run_and_the_queue_between_them_is_no_gpus(twice):
    found = hours_of(twice)
    assert found.total.total == pytest.approx((150 + 80) * 36 / 3600)
    assert found.samples == 4 * 32
    assert found.per_sample == pytest.approx(2.3 / 128)


def test_a_supervisor_that_was_killed_leaves_an_attempt_that_ended_with_its_last_sign(
    tmp_path, clock
):
    clock(1000.0)
    folder.open_attempt(tmp_path, gpus=1, step=0)
    measure(tmp_path, taken(10, 10, start=1100.0))
    clock(5000.0)
    folder.open_attempt(tmp_path, gpus=1, step=1)
    first, second = tried(tmp_path)
    assert first.ended is None and [step.step for step in first.steps] == [1, 2]
    assert second.began == Began(5000.0, 1, 1) and list(second.steps) == []


@pytest.mark.parametrize(("masked", "samples"), [(False, 24 * 0.75), (True, 24 * 0.75 * 0.5)])
def test_samples_that_are_rejected_or_fill_up_or_are_cut_off_and_masked_are_not_accepted(
    masked, samples
):
    recipe = {"data": {"prompts_per_step": 4}, "rollout": {"samples_per_prompt": 8}}
    recipe["algo"] = {"mask_truncated": masked}
    metrics = {"time/step": 1.0, "correction/rejected_responses": 0.25, "sampling/unfilled": 1.0}
    metrics["response/truncated"] = 0.5
    lines = [Record(1, 0.0, metrics), Record(1, 0.0, {"eval/accuracy": 1.0})]
    assert accepted(lines, recipe) == samples


def test_the_table_and_its_json_say_the_same(twice, capsys):
    assert main(["slurm", "hours", str(twice)]) == 0
    table = capsys.readouterr().out
    assert main(["slurm", "hours", str(twice), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["all"]["all"] == 2.3
    assert data["all"]["lost"] == pytest.approx(0.3)
    assert [one["attempt"] for one in data["attempts"]] == [1, 2]
    assert "all " in table and "2.3000" in table
    assert "128 samples were trained on: 0.018 GPU-hours each" in table


@pytest.mark.parametrize("name", [records.BEGAN, records.STEPS])
def test_a_damaged_record_is_named(name, twice, capsys):
    (twice / "slurm/attempts/1" / name).write_text("[1")
    assert main(["slurm", "hours", str(twice)]) == 2
    assert f"{name} is damaged" in capsys.readouterr().err


def test_the_report_of_a_run_under_slurm_has_its_gpu_hours_and_another_has_none(twice, tmp_path):
    page = write_report(twice).read_text()
    assert "<summary>GPU-hours</summary>" in page
    assert '<th scope="row">attempt 2</th><td>36</td>' in page
    alone = tmp_path / "alone"
    measure(alone, taken(1.0))
    assert "GPU-hours" not in write_report(alone).read_text()
