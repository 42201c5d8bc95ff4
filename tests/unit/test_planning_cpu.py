"""A plan for CPUs: what ranks that share cores have, and the command on this machine."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

from qurl_megatron.bench import decode
from qurl_megatron.bench.random_model import config_of
from qurl_megatron.bench.step.sizes import parse
from qurl_megatron.cli import main
from qurl_megatron.config import load
from qurl_megatron.planning import machine
from qurl_megatron.planning.command import workload
from qurl_megatron.planning.constants import (
    CPU_SAYS,
    GPUS,
    NATIVE,
    NATIVE_SAYS,
    ON_CPU,
    constants_of,
)
from qurl_megatron.planning.layouts import own_choice
from qurl_megatron.planning.machine import here
from qurl_megatron.planning.measured import Measured
from qurl_megatron.planning.own import Own, extrapolated
from qurl_megatron.planning.predict import Planner
from qurl_megatron.planning.rollout_time import decode_rank, engine_rank, linear_parameters
from qurl_megatron.planning.training_time import LAUNCH
from qurl_megatron.tensors.arch import read_arch
from qurl_megatron.training.footprint import find_models

QUICKSTART = Path(__file__).parents[2] / "launch" / "recipes" / "quickstart.toml"
KINDS = ("strong", "weak")
RESULTS = Path(__file__).parents[2] / "docs" / "results"
ALONE = {"read_gb_s": 20.0, "int8_gop_s": 80.0, "bf16_gflop_s": 45.0, "fp32_gflop_s": 40.0}
BOTH = {name: 2 * rate for name, rate in ALONE.items()}
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


@pytest.fixture
def shape(tmp_path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return path


def two_cores(**changes):
    return machine.cpu(ALONE, BOTH, "float32", cores=2, **changes)


def test_a_cpu_has_the_rates_that_were_measured():
    found = two_cores()
    assert found.flops["none"] == found.flops["fp8"] == 80e9 and found.flops["int8"] == 160e9
    assert found.hbm == 40e9
    assert machine.cpu(ALONE, BOTH, "bfloat16", cores=2).flops["none"] == 90e9


@pytest.mark.parametrize(
    ("ranks", "threads", "busy", "rate"),
    [
        (1, 0, 1.0, 80e9),  # a rank alone takes all cores
        (1, 1, 0.5, 40e9),  # or the one that it may
        (2, 1, 1.0, 40e9),
        (4, 1, 1.0, 20e9),  # four ranks take turns on two cores
        (3, 0, 1.0, 80e9 / 3),
        (1, 4, 1.0, 80e9),  # threads beyond the cores add none
    ],
)
def test_ranks_share_the_cores(ranks, threads, busy, rate):
    cpu = two_cores(threads=threads)
    assert cpu.busy(ranks) == pytest.approx(busy)
    assert cpu.of_rank(ranks).flops["none"] == pytest.approx(rate)


def test_threads_of_one_core_are_not_twice_as_fast():
    """Four cores that multiply at 40, 60, 80 and 100 GFLOP/s: the second one adds 20."""
    four = machine.cpu(ALONE, {**BOTH, "fp32_gflop_s": 100.0}, "float32", cores=4, threads=1)
    rates = [four.of_rank(ranks).flops["none"] / 1e9 for ranks in (1, 2, 4, 8)]
    assert rates == pytest.approx([40, 30, 25, 12.5])
    noisy = machine.cpu(ALONE, {**ALONE, "fp32_gflop_s": 30.0}, "float32", cores=2, threads=1)
    assert noisy.of_rank(2).flops["none"] == pytest.approx(20e9)  # together at least as one alone


def test_gpus_are_shared_by_nobody():
    h100 = GPUS["h100"]
    assert h100.of_rank(8) == h100 and h100.busy(8) == 0
    assert constants_of(h100, "int8") != constants_of(two_cores(), "int8") == ON_CPU


def test_a_native_step_has_constants_of_its_own_where_it_runs():
    """It wants codes, and FP32 beside them."""
    for dtype, scheme, expected in (
        ("float32", "int8", NATIVE),
        ("float32", "fp8", ON_CPU),
        ("float32", "none", ON_CPU),
        ("bfloat16", "int8", ON_CPU),
    ):
        cpu = machine.cpu(ALONE, BOTH, dtype, cores=2, native=True)
        assert constants_of(cpu, scheme) is expected
    assert NATIVE.gemm == ON_CPU.gemm  # the trainer's are the same


def test_without_units_for_fp8_an_engine_reads_and_multiplies_fp32_weights():
    """What is not quantized, keys and values too, stays in ``model.dtype``."""
    arch = read_arch(MODEL)
    bf16 = machine.cpu(ALONE, BOTH, "bfloat16", cores=2)
    assert bf16.flops["none"] == 90e9 and bf16.flops["fp8"] == 80e9
    assert bf16.of_rank(2).flops["fp8"] == 40e9
    fp32, codes = decode_rank(arch, "none", 1, 4), decode_rank(arch, "fp8", 1, 2)
    assert engine_rank(arch, "fp8", 1, 4, two_cores()) == replace(fp32, scheme="fp8")
    found = engine_rank(arch, "fp8", 1, 2, bf16)
    assert found == replace(codes, weights=found.weights)
    beside = decode_rank(arch, "none", 1, 2).weights - linear_parameters(arch) * 2
    assert found.weights == pytest.approx(linear_parameters(arch) * 4 + beside)
    assert engine_rank(arch, "fp8", 1, 2, GPUS["h100"]) == decode_rank(arch, "fp8", 1, 2)
    assert engine_rank(arch, "int8", 1, 4, two_cores()) == decode_rank(arch, "int8", 1, 4)


@pytest.mark.parametrize("says", [CPU_SAYS, NATIVE_SAYS])
def test_a_cpus_constant_names_its_source_whatever_stands_before_it_in_the_table(says):
    assert [name for name, (_, source) in says.items() if "likewise" in source] == []


def predicted(shape: Path, *settings: str, threads: int = 1):
    config = load(QUICKSTART, ["train.micro_batch=64", *settings])
    work = workload(config, ON_CPU, 3, 8)
    models = find_models(config, shape)
    planner = Planner(config, models, two_cores(threads=threads), ON_CPU, work, node=8)
    return planner.predict(own_choice(config), own=True)


def test_a_second_core_helps_the_side_that_uses_it_and_a_third_rank_finds_none(shape):
    one = predicted(shape, "parallel.tensor=1", "rollout.engines=1")
    two = predicted(shape, "parallel.tensor=1", "rollout.engines=1", "parallel.data=2")
    four = predicted(shape, "parallel.tensor=1", "rollout.engines=1", "parallel.data=4")
    assert one.training.seconds > 1.5 * two.training.seconds
    assert four.training.seconds > two.training.seconds
    assert four.training.parts[LAUNCH] >= two.training.parts[LAUNCH]  # half the passes, in turns
    assert one.rollout == two.rollout
    engines = predicted(shape, "parallel.tensor=1", "rollout.engines=2")
    assert one.rollout.seconds > engines.rollout.seconds
    assert one.training == engines.training


def test_what_is_generated_ahead_takes_cores_from_the_training(shape):
    turns, ahead = (predicted(shape, f"rollout.max_staleness={n}") for n in (0, 1))
    assert ahead.step == pytest.approx(turns.step)  # both sides keep both cores busy
    settings = ("parallel.tensor=1", "rollout.engines=1", "rollout.max_staleness=1")
    apart = predicted(shape, *settings)  # a core each
    longer = max(apart.rollout.seconds, apart.training.seconds)
    assert apart.step == pytest.approx(longer + apart.publish)
    free = replace(apart, rollout_cores=0.0, training_cores=0.0)
    assert free.step == apart.step


def test_torch_has_its_threads_again_where_measuring_the_machine_fails(monkeypatch):
    def fails(_: str) -> dict:
        raise MemoryError

    monkeypatch.setattr("qurl_megatron.planning.machine.measured_limits", fails)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    try:
        with pytest.raises(MemoryError):
            here("float32")
        assert torch.get_num_threads() == before + 2
    finally:
        torch.set_num_threads(before)


# -- beside what was measured ------------------------------------------------------------------


def recorded(name: str) -> list:
    """Cases of a record, each with the limits of its machine."""
    record = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    limits = record["environment"]["limits"]
    return [pytest.param(case, limits, id=case["name"]) for case in record["cases"]]


@pytest.mark.parametrize(
    ("case", "limits"), [*recorded("decode_cpu.json"), *recorded("decode_small_cpu.json")]
)
def test_decoding_is_planned_within_a_third_of_what_was_recorded(case, limits, monkeypatch):
    """The constants were fitted to these records: it tells if formula or table drift from them."""
    monkeypatch.setattr(decode, "limits", lambda device: limits)
    keys, (figure,) = case["keys"], case["figures"]
    arch = read_arch(MODEL if keys["model"].endswith("arithmetic") else config_of(keys["model"]))
    native = case["notes"]["decode step"] == "native"
    _, _, planned = decode.bounds(
        arch, keys["scheme"], keys["batch"], keys["context"], "cpu", one_call=native
    )
    assert 3 / 4 < planned / median(figure["repeats"]) < 4 / 3


def planned_for(case: dict, limits: dict, shape: Path):
    keys = case["keys"]
    sizes, weak = parse(keys.get("layout", "tp2+engines2")), keys.get("scaling") == "weak"
    half = {name: rate / 2 for name, rate in limits.items()}  # the record has those of both cores
    cpu = machine.cpu(half, limits, "float32", cores=2, threads=keys["threads"], native=True)
    settings = [keys["overrides"], *sizes.overrides(128 if weak else 64)]
    overrides = (f"model.path={shape.parent}", f"rollout.engine_threads={keys['threads']}")
    return Own(QUICKSTART, (*overrides, *settings), cpu, node=1, prompt=7, mean=3).predict()


@pytest.mark.parametrize(
    ("case", "limits"),
    [one for one in recorded("step_cpu.json") if one.values[0]["keys"].get("scaling") in KINDS],
)
def test_a_rollout_is_planned_within_a_third_of_what_was_recorded(case, limits, shape):
    (figure,) = (figure for figure in case["figures"] if figure["name"] == "rollout")
    planned = planned_for(case, limits, shape).rollout.seconds
    assert 3 / 4 < planned / median(figure["repeats"]) < 4 / 3


def call(capsys, *words) -> tuple[int, str, str]:
    code = main(["plan", *map(str, words)])
    seen = capsys.readouterr()
    return code, seen.out, seen.err


def test_the_command_plans_embedded_engines_on_this_cpu(shape, monkeypatch, capsys):
    monkeypatch.setattr("qurl_megatron.planning.machine.measured_limits", lambda _: BOTH)
    words = [QUICKSTART, "--gpu", "cpu", "--gpus", "4", "--config", shape, "--up-to", "0"]
    code, out, _ = call(capsys, *words)
    assert code == 0 and "4 x cpu" in out and "* TP2 + 2 x TP1" in out
    code, out, _ = call(capsys, *words, "--json")
    rows = {row["name"]: row for row in json.loads(out)["constants"]}
    assert "decode_cpu.json" in rows["decode_step"]["source"]
    assert rows["gemm"]["source"] != "measured"
    assert rows["cpu: HBM"]["source"].startswith("measured here")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "4"], "rollout.backend=embedded: set rollout.backend=sglang, or give"),
        (
            ["rollout.backend=sglang", "--gpus", "4", "--gpu", "cpu"],
            "set rollout.backend=embedded, or give",
        ),
    ],
)
def test_engines_of_another_kind_than_the_machine_are_refused(words, message, capsys):
    code, _, err = call(capsys, QUICKSTART, *words)
    assert code == 2 and message in err and len(err.splitlines()) == 1


# -- from what was measured --------------------------------------------------------------------


def own(shape: Path, *settings: str) -> Own:
    overrides = (f"model.path={shape.parent}", "train.micro_batch=64", *settings)
    return Own(QUICKSTART, overrides, two_cores(threads=1), node=8, prompt=8, mean=3)


def test_a_layout_is_planned_from_the_median_of_what_others_took(shape):
    """Rollouts twice as long as planned, training three times, publications four times; one of
    three runs was ten times as slow as that, and is passed over."""
    layouts = [own(shape, f"parallel.tensor={t}", "rollout.engines=1") for t in (1, 2)]
    layouts.append(own(shape, "parallel.tensor=1", "rollout.engines=2"))
    points = []
    for layout, slow in zip(layouts, (1.0, 10.0, 1.0), strict=True):
        plan = layout.predict()
        took = Measured(
            rollout=slow * 2 * plan.rollout.seconds,
            score=slow * 3 * plan.training.score,
            train=slow * 3 * plan.training.train,
            publish=slow * 4 * plan.publish,
            length=3.0,
        )
        points.append((layout, took))
    target = own(shape, "parallel.tensor=1", "parallel.data=2")
    before, after = target.predict(), extrapolated(target, points)
    assert after.rollout.seconds == pytest.approx(2 * before.rollout.seconds)
    assert after.training.seconds == pytest.approx(3 * before.training.seconds)
    assert after.publish == pytest.approx(4 * before.publish)


def test_cores_that_a_layout_keeps_are_those_of_its_longer_side_or_of_both(shape):
    assert own(shape, "parallel.tensor=1", "rollout.engines=1").busy == 1
    assert own(shape, "parallel.tensor=1", "rollout.engines=2").busy == 2
    ahead = ("parallel.tensor=1", "rollout.engines=1", "rollout.max_staleness=1")
    assert own(shape, *ahead).busy == 2
