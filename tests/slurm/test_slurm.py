"""What ``qurl slurm`` submits, on a real Slurm whose nodes' names resolve nowhere."""

import json
import re
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest

from qurl_megatron.cluster import folder
from qurl_megatron.observe.sinks import read_metrics
from tests.slurm.cluster import NODES, Cluster
from tests.slurm.conftest import (
    ENDLESS,
    ONE_RANK,
    OPTIONS,
    ROOT,
    SMALL,
    STEPS,
    User,
    decisions,
    ended_attempts,
    ends_in,
    measured,
    reaches,
    said,
    time_is_up,
)
from tests.support.runs import steps_done
from tests.support.slurm_scripts import FOLDER, READY


@pytest.mark.slice
@pytest.mark.parametrize("name", READY)
def test_slurm_would_take_the_scripts_that_ship(name: str, slurm: Cluster):
    done = slurm.call("sbatch", "--test-only", FOLDER / name)
    assert done.returncode == 0, done.stderr


def test_slurms_signal_before_the_time_limit_has_the_run_save_and_go_on(user: User):
    job, run_dir = user.submit("endless", *ENDLESS, ONE_RANK)
    reaches(user, run_dir, 3)
    running = user.told("status", run_dir)
    assert f"running, job {job} on " in running and ", attempt 1\n" in running
    assert re.search(r"this job +1?\dm\d+s left", running), running
    ends_in(user, job, 75)
    user.slurm.wait(lambda: user.slurm.facts(job).get("Restarts") == "1", 180)
    (first,) = ended_attempts(run_dir)
    assert (first.signal, first.decision) == ("USR1", "again") and first.step_after >= 3
    assert user.slurm.call("scancel", job).returncode == 0
    assert user.footprint.left(run_dir) == []


def test_where_requeueing_is_forbidden_another_job_goes_on_behind_this_one(
    user: User, undisturbed: Path
):
    scontrol = user.folder / "bin/scontrol"  # before the real one on PATH
    scontrol.write_text(
        f'#!/bin/sh\n[ "$1" != requeue ] && exec {which("scontrol")} "$@"\nexit 1\n'
    )
    scontrol.chmod(0o755)
    job, run_dir = user.submit("forbidden", *OPTIONS)
    reaches(user, run_dir, 3)
    time_is_up(user, job)
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    behind = folder.job(run_dir)
    assert behind != job
    assert user.slurm.ended(behind) == "COMPLETED", user.log(run_dir)
    assert [(one.job, one.decision) for one in ended_attempts(run_dir)] == [
        (job, "again"),
        (behind, "done"),
    ]
    assert measured(run_dir) == measured(undisturbed)
    assert user.footprint.left(run_dir) == []


@pytest.mark.slice
def test_a_run_whose_time_is_up_goes_on_in_the_same_job_and_ends_as_if_it_had_not(
    user: User, undisturbed: Path
):
    job, run_dir = user.submit("interrupted", *OPTIONS)
    user.slurm.wait(lambda: user.slurm.state(job) == "RUNNING", 60)
    words = (ROOT / "launch/recipes/quickstart.toml", *user.overrides, f"train.run_dir={run_dir}")
    refused = user.slurms("submit", *words, "--cluster", user.cluster_file)
    assert f"has job {job} in the queue (RUNNING)" in refused.stderr
    reaches(user, run_dir, 3)
    time_is_up(user, job)
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    assert user.slurm.facts(job)["Restarts"] == "1"
    first, second = ended_attempts(run_dir)
    assert (first.signal, first.code, first.decision) == ("USR1", 0, "again")
    assert (second.step_before, second.step_after) == (first.step_after, STEPS)
    assert (second.job, second.code, second.decision) == (job, 0, "done")
    assert measured(run_dir) == measured(undisturbed)
    assert (run_dir / "report.html").is_file()
    assert user.footprint.left(run_dir) == []


def test_engines_on_a_node_of_their_own_meet_the_trainer_before_and_after_a_requeue(user: User):
    meeting = user.folder / "apart/engines"
    job, run_dir = user.submit(
        "apart", *OPTIONS, f"rollout.rendezvous={meeting}", "rollout.engines=2"
    )
    reaches(user, run_dir, 3)
    user.assert_no_command_has_key(meeting)
    time_is_up(user, job)
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    assert steps_done(run_dir) == STEPS
    assert decisions(run_dir) == ["again", "done"]
    said_there = (run_dir / "slurm/latest/engines-0.log").read_text()
    assert re.search(r"engine-0 listens at http://[\d.]+:\d+", said_there)
    user.assert_key_is_kept(job, run_dir, meeting)
    assert user.footprint.left(run_dir) == []


# ---- the nodes of a job


def test_two_jobs_of_one_user_at_once_on_the_same_two_nodes_end_as_each_alone_would(
    user: User, undisturbed: Path
):
    for node in NODES:
        with pytest.raises(OSError):
            socket.getaddrinfo(node, None)
    # A rank on each node, of which both jobs have half.
    user.describe({"gpus": 1, "cpus": 64}, extra=["--nodelist=train1,train2"])
    first, first_dir = user.submit("first", *OPTIONS)
    everywhere = ("rollout.each_node=true", "rollout.engines=2")
    second, second_dir = user.submit("second", *OPTIONS, *everywhere)
    user.slurm.wait(lambda: min(steps_done(first_dir), steps_done(second_dir)) >= 1, 180)
    for job, where in ((first, first_dir), (second, second_dir)):
        assert user.slurm.facts(job)["NodeList"] == "train[1-2]"
        assert user.slurm.ended(job) == "COMPLETED", user.log(where)
    alone = measured(undisturbed)
    assert measured(first_dir) == alone
    of_engines = {"sync/loaded_bytes", "fleet/serving"}  # the second job has one on each node
    for step, metrics in measured(second_dir).items():
        assert metrics == alone[step] | {k: metrics[k] for k in of_engines & metrics.keys()}
    assert {path.parent.name for path in second_dir.glob("logs/*/engine-0.log")} == {*NODES[:2]}
    assert len(alone) == STEPS + 1
    for where in (first_dir, second_dir):
        assert list(where.glob(".meet-*")) == []
        assert user.footprint.left(where) == []


@pytest.fixture
def hide_torch(user: User):
    """Makes a node bad: torch is an empty folder there; undone at the end."""
    nodes, torch = [], Path(find_spec("torch").origin).parent

    def hide(node: str) -> None:
        user.slurm.on(node, "mount", "-t", "tmpfs", "tmpfs", torch)
        nodes.append(node)

    yield hide
    for node in nodes:
        user.slurm.on(node, "umount", "-l", torch)


def test_a_bad_node_is_excluded_and_the_job_goes_on_elsewhere(user: User, hide_torch):
    user.describe({"gpus": 1}, examine_s=60)
    for node in ("roll1", "train2"):
        hide_torch(node)
    job, run_dir = user.submit("moved", "train.steps=6", "checkpoint.every=0")
    assert user.slurm.ended(job) == "COMPLETED", user.log(run_dir)
    *moved, last = decisions(run_dir)
    assert 1 <= len(moved) <= 2 and {*moved} == {"without"} and last == "done"
    assert user.slurm.facts(job)["NodeList"] == "roll2,train1"
    met = [json.loads(file.read_text()) for file in run_dir.glob("slurm/latest/node-*.json")]
    assert len(met) == 2 and all(met)  # the nodes that are left have timed their link
    bad = re.findall("node (\\S+) is bad: it could not be measured: ", said(run_dir))
    assert {*bad} <= {"roll1", "train2"}
    assert steps_done(run_dir) == 6


# ---- what an operator sees, and other jobs


def test_a_run_whose_numbers_broke_says_so_first(user: User):
    job, run_dir = user.submit(
        "broken", "train.steps=20", "train.eval_prompts=0", "optimizer.lr=1e9"
    )
    assert user.slurm.ended(job) == "FAILED", user.log(run_dir)
    assert user.slurm.facts(job)["ExitCode"] == "3:0"
    text = user.told("logs", run_dir)
    assert "First cause: numbers, or the guard, halted the run: rank " in text
    assert "train of step 2 with weights 1" in text
    assert "Collapse: step 2 broke the policy" in text and "NotFinite" in text
    ended = user.told("status", run_dir)
    assert f"ended, job {job}" in ended and "slurm logs" in ended


def test_converters_evaluations_benchmarks_and_studies_run_as_jobs_of_their_own(user: User):
    model = user.overrides[-1].partition("=")[2]
    (user.folder / "checkpoints_tools").symlink_to(ROOT / "checkpoints_tools")
    python = user.folder / "bin/python"  # as `source .venv/bin/activate` in site.prolog finds it
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    problems = [{"prompt": f"{n} + 2 =", "answer": str(n + 2)} for n in range(4)]
    (user.folder / "sums.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    converted, results, bench, study = (
        user.folder / name for name in ("converted", "results", "bench", "study")
    )
    short = ("--model", "tiny", "--schemes", "int8", "--repeats", 1)
    asked = ("--k", "1", "rollout.max_new_tokens=4", "model.dtype=float32", "reward.kind=exact")
    jobs = [
        *_submit(user, "command", "convert", "--hf", model, "--out", converted),
        *_submit(user, "command", "eval", "sums.jsonl", "--model", model, *asked, "--out", results),
        *_submit(user, "study", _study(user.folder, model), study),
        *_submit(user, "command", "bench", "rollout", *short, "--out", bench),
    ]
    assert len(jobs) == 5
    for job in jobs:
        assert user.slurm.ended(job, 120) == "COMPLETED", _logs(user)
    assert list(converted.rglob(".metadata")), _logs(user)
    measured = json.loads((results / "results.json").read_text())["benchmarks"]
    assert measured["sums"]["problems"] == 4
    (case,) = json.loads((bench / "rollout.json").read_text())["cases"]
    assert case["name"] == "embedded int8"
    cells = sorted(study.glob("runs/*/metrics.jsonl"))
    assert [max(one.step for one in read_metrics(cell)) for cell in cells] == [2, 2]


def _submit(user: User, kind: str, *words: object) -> list[str]:
    given = ("--kind", kind, "--cluster", user.cluster_file, "--", *words)
    return re.findall("^job ([0-9]+);", user.told("submit", *given), re.MULTILINE)


def _study(where: Path, model: str) -> Path:
    """A study of one method and two seeds."""
    overrides = [*SMALL, ONE_RANK, f"model.path={model}", "train.steps=2", "train.eval_prompts=0"]
    path = where / "study.toml"
    path.write_text(
        f'recipe = "{ROOT}/launch/recipes/quickstart.toml"\n'
        f"overrides = {json.dumps(overrides)}\nseeds = [0, 1]\n"
        '[methods.acr]\noverrides = ["algo.objective=acr"]\n'
    )
    return path


def _logs(user: User) -> str:
    return "\n".join(path.read_text() for path in user.folder.glob("runs/slurm/*"))
