"""What an operator sees of a run on a real Slurm: its first cause; and other jobs."""

import json
import re
import sys
from pathlib import Path

from qurl_megatron.observe.sinks import read_metrics
from tests.slurm.conftest import ROOT, SMALL, User
from tests.slurm.runs import ONE_RANK


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
    asked = ("--k", "1", "--max-new-tokens", "4", "--dtype", "float32", "--reward", "exact")
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
