"""What a wheel carries, used from a folder that has nothing to do with the checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qurl_megatron.config import load
from qurl_megatron.kit.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Python files that goes into a wheel."""
    built = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(built)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    return built


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["show", "quickstart", "algo.cap=3.0"], "cap = 3.0"),
        (["show", "launch/recipes/calculator.toml"], "calculator.py"),
        (["study", "uaq_or_lr", "--out", "out", "--status"], "uaq-int8-seed-0"),
        (["plan", "grpo_qwen2.5_14b", "--gpus", "64"], "limited by"),
    ],
)
def test_recipes_and_shapes_are_found_from_any_folder(
    wheel: Path, tmp_path: Path, words: list[str], expected: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "qurl_megatron.cli", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_a_file_of_ones_own_goes_before_a_shipped_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart").write_text('[model]\npath = "m"\n[data]\npath = "d"\n')
    assert load("quickstart").model.path == "m"


def test_an_unknown_name_lists_the_recipes_that_ship() -> None:
    with pytest.raises(ConfigError, match=r"recipe fastrun does not exist.*quickstart"):
        load("fastrun")
