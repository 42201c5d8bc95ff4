"""What an operator calls on a login node imports neither torch nor Megatron."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qurl_megatron.slurm.ready import ROOT
from qurl_megatron.testing.models import tiny_checkpoint

QUICK = ROOT / "launch/recipes/quickstart.toml"
PLANNED = ROOT / "launch/recipes/grpo_qwen2.5_14b.toml"
ASK = """
import contextlib, io, json, sys
from qurl_megatron.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    code = main(json.loads(sys.argv[1]))
heavy = {"torch", "megatron", "transformers", "matplotlib"} & set(sys.modules)
print(code, *sorted(heavy))
"""


def called(here: Path, *words: object) -> str:
    """A command in a Python of its own: its exit code, and what it has imported that is heavy."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{here}/bin{os.pathsep}/usr/bin:/bin"}
    command = [sys.executable, "-c", ASK, json.dumps([*map(str, words)])]
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder with a cluster file, a model, a Slurm that takes everything, and a run."""
    folder = tmp_path_factory.mktemp("login")
    (folder / "bin").mkdir()
    answers = {
        "sbatch": "echo 41",
        "squeue": "echo '{\"jobs\": []}'",
        "scancel": "",
        "scontrol": "",
    }
    for name, answer in answers.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{answer}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "cluster.toml").write_text(f'[site]\nshared = ["{folder}"]\n')
    model = tiny_checkpoint(folder / "model", "qwen2")
    words = (QUICK, f"model.path={model}", "train.run_dir=run", "--cluster", "cluster.toml")
    assert called(folder, "slurm", "submit", *words) == "0"
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["slurm", "render", QUICK, "--cluster", "cluster.toml"],
        ["slurm", "status", "run"],
        ["slurm", "hours", "run", "--json"],
        ["slurm", "cancel", "run"],
        ["plan", PLANNED, "--gpus", "8", "--gpu", "h100"],
    ],
    ids=lambda words: " ".join(words[:2]) if words[0] == "slurm" else words[0],
)
def test_a_command_of_the_login_node_imports_neither_torch_nor_megatron(words, here):
    assert called(here, *words) in ("0", "2")


def test_submit_knows_the_memory_of_every_family_without_torch(here):
    """...and so does it where a critic is trained as well."""
    made = [tiny_checkpoint(here / name, name) for name in ("qwen3_moe", "gemma")]
    for index, model in enumerate(made):
        words = (QUICK, f"model.path={model}", f"train.run_dir=run{index}", "algo.advantage=gae")
        asked = (*words, "--cluster", "cluster.toml", "--dry-run")
        assert called(here, "slurm", "submit", *asked) == "0"
