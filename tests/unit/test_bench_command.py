import importlib
import json
import random

import pytest

from qurl_megatron import cli
from qurl_megatron.bench import command, machine_limits, quantize, random_model
from qurl_megatron.bench.options import BENCHMARKS, REMOVED
from qurl_megatron.bench.random_model import config_of
from qurl_megatron.bench.record import Case, Figure, read
from qurl_megatron.kit.errors import ConfigError

QUANTIZE = ["bench", "quantize", "--model", "tiny", "--dtype", "float32", "--device", "cpu"]


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """Its rates come from work that is over at once."""
    monkeypatch.setattr(machine_limits, "SIZE", 64)
    monkeypatch.setattr(machine_limits, "READ_MIB", 1)
    machine_limits.limits.cache_clear()
    yield
    machine_limits.limits.cache_clear()


def test_a_benchmark_leaves_its_record_and_shows_its_table(tmp_path, capsys):
    words = [*QUANTIZE, "--schemes", "int8,fp8", "--repeats", "2", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    record = read(tmp_path / "quantize.json")
    assert [case.name for case in record.cases] == [
        "float32 to int8, torch",
        "float32 to fp8, torch",
    ]
    figure = record.cases[0].figure("quantize")
    assert len(figure.repeats) == len(record.cases[0].yardsticks) == 2
    assert figure.limit > 0
    assert record.environment["limits"]["read_gb_s"] > 0
    said = capsys.readouterr().out
    assert "float32 to int8, torch" in said and said.endswith(f"{tmp_path}/quantize.json\n")


def test_too_few_repeats_against_an_older_record_are_no_verdict(tmp_path, capsys):
    words = [*QUANTIZE, "--schemes", "int8", "--repeats", "2"]
    assert cli.main([*words, "--out", str(tmp_path)]) == 0
    assert cli.main([*words, "--against", str(tmp_path / "quantize.json")]) == 3
    assert "no verdict" in capsys.readouterr().out


def planted(factor: float, seed: int):
    """A benchmark whose repeats take ``factor`` times as long, with 2 % of noise."""

    def run(options) -> list[Case]:
        draw = random.Random(seed)
        rates = [100 / factor * draw.lognormvariate(0, 0.02) for _ in range(10)]
        figure = Figure(name="decode", unit="tokens/s", better="higher", repeats=rates)
        return [Case(name="int8", keys={}, figures=[figure], yardsticks=[1.0] * 10)]

    return run


@pytest.mark.parametrize(("factor", "codes"), [(1.1, {1}), (1.0, {0, 3})])
def test_a_tenth_slower_leaves_with_exit_code_1_and_noise_never_does(
    factor, codes, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(quantize, "run", planted(1.0, seed=0))
    assert cli.main([*QUANTIZE, "--out", str(tmp_path)]) == 0
    for seed in range(1, 6):
        monkeypatch.setattr(quantize, "run", planted(factor, seed))
        assert cli.main([*QUANTIZE, "--against", str(tmp_path / "quantize.json")]) in codes
    told = "regression: 1 figure compared" in capsys.readouterr().out
    assert told == (codes == {1})


def test_no_limit_is_0_however_slow_the_machine_is(monkeypatch):
    monkeypatch.setattr(machine_limits, "fastest", lambda act, device: 100.0)
    found = machine_limits.limits()
    assert all(rate > 0 for rate in found.values())
    assert found["fp32_gflop_s"] == pytest.approx(2 * 64**3 / 1e11, rel=1e-3)


def test_a_wrong_record_is_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("measured"))
    (tmp_path / "old.json").write_text(json.dumps({"results": []}))
    assert cli.main([*QUANTIZE, "--against", str(tmp_path / "old.json")]) == 2
    assert "old.json has schema None" in capsys.readouterr().err


def test_a_benchmark_that_cannot_be_run_here_says_why_in_one_sentence(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # where there is no .venv-sglang
    assert cli.main(["bench", "publish", "--model", "tiny"]) == 2
    said = capsys.readouterr().err
    assert "make sglang" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_help_and_a_module_that_runs(name, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", name, "--help"])
    assert left.value.code == 0
    assert "--against FILE.json" in capsys.readouterr().out
    assert callable(importlib.import_module(f"qurl_megatron.bench.{name}").run)


@pytest.mark.parametrize(
    "words", ["scale --factor 1 --out x", "decode --batch 1 8", "versions RUN", "convert", "all"]
)
def test_a_benchmark_that_is_gone_says_what_to_do_instead(words, capsys):
    name = words.split()[0]
    assert cli.main(["bench", *words.split()]) == 2
    said = capsys.readouterr().err
    assert said == f"qurl: there is no qurl bench {name} any more; {REMOVED[name]}\n"


def test_a_record_that_cannot_be_written_does_not_cost_the_verdict(tmp_path, capsys):
    words = [*QUANTIZE, "--schemes", "int8", "--repeats", "1"]
    assert cli.main([*words, "--out", str(tmp_path)]) == 0
    old, out = tmp_path / "quantize.json", tmp_path / "quantize.json" / "below"
    assert cli.main([*words, "--against", str(old), "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert "\nno verdict: " in said.out and "--out" in said.err


def test_a_scheme_that_is_not_known_is_named(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([*QUANTIZE, "--schemes", "int8,int3"])
    assert left.value.code == 2 and "int3 is not among int8, fp8" in capsys.readouterr().err


def test_no_repeats_at_all_are_refused_by_the_options_name(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([*QUANTIZE, "--repeats", "0"])
    assert left.value.code == 2
    assert "--repeats: must be a whole number, 1 or more" in capsys.readouterr().err


def test_a_model_is_a_shape_a_folder_or_refused(tmp_path):
    assert config_of("7B")["tie_word_embeddings"] is False
    assert config_of("Qwen2.5-14B")["hidden_size"] == config_of("14B")["hidden_size"]
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    assert config_of(str(tmp_path)) == {"hidden_size": 3}
    with pytest.raises(ConfigError, match="--model 8B is neither a folder with a config.json nor"):
        config_of("8B")


def test_shapes_are_those_of_the_models_that_ship():
    for size, folder in (("7B", "Qwen2.5-Math-7B"), ("14B", "Qwen2.5-14B"), ("32B", "Qwen2.5-32B")):
        ours, theirs = config_of(size), config_of(folder)
        for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"):
            assert ours[key] == theirs[key], (size, key)
    assert set(random_model.UNTIED) < set(random_model.SIZES)
