"""What an operator calls on a login node needs no more than requirements/login.txt."""

import contextlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from qurl_megatron.cluster import folder as records
from tests.support.descriptions import QWEN3_MOE
from tests.support.slurm_runs import QUICK
from tests.support.slurm_scripts import ROOT

ASK = """
import contextlib, io, json, sys
sys.modules |= dict.fromkeys(sys.argv[2:])  # modules that cannot be imported
from qurl_megatron.cli import main
codes = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        codes.append(main(words))
print(codes)
"""


def missing_modules() -> set[str]:
    """Return the modules of this environment that requirements/login.txt does not bring."""
    wanted = (ROOT / "requirements/login.txt").read_text().splitlines()
    brought = {"qurl-megatron"}
    while wanted:
        name = re.split(r"[^\w.-]", wanted.pop())[0].lower().replace("_", "-")
        if name and name not in brought:
            brought.add(name)
            with contextlib.suppress(metadata.PackageNotFoundError):  # for another platform
                others = metadata.requires(name) or ()
                wanted += [other for other in others if "extra ==" not in other]
    return {
        module
        for module, packages in metadata.packages_distributions().items()
        if not brought & {package.lower().replace("_", "-") for package in packages}
    }


def called(here: Path, *commands: list[object]) -> str:
    """Commands in a Python of their own that has a login node's packages: their exit codes."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{here}/bin{os.pathsep}/usr/bin:/bin"}
    words = [[*map(str, command)] for command in commands]
    command = [sys.executable, "-c", ASK, json.dumps(words), *missing_modules()]
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_login_node_needs_no_more_than_its_requirements(tmp_path):
    (tmp_path / "bin").mkdir()
    answers = {"sbatch": "echo 41", "squeue": "", "scancel": "", "scontrol": ""}
    for name, answer in answers.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "cluster.toml").write_text(f'[site]\nshared = ["{tmp_path}"]\n')

    def submit(family: str, *words: str) -> list[object]:
        """The command for a model that is looked at, and not read."""
        model = tmp_path / family
        model.mkdir()
        (model / "config.json").write_text(json.dumps(QWEN3_MOE | {"model_type": family}))
        (model / "model.safetensors").touch()
        given = [QUICK, f"model.path={model}", f"train.run_dir=run-{family}", *words]
        return ["slurm", "submit", *given, "--cluster", "cluster.toml"]

    # The memory of a critic and of experts is known; only these are dealt to ranks.
    asked = ("algo.advantage=gae", "parallel.expert=2", "--dry-run")
    families = [submit(family, *asked) for family in ("qwen3_moe", "qwen3")]
    assert called(tmp_path, submit("qwen2"), *families) == "[0, 0, 2]"

    run = tmp_path / "run-qwen2"
    attempt = records.open_attempt(run, job=41)
    log = records.attempt_folder(run, attempt.number) / "train-0.log"
    log.write_text("Traceback (most recent call last):\n")
    records.write_attempt(run, replace(attempt, code=1, decision="stop"))
    looks = [["slurm", action, run] for action in ("status", "logs", "cancel")]
    render = ["slurm", "render", QUICK, "--cluster", "cluster.toml"]
    assert called(tmp_path, render, *looks, ["show", QUICK]) == "[0, 0, 0, 0, 0]"
