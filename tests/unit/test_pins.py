"""Trainer and engines get one torch and one NCCL; all places that name a release name the same."""

import re
from pathlib import Path

import pytest

from tests.contracts.wheels import RELEASES

ROOT = Path(__file__).parents[2]
PIN = re.compile(r'([a-z0-9-]+)(?:\[[^\]]*\])?==([0-9.]+)\s*(?:;\s*python_version (<|>=) "3.12")?$')
PYTHONS = ["<", ">="]  # than 3.12


def pins(file: str, python: str) -> dict[str, str]:
    found = {}
    for line in (ROOT / "requirements" / file).read_text().splitlines():
        match = PIN.match(line)
        if match and match[3] in (None, python):
            assert match[1] not in found, f"{file} pins {match[1]} twice"
            found[match[1]] = match[2]
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_trainer_and_engines_have_one_torch_and_one_nccl(python):
    trainer, engines = pins("gpu-trainer.txt", python), pins("gpu-sglang.txt", python)
    for package in ("torch", "nvidia-nccl-cu13"):
        assert trainer[package] == engines[package]


@pytest.mark.parametrize("python", PYTHONS)
def test_tests_run_on_the_megatron_that_gpus_train_with(python):
    tested, trainer = pins("cpu.txt", python), pins("gpu-trainer.txt", python)
    assert tested["megatron-core"] == trainer["megatron-core"]


def test_kernels_are_tested_by_the_triton_that_trainers_have():
    assert pins("triton.txt", "<") == {"triton": pins("gpu-trainer.txt", "<")["triton"]}


@pytest.mark.parametrize("python", PYTHONS)
def test_transformer_engine_comes_in_parts_of_one_release(python):
    trainer = pins("gpu-trainer.txt", python)
    parts = {v for name, v in trainer.items() if name.startswith("transformer-engine")}
    assert len(parts) == 1
    extra = f'transformer-engine[core-cu13,pytorch]=={parts.pop()}; python_version {python} "3.12"'
    assert extra in (ROOT / "setup.py").read_text()


@pytest.mark.parametrize("python", PYTHONS)
def test_contracts_are_read_of_what_is_installed(python):
    read = {(release.package, release.version) for release in RELEASES}
    installed = pins("gpu-trainer.txt", python) | pins("gpu-sglang.txt", python)
    for package in ("megatron-core", "transformer-engine", "sglang"):
        assert (package, installed[package]) in read


@pytest.mark.parametrize("python", PYTHONS)
def test_the_gpu_page_has_the_pinned_releases(python):
    page = (ROOT / "docs/gpu.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z0-9-]+) \| (.*?) \|", page, re.MULTILINE))
    for file in ("gpu-trainer.txt", "gpu-sglang.txt"):
        for package, version in pins(file, python).items():
            assert version in rows[package].split(", "), package
