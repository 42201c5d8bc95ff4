import importlib

import pytest

from benchmarks.harness import read
from qurl_megatron import cli
from qurl_megatron.bench import step
from qurl_megatron.bench.command import BENCHMARKS
from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.rollout_engines import config_of


def test_a_benchmark_leaves_its_record_and_shows_its_table(tmp_path, capsys, monkeypatch):
    figure = Figure(name="step", unit="s", better="lower", repeats=[2.0, 3.0])
    cases = [Case(name="ahead", keys={"steps": 4}, figures=[figure])]
    monkeypatch.setattr(step, "run", lambda options: cases)
    assert cli.main(["bench", "step", "--out", str(tmp_path / "new")]) == 0
    record = read(tmp_path / "new/step.json")
    assert record.cases == cases and record.benchmark == "step"
    out = capsys.readouterr().out
    assert "ahead" in out and out.endswith(f"{tmp_path}/new/step.json\n")
    assert cli.main(["bench", "step", "--out", str(tmp_path / "new/step.json/below")]) == 2
    shown = capsys.readouterr()
    assert "ahead" in shown.out and "--out" in shown.err  # the table is not lost


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_help_and_a_module_that_runs(name, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", name, "--help"])
    assert left.value.code == 0 and "--repeats" in capsys.readouterr().out
    assert callable(importlib.import_module(f"qurl_megatron.bench.{name}").run)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--schemes", "int8", "int3"], "--schemes cannot be 'int3'; did you mean int8?"),
        (["--engine", "vllm"], "--engine cannot be 'vllm'; there are embedded, sglang"),
        (["--repeats", "0"], "--repeats: must be a whole number, 1 or more"),
    ],
)
def test_an_option_that_is_wrong_is_named(words, sentence, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", "rollout", *words])
    assert left.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rollout", "--model", "8B"], "--model 8B is neither a folder with a config.json nor a"),
        (["rollout", "--tensor", "2"], "--tensor 2 is not for --engine embedded"),
        (["rollout", "--model", "tiny", "--mean", "300"], "--mean 300 must be from 1 to --max 256"),
        (["step", "--steps", "2"], "--steps 2: the first 2 do not count; give more"),
        (["step", "--case", "parallel.data=3"], "must be a multiple of"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence_before_anything_runs(words, sentence, capsys):
    assert cli.main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1


def test_a_model_is_a_shape_a_folder_or_refused(tmp_path):
    assert config_of("Qwen2.5-32B")["tie_word_embeddings"] is False
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    assert config_of(str(tmp_path)) == {"hidden_size": 3}
