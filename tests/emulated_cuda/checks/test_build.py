"""Building says in one sentence why it cannot; races can be told or left alone."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOM, emulated_environment
from emulated_cuda.build import CannotBuild, build, library

BUILD = str(ROOM / "emulated_cuda" / "build.py")


def run(*command: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def device():
    try:
        return build()
    except CannotBuild as error:
        pytest.skip(str(error))


def test_without_a_compiler_it_is_one_sentence_and_code_2(tmp_path):
    done = run(sys.executable, BUILD, PATH=str(tmp_path), EMULATED_CUDA_BUILD=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "the emulated CUDA device is compiled with g++, which is not installed"
    )


def test_other_sources_or_another_torch_need_another_binary(tmp_path, monkeypatch):
    now = library()
    monkeypatch.setattr("emulated_cuda.build.torch_version", lambda: "9.9.9+cpu")
    assert library().name != now.name
    monkeypatch.undo()
    shutil.copytree(ROOM / "csrc", tmp_path / "csrc")
    monkeypatch.setattr("emulated_cuda.build.SOURCES", tmp_path / "csrc")
    assert library().name == now.name
    with open(tmp_path / "csrc" / "device.h", "a") as file:
        file.write("// another line\n")
    assert library().name != now.name


def test_importing_torch_without_the_binary_says_what_to_run(tmp_path):
    environment = emulated_environment(EMULATED_CUDA_BUILD=str(tmp_path))
    done = run(sys.executable, "-c", "import torch", **environment)
    assert done.returncode == 1 and "is not built for this torch" in done.stderr
    assert BUILD in done.stderr


RACE = """
import torch
x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
with torch.cuda.stream(side):
    print(x.sum().item())
"""


@pytest.mark.parametrize(
    "mode, code, told", [("raise", 1, True), ("warn", 0, True), ("off", 0, False)]
)
def test_races_are_errors_warnings_or_nothing(device, mode, code, told):
    done = run(sys.executable, "-c", RACE, **emulated_environment(EMULATED_CUDA_RACES=mode))
    assert done.returncode == code, done.stderr
    assert ("emulated CUDA: race" in done.stderr) == told
