"""What an operator calls on a login node imports neither torch nor Megatron."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from qurl_megatron.cluster import folder as records
from tests.support.slurm_scripts import ROOT

QUICK = ROOT / "launch/recipes/quickstart.toml"
SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
}
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


def described(where: Path, family: str) -> Path:
    """A model that is looked at, and not read."""
    folder = where / family
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": family, **SIZES}))
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder with a cluster file, a model, a Slurm that takes everything, and a run."""
    folder = tmp_path_factory.mktemp("login")
    (folder / "bin").mkdir()
    answers = {"sbatch": "echo 41", "squeue": "", "scancel": "", "scontrol": ""}
    for name, answer in answers.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{answer}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "cluster.toml").write_text(f'[site]\nshared = ["{folder}"]\n')
    words = [QUICK, f"model.path={described(folder, 'qwen2')}", "train.run_dir=run"]
    assert called(folder, "slurm", "submit", *words, "--cluster", "cluster.toml") == "0"
    run = folder / "run"
    attempt = records.open_attempt(run, job=41)
    log = records.attempt_folder(run, attempt.number) / "train-0.log"
    log.write_text("Traceback (most recent call last):\n")
    records.write_attempt(run, replace(attempt, code=1, decision="stop"))
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["slurm", "render", QUICK, "--cluster", "cluster.toml"],
        ["slurm", "status", "run"],
        ["slurm", "logs", "run"],
        ["slurm", "cancel", "run"],
        ["show", QUICK],
    ],
    ids=lambda words: " ".join(map(str, words[:2])),
)
def test_a_command_of_the_login_node_imports_neither_torch_nor_megatron(words, here):
    assert called(here, *words) == "0"


@pytest.mark.parametrize(("family", "code"), [("qwen3", "0"), ("qwen3_moe", "2"), ("gemma", "2")])
def test_submit_knows_the_memory_of_a_critic_and_what_no_engine_serves_without_torch(
    family, code, here
):
    model = described(here, family)
    words = (QUICK, f"model.path={model}", f"train.run_dir={family}", "algo.advantage=gae")
    asked = (*words, "--cluster", "cluster.toml", "--dry-run")
    assert called(here, "slurm", "submit", *asked) == code
