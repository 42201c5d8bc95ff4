"""docs/python.md runs as it stands, and `import qurl_megatron` brings nothing heavy."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qurl_megatron as qurl
from qurl_megatron.config import load
from qurl_megatron.kit.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/python.md").read_text(encoding="utf-8")


def python(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_every_block_of_the_page_runs_one_after_the_other(tmp_path):
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (file,) = re.findall(r"```python file=losses.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "losses.py").write_text(file)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    looked = """
print(sorted(run.metrics)[:1], len(run.metrics["reward/mean"]), len(run.checkpoints))
from qurl_megatron.training.inputs import find_loss
print(find_loss("losses.py:tis_without_clipping").__name__, unfolded.keys() == folded.keys())
"""
    done = python("\n".join([*blocks, looked]), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    assert "step 2/2" in done.stdout and "unknown key algo.objectiv" in done.stdout
    assert done.stdout.splitlines()[-2] == "['acr/active_fraction'] 3 1"  # step 0, too
    assert done.stdout.splitlines()[-1] == "tis_without_clipping True"


def test_importing_the_package_imports_no_torch_and_help_lists_every_name():
    text = "import sys, qurl_megatron; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert python(text, ROOT).stdout == "False False\n"
    for name in qurl.__all__:
        assert getattr(qurl, name) is not None
        assert name == "__version__" or re.search(rf"\b{name}\b", qurl.__doc__)
    assert set(qurl.__all__) <= set(dir(qurl))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = qurl.trian


def test_a_run_that_cannot_begin_is_an_exception_with_its_sentence(tmp_path, capsys):
    config = load(ROOT / "launch/recipes/quickstart.toml", [f"train.run_dir={tmp_path / 'run'}"])
    recipe = tmp_path / "no_model.toml"
    recipe.write_text("[data]\ntask = 'chain_sum'\n[model]\npath = 'nowhere'\n")
    with pytest.raises(ConfigError, match="^model.path=nowhere does not exist"):
        qurl.train(load(recipe, ["warmstart.steps=0"]))
    assert "qurl: model.path=nowhere does not exist" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="holds no config.toml; name the folder of a run"):
        qurl.Run(config.train.run_dir)
