"""Whole runs that lose processes to signals, or their clock: what they say, do and leave behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qurl_megatron.training.state import latest
from tests.support.disks import small_disk
from tests.support.leftovers import Footprint
from tests.support.runs import Run, make_recipe
from tests.support.waiting import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_recipe(tmp_path_factory.mktemp("kills"))


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def finished(run: Run) -> dict[int, dict[str, float]]:
    run.finish()
    return run.metrics()


def reward_workers(run: Run) -> list[int]:
    commands = {p.pid: p.cmdline() for p in run.processes()}
    return [pid for pid, command in commands.items() if "qurl_megatron.rewards.worker" in command]


@pytest.mark.parametrize("first", ["everybody", "engines"])
def test_sigterm_to_every_process_of_a_run_saves_it_whoever_has_it_first(tiny, first):
    run = Run(tiny, f"all-at-once-{first}", "rollout.max_restarts=0", "parallel.tensor=2")
    with run.process():
        run.wait(lambda: run.step() >= 1)
        engines = [pid for pid in (run.engine(0), run.engine(1)) if pid]
        everybody = [process.pid for process in run.processes()]
        for pid in engines if first == "engines" else []:
            os.kill(pid, signal.SIGTERM)
        if first == "engines":
            run.wait(lambda: run.engine(0) is None and run.engine(1) is None)
        for pid in everybody:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert run.ended() == 128 + signal.SIGTERM, run.stderr()
        assert run.left() == []
    saved = max(int(path.name[-6:]) for path in (run.dir / "checkpoints").iterdir())
    assert saved == run.step() >= 1


def test_reward_workers_that_are_killed_cost_nothing_and_stopped_ones_are_told_of(tiny):
    run = Run(tiny, "graded", "rollout.engines=1", "reward.kind=math", "reward.timeout_s=5")
    with run.process():
        run.wait(lambda: run.step() >= 1)
        for pid in reward_workers(run):
            os.kill(pid, signal.SIGKILL)
        since = run.step()
        run.wait(lambda: run.step() >= since + 2)
        for pid in reward_workers(run):
            os.kill(pid, signal.SIGSTOP)
        run.wait(lambda: "*** reward" in run.stdout())
        os.killpg(run.popen.pid, signal.SIGTERM)  # as `timeout` does: to the fork server, too
        assert run.ended() == 128 + signal.SIGTERM, run.stderr()
        assert run.left() == []
    (told,) = re.findall(r"\*\*\* reward, step (\d+): (.*)", run.stdout())
    assert told[1] == (
        "1 of 64 responses could not be scored and got reward.failed=0: 1 took too long "
        "(reward.timeout_s=5)"
    )
    seen = run.metrics()
    assert {step: m["reward/timeouts"] for step, m in seen.items() if m["reward/timeouts"]} == {
        int(told[0]): 1.0
    }
    assert not any(m["reward/crashes"] for m in seen.values())


LAUNCHER, LEADER, OTHER = "the launcher", "rank 0", "rank 1"


def starting(run: Run, since: float) -> bool:
    return sum(log.stat().st_mtime > since for log in (run.dir / "logs").glob("*.log")) == 2


def saving(run: Run, since: float) -> bool:
    with contextlib.suppress(FileNotFoundError):  # it has got its name meanwhile
        folders = (run.dir / "checkpoints").glob(".step_*")
        return any(folder.stat().st_mtime > since for folder in folders)
    return False


def training(run: Run, since: float) -> bool:
    log = run.dir / "metrics.jsonl"
    written = log.exists() and log.stat().st_mtime > since
    return written and run.step() > max(run.saved(), default=0)


@pytest.mark.thorough
def test_killed_anywhere_again_and_again_a_run_ends_as_if_nothing_had_been(tiny):
    options = ("parallel.tensor=2", "checkpoint.every=1", "train.steps=9", "train.eval_prompts=0")
    run = Run(tiny, "battered", *options)
    for place in (starting, saving, training):
        for victim in (OTHER, LEADER, LAUNCHER):
            killed(run, victim, place)
    assert finished(run) == finished(Run(tiny, "whole", *options))


def killed(run: Run, victim: str, there: Callable[[Run, float], bool]) -> None:
    begun = time.time()
    with run.process() as launcher:
        while not there(run, begun):
            assert launcher.poll() is None, run.stderr()
            time.sleep(0.001)
        pid = launcher.pid if victim == LAUNCHER else run.rank(int(victim[-1]))
        run.processes()
        os.kill(pid, signal.SIGKILL)
        assert run.ended() == (-signal.SIGKILL if victim == LAUNCHER else 128 + signal.SIGKILL)
        assert run.left() == []
    if victim != LAUNCHER:
        assert re.match(rf"qurl: {victim} was killed by SIGKILL in step \d+, ", run.stderr())
        assert run.stderr().count("\n") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["parallel.pipeline=2", "parallel.data=2"])
def test_a_run_that_is_killed_goes_on_the_same_at_every_layout(tiny, layout):
    options = (layout, "train.micro_batch=16", "checkpoint.every=1", "train.steps=4")
    run = Run(tiny, f"resumed-{layout}", *options)
    killed(run, LAUNCHER, training)
    assert finished(run) == finished(Run(tiny, f"whole-{layout}", *options))


def test_experts_on_two_ranks_with_their_routing_replayed_go_on_the_same_when_killed(tiny):
    options = ("parallel.expert=2", "parallel.data=2", "model.routing_replay=rollout")
    options += ("warmstart.experts=4", f"model.path={tiny.parent}/experts", "train.steps=3")
    options += ("checkpoint.every=1", "train.eval_prompts=0", "train.micro_batch=16")
    whole = finished(Run(tiny, "experts-whole", *options))
    run = Run(tiny, "experts-resumed", *options)
    killed(run, LAUNCHER, training)
    assert finished(run) == whole
    assert all(m["policy/routes_differ_fraction"] < 0.2 for m in whole.values())
    assert all(m["rollout/routes_missing_fraction"] == 0 for m in whole.values())


@pytest.mark.thorough
def test_a_run_that_is_stopped_before_its_first_step_keeps_what_it_went_on_from(tiny):
    first = Run(tiny, "early", "train.eval_prompts=0", "train.steps=1")
    first.finish()
    run = Run(tiny, "early", "train.eval_prompts=0")
    for _ in range(2):
        begun = time.time()
        with run.process() as process:
            run.wait(lambda since=begun: starting(run, since))
            process.send_signal(signal.SIGTERM)
            assert run.ended() == 128 + signal.SIGTERM, run.stderr()
        assert [path.name for path in (run.dir / "checkpoints").iterdir()] == ["step_000001"]


@pytest.mark.thorough
def test_checkpoints_that_become_read_only_end_the_run_in_a_sentence(tiny):
    run = Run(tiny, "read-only", "checkpoint.every=1", "rollout.engines=1")
    run.dir.mkdir()
    with small_disk(run.dir / "checkpoints", "64m") as disk:
        with run.process():
            run.wait(lambda: len(run.saved()) >= 2)
            remount = ["mount", "-o", "remount,ro", str(disk)]
            wait_until(lambda: not subprocess.run(remount).returncode)  # not while one is written
            assert run.ended() == 2
            assert run.left() == []
        assert re.match(rf"qurl: checkpoint {disk}/\S+ cannot be written \(Read-only", run.stderr())
        assert run.stderr().count("\n") == 1
        kept = max(run.saved())
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        again = Run(tiny, "read-only", "rollout.engines=1", f"train.steps={kept + 1}")
        again.finish()
        assert f"after step {kept}" in again.stdout()


def test_a_run_whose_folder_is_renamed_ends_at_its_next_save_and_writes_no_other(tiny):
    run = Run(tiny, "renamed", "checkpoint.every=1", "rollout.engines=1", "train.steps=20")
    elsewhere = run.dir.with_name("elsewhere")
    with run.process():
        run.wait(lambda: bool(run.saved()))
        run.dir.rename(elsewhere)
        assert run.ended() == 2
    assert re.search(rf"^qurl: .*{run.dir} was renamed, deleted or replaced .*\n$", run.stderr())
    assert not run.dir.exists(), "it can be put back"
    assert (elsewhere / "config.toml").is_file() and latest(elsewhere)


JUMPS = """
import itertools, time
real, jump = time.time, itertools.cycle((0, 7200, -7200, 86400))
time.time = lambda: real() + next(jump)
"""


@pytest.mark.thorough
def test_a_clock_that_jumps_by_hours_changes_nothing(tiny, tmp_path, monkeypatch):
    options = ("parallel.tensor=2", "train.steps=3", "reward.kind=math", "reward.timeout_s=10")
    expected = finished(Run(tiny, "steady", *options))
    (tmp_path / "sitecustomize.py").write_text(JUMPS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    assert finished(jumping := Run(tiny, "jumping", *options)) == expected
    spans = records(jumping.dir / "timeline.jsonl")
    assert all(0 <= span["end"] - span["start"] < 3600 for span in spans)
    times = [record["time"] for record in records(jumping.dir / "metrics.jsonl")]
    assert times == sorted(times)


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [LAUNCHER, LEADER, OTHER])
def test_under_torchrun_nothing_is_left_whoever_is_killed(tiny, victim, tmp_path):
    """The agent is not ours: it names a killed rank and its signal itself, and ends with 1."""
    footprint, run_dir = Footprint(), tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    recipe = [str(tiny), "parallel.tensor=2", f"train.run_dir={run_dir}", "warmstart.steps=0"]
    command = [*torchrun, "-m", "qurl_megatron.cli", "train", *recipe]
    with (tmp_path / "log").open("w") as log:
        agent = subprocess.Popen(command, env=footprint.env, stdout=log, stderr=log)
    try:
        wait_until(lambda: (run_dir / "metrics.jsonl").exists() or agent.poll() is not None)
        assert agent.poll() is None, (tmp_path / "log").read_text()
        ranks = [
            p.pid for p in footprint.look() if p.ppid() == agent.pid and "train" in p.cmdline()
        ]
        pid = agent.pid if victim == LAUNCHER else sorted(ranks)[int(victim[-1])]
        os.kill(pid, signal.SIGKILL)
        assert agent.wait(PATIENCE_S) == (-signal.SIGKILL if victim == LAUNCHER else 1)
        assert footprint.left(run_dir) == []
    finally:
        for process in footprint.processes():
            process.kill()
    if victim != LAUNCHER:
        assert "(SIGKILL)" in (tmp_path / "log").read_text()


@pytest.mark.usefixtures("hears_hangups")
def test_a_run_goes_on_without_its_terminal_and_saves_when_the_session_is_closed(tiny):
    run = Run(tiny, "hung-up", "rollout.engines=1")
    reader, writer = os.pipe()
    with run.process(stdout=writer):
        os.close(writer)
        run.wait(lambda: run.step() >= 1)
        os.close(reader)
        since = run.step()
        run.wait(lambda: run.step() >= since + 2)
        os.killpg(run.popen.pid, signal.SIGHUP)
        assert run.ended() == 128 + signal.SIGHUP, run.stderr()
        assert run.left() == []
    saved = [path.name for path in (run.dir / "checkpoints").iterdir()]
    assert saved == [f"step_{max(run.metrics()):06}"]
    assert run.stderr() == (
        "qurl: stdout cannot be written any more (Broken pipe); the run goes on without it\n"
    )
