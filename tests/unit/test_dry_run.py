"""The arithmetic of a dry run, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from qurl_megatron.algo.log_probs import SCRATCH_BYTES
from qurl_megatron.checkpoints.ops import parameter_count
from qurl_megatron.cli import main
from qurl_megatron.config import load
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.plan import memory
from qurl_megatron.plan.footprint import footprint, render
from qurl_megatron.plan.memory import GIB, Pass
from qurl_megatron.schemes import SERVED
from qurl_megatron.tensors.arch import Experts, read_arch
from qurl_megatron.training import start
from qurl_megatron.training.shapes import check_division, engine_divides, find_models
from qurl_megatron.training.warmstart import warmstart
from tests.support.descriptions import QWEN2, QWEN3_MOE
from tests.support.meta_ranks import built

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "launch" / "models"

ARCH = read_arch(QWEN2 | {"num_hidden_layers": 4, "vocab_size": 100})


def recipe(tmp_path, *overrides, text=""):
    path = tmp_path / "recipe.toml"
    path.write_text('[model]\npath = "models/Qwen2.5-14B"\n[data]\npath = "x.jsonl"\n' + text)
    return load(path, overrides)


def test_a_layer_keeps_the_terms_of_korthikanti():
    """Per token and layer: 2 bytes x (4 x 64 for the inputs of two norms and two linear layers,
    2 x 64 queries and outputs, 2 x 32 keys and values, 3 x 96 in the MLP) + 4 bytes x 4 heads."""
    alone = Pass(tokens=10, tensor=1, itemsize=2, transposed=False)
    assert memory.layer_activations(ARCH, alone) == 10 * (2 * (256 + 128 + 64 + 288) + 16)
    halves = Pass(tokens=10, tensor=2, itemsize=2, transposed=False)
    assert memory.layer_activations(ARCH, halves) == 10 * (2 * (128 + 64 + 32 + 144) + 8)
    # Recomputation keeps the input of every layer.
    assert memory.stage_activations(ARCH, 4, halves, recompute=True) == 4 * 10 * 2 * 64 // 2


def test_logits_are_there_twice_for_several_rows_and_in_fp32_have_a_gradient_in_bf16_beside():
    one = Pass(tokens=10, tensor=2, itemsize=2, transposed=False)
    scratch = 2 * 4 * 10 * 50
    assert memory.logits(ARCH, one) == 10 * 50 * 2 + scratch
    assert memory.logits(ARCH, replace(one, transposed=True)) == 2 * 10 * 50 * 2 + scratch
    wide, hidden = replace(one, fp32_output=True), 2 * 10 * 64
    assert memory.logits(ARCH, wide) == (4 + 2) * 10 * 50 + hidden + scratch
    assert memory.logits(ARCH, replace(wide, transposed=True)) == 8 * 10 * 50 + hidden + scratch


def test_an_engine_rank_holds_codes_scales_and_what_is_not_quantized():
    # Rows and columns of the linear layers: q, k, v, o, gate, up, down.
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96)]
    codes = 4 * sum(rows * columns + 4 * rows for rows, columns in shapes)
    rest = 2 * (2 * 100 * 64 + 4 * (2 * 64 + 128) + 64)  # vocabulary twice, norms, biases of q/k/v
    assert memory.engine_weights(ARCH, "int8", 1, 2) == codes + rest
    squares = 4 * (sum(rows * columns for rows, columns in shapes) + 4 * len(shapes))
    assert memory.engine_weights(ARCH, "fp8_block", 1, 2) == squares + rest
    assert memory.engine_weights(ARCH, "none", 1, 2) == 2 * parameter_count(ARCH)
    # Four ranks share two key/value heads: each has half of k and v, a quarter of all else but the
    # norms; the scales of o and down, which are split along their input, are whole.
    quarter = 4 * (
        (64 * 64 + 4 * 64 + 2 * (96 * 64 + 4 * 96)) / 4
        + 2 * (32 * 64 + 4 * 32) / 2
        + (64 * 64 + 64 * 96) / 4
        + 2 * 4 * 64
    )
    rest = 2 * (2 * 100 * 64 / 4 + 4 * (2 * 64 + 64 / 4 + 2 * 32 / 2) + 64)
    assert memory.engine_weights(ARCH, "int8", 4, 2) == quarter + rest


@pytest.mark.parametrize(
    "setting, message",
    [
        ("parallel.tensor=2", r"gate_proj.weight: rows \[0, 192\) .* smaller parallel.tensor"),
        ("rollout.engine_tensor=2", r"gate_proj.weight: rows \[0, 192\) .* rollout.engine_tensor"),
    ],
)
def test_layouts_that_would_cut_a_square_that_shares_a_scale_are_refused(setting, message):
    arch = replace(ARCH, hidden=512, heads=4, kv_heads=2, head_dim=128, intermediate=384)
    settings = ["rollout.backend=sglang", "quant.scheme=fp8_block"]
    config = load("launch/recipes/quickstart.toml", [*settings, "parallel.tensor=1", setting])
    with pytest.raises(ConfigError, match=message):
        check_division(config, arch)
    check_division(config, replace(arch, intermediate=512))
    check_division(replace(config, quant=replace(config.quant, scheme="fp8")), arch)
    alone = load("launch/recipes/quickstart.toml", [*settings, "parallel.tensor=1"])
    with pytest.raises(ConfigError, match=r"SGLang fuses .*k_proj.weight .* 64 rows"):
        check_division(alone, replace(arch, kv_heads=1, head_dim=64, heads=8))


def test_experts_may_be_dealt_whole_to_an_engines_gpus_but_for_the_shared_one():
    experts = Experts(count=4, top_k=2, intermediate=6, norm_topk_prob=True, shared=12)
    arch = replace(ARCH, heads=8, kv_heads=8, experts=experts)
    assert [n for n in (1, 2, 4, 8) if engine_divides(arch, n)] == [1, 2]
    dealt = [n for n in (1, 2, 4, 8) if engine_divides(arch, n, whole_experts=True)]
    assert dealt == [1, 2, 4]


def test_keys_and_values_are_split_over_an_engines_ranks_until_one_head_is_left():
    assert memory.cached_token(ARCH, 1, 2) == 2 * 4 * 2 * 16 * 2
    assert memory.cached_token(ARCH, 2, 2) == memory.cached_token(ARCH, 4, 2) == 2 * 4 * 16 * 2


def test_the_stages_of_a_pipeline_hold_the_model_once(tmp_path):
    run = footprint(recipe(tmp_path, "parallel.pipeline=4"))
    assert sum(stage.policy.parameters for stage in run.stages) == parameter_count(
        run.models.policy
    )
    assert [stage.layers for stage in run.stages] == [12] * 4
    # 1F1B: the first stage keeps the activations of four passes, the last those of one.
    assert [stage.passes for stage in run.stages] == [4, 3, 2, 1]
    assert [stage.logits > 0 for stage in run.stages] == [False, False, False, True]
    # Or those of as many passes as an update has: 2 x 8 / 2 / 4.
    few = ["data.prompts_per_step=2", "train.micro_batch=4", "algo.minibatches=2"]
    run = footprint(recipe(tmp_path, "parallel.pipeline=4", *few))
    assert [stage.passes for stage in run.stages] == [2, 2, 2, 1]
    # Context ranks share the tokens of a pass.
    parts = footprint(recipe(tmp_path, "train.max_tokens=8192", "parallel.context=2"))
    assert parts.tokens == 4096


def test_a_reference_is_one_more_copy_of_the_weights_unless_it_waits_on_the_host(tmp_path):
    on_device = footprint(recipe(tmp_path, "parallel.tensor=8", "algo.kl_coef=0.1")).stages[0]
    assert on_device.reference == 2 * on_device.policy.parameters
    waits = ["algo.kl_coef=0.1", "algo.reference_memory=host"]
    assert footprint(recipe(tmp_path, "parallel.tensor=8", *waits)).stages[0].reference == 0


def test_engines_on_the_trainers_gpus_get_what_it_leaves(tmp_path):
    text = '[rollout]\nbackend = "sglang"\nengine_args = ["--mem-fraction-static=0.5"]\n'
    alone = footprint(recipe(tmp_path, "parallel.tensor=8", text=text))
    own = memory.DRIVER + memory.CONTEXT + memory.NCCL
    assert alone.engine.room == (80 * GIB - own) // 2
    shared = footprint(recipe(tmp_path, "parallel.tensor=8", "rollout.colocate=true", text=text))
    trainer = shared.stages[0].at_rest * (1 + memory.GAPS) + memory.CONTEXT + memory.NCCL
    assert shared.engine.room == pytest.approx((80 * GIB - own - trainer) / 2, abs=1)
    per_token = 2 * 48 * 8 * 128 * 2
    room = alone.engine.room - 2 * parameter_count(alone.models.policy)
    assert alone.engine.tokens("none") == room // per_token


def test_the_phases_of_a_run_add_up():
    """Hand-worked, in units of a GiB."""
    G = GIB
    alone = memory.phases(20 * G, 24 * G, 2 * G, 10 * G)
    trainer = memory.DRIVER + memory.CONTEXT + memory.NCCL
    sums = {name: sum(rows.values()) for name, rows in alone.items()}
    assert sums == {
        "resume": trainer + round(30 * 1.05 * G),
        "train": trainer + round(24 * 1.05 * G),
        "publish": trainer + round(22 * 1.05 * G),
        "save": trainer + round(22 * 1.05 * G),
    }
    beside = memory.phases(20 * G, 24 * G, 2 * G, 10 * G, engine=30 * G, mapped_by=7)
    more = {name: sum(rows.values()) - sums[name] for name, rows in beside.items()}
    asleep = memory.CONTEXT + memory.NCCL + memory.ENGINE_RUNTIME + 7 * memory.CONTEXT
    awake = asleep + 30 * G
    # Nobody is there yet when a trainer resumes, and engines sleep while it trains.
    assert more == {"resume": 0, "train": asleep, "publish": awake, "save": awake}


@pytest.mark.parametrize(
    ("overrides", "mapping"),
    [
        (["rollout.backend=sglang", "rollout.engines=4", "rollout.engine_tensor=2"], 8),
        (["rollout.backend=sglang", "rollout.engines=8", "rollout.colocate=true"], 7),
        (["rollout.backend=sglang", "rollout.engines=8", "sync.transport=files"], 0),
        (["rollout.backend=sglang", "rollout.engines=8", "sync.dir=/shared"], 0),
        (["rollout.backend=sglang", "rollout.engines=8", "rollout.rendezvous=somewhere"], 0),
        (["rollout.engines=8"], 0),  # embedded, on the CPU
    ],
)
def test_engines_that_map_memory_have_a_context_on_every_trainers_gpu(overrides, mapping, tmp_path):
    run = footprint(recipe(tmp_path, "parallel.tensor=8", *overrides))
    rows = run.phases(run.stages[0])["publish"]
    assert rows.get("other engines' contexts", 0) == mapping * memory.CONTEXT


def test_what_does_not_fit_is_said(tmp_path):
    run = footprint(recipe(tmp_path, "parallel.tensor=4"), gpu_gib=48)
    assert "do not fit" in render(run)
    assert "do not fit" not in render(footprint(recipe(tmp_path, "parallel.tensor=4"), gpu_gib=110))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.tensor=16"], "parallel.tensor=16 does not divide the model's num_attention"),
        (["parallel.pipeline=5"], "parallel.pipeline=5 does not divide the model's num_hidden"),
        (
            ["rollout.backend=sglang", "rollout.engine_tensor=3"],
            "rollout.engine_tensor=3 does not divide the model's num_attention_heads=40",
        ),
        (["model.path=models/Unknown"], "model.path=models/Unknown does not exist"),
    ],
)
def test_a_recipe_that_cannot_be_cut_is_refused(overrides, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        footprint(recipe(tmp_path, *overrides))


def test_the_command_prints_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    recipe(tmp_path)
    shape = tmp_path / "config.json"
    shape.write_text((SHAPES / "Qwen2.5-0.5B-Instruct" / "config.json").read_text())
    command = ["show", str(tmp_path / "recipe.toml"), "parallel.pipeline=2", "--dry-run"]
    assert main([*command, "--config", str(shape)]) == 2  # for the data alone
    out, error = capsys.readouterr()
    assert "qwen2, 0.49 B parameters, 24 layers" in out
    # Tied, in two stages: 136.1 M in the vocabulary, on both; 14.9 M in each of 12 layers.
    assert re.search(r"parameters, millions +315 +315\n", out)
    assert error.startswith("qurl: data.path=x.jsonl does not exist") and error.count("\n") == 1
    assert error.endswith(f"so that is {Path.cwd() / 'x.jsonl'}\n")
    assert main([*command, "--config", str(tmp_path / "nowhere")]) == 2
    assert "--config" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    Path("x.jsonl").write_text('{"text": "1 + 1", "answer": "2"}\n')
    assert main([*command, "--config", str(shape)]) == 2
    assert "x.jsonl line 1 has no prompt or problem or question" in capsys.readouterr().err


def test_all_mistakes_are_told_at_once_and_before_the_table(tmp_path):
    recipe(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    (tmp_path / "tokenizer.json").touch()
    mistaken = ["rollout.backend=sglang", "rollout.sglang_python=no", "reward.function=no.py:near"]
    mistaken.append("rollout.max_new_tokens=9999")
    given = ["show", str(tmp_path / "recipe.toml"), f"model.path={tmp_path}", *mistaken]
    both = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "qurl_megatron.cli", *given, "--dry-run"]
    done = subprocess.run(
        command, env=both, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 2
    assert [line.split(" ")[1].partition("=")[0] for line in lines[:4]] == [
        "rollout.max_new_tokens", "rollout.sglang_python", "reward.function", "data.path",
    ]  # fmt: skip
    assert "qwen3_moe, 0." in lines[4]


@pytest.mark.crossed
@pytest.mark.parametrize("command", [["train"], ["show", "--dry-run"]], ids=lambda c: c[0])
@pytest.mark.parametrize(
    ("change", "layout", "said"),
    [
        ({}, ["expert=2"], "parallel.expert=2 must divide the ranks of a pipeline stage, parallel"),
        ({}, ["expert=2", "tensor=4"], "must be 1, or a multiple of parallel.tensor=4"),
        ({}, ["expert=16", "data=16"], "num_experts=8; use one of [1, 2, 4, 8]"),
        ({"model_type": "qwen3"}, ["expert=2", "data=2"], "the model has none; set it to 1"),
        (
            {"model_type": "qwen3"},
            ["tensor=1", "model.router_aux_loss=model"],
            "balances experts, and a qwen3 model has none",
        ),
        ({"moe_intermediate_size": 33}, ["tensor=2"], "moe_intermediate_size=33; use one of [1]"),
        (
            {"moe_intermediate_size": 33},
            ["tensor=2", "expert=2"],
            "rollout.engine_tensor=4 does not divide the model's num_attention_heads=4 and "
            "num_key_value_heads=2, or its moe_intermediate_size=33; use one of [1]",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_layout_that_experts_forbid_is_one_sentence(
    command, change, layout, said, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    engines = 'backend = "sglang"\nengine_tensor = 4\nengine_first_gpu = 16\n'
    recipe(tmp_path, text=f"prompts_per_step = 32\n[rollout]\nmax_new_tokens = 8\n{engines}")
    monkeypatch.setattr(start, "refuse_not_installed", lambda config: None)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE | change))
    (tmp_path / "x.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    given = [
        f"model.path={tmp_path}",
        "train.run_dir=run",
        *(key if "." in key else f"parallel.{key}" for key in layout),
    ]
    assert main([*command, "recipe.toml", *given]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_show_takes_the_folder_of_a_run(tmp_path, capsys):
    quick = str(ROOT / "launch/recipes/quickstart.toml")
    assert main(["show", quick, "optimizer.lr=3e-4"]) == 0
    resolved = capsys.readouterr().out
    assert main(["show", str(tmp_path)]) == 2
    assert "holds no config.toml; name a recipe, or the folder of a run" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text(resolved)
    assert main(["show", str(tmp_path)]) == 0
    assert capsys.readouterr().out == resolved


def test_a_model_that_a_warm_start_would_make_has_its_shape(tmp_path):
    given = [f"model.path={tmp_path}/model", "warmstart.steps=1", "data.task_size=200"]
    config = load(ROOT / "launch/recipes/quickstart.toml", given)
    before = render(footprint(config))
    assert "1.64 M parameters" in before and "model/config.json, to be made\n" in before
    warmstart(tmp_path / "model", config.data, config.warmstart, lambda line: None)
    assert render(footprint(config)) == before.replace(", to be made", "")


BUILT = {
    "TP2 x PP2, tied": ("Qwen2.5-0.5B-Instruct", ["parallel.tensor=2", "parallel.pipeline=2"]),
    "CP3 x DP8": ("Qwen2.5-0.5B-Instruct", ["parallel.context=3", "parallel.data=8"]),
    "critic, PP2": (
        "Qwen2.5-0.5B-Instruct",
        ["algo.name=ppo", "parallel.pipeline=2", "parallel.data=3"],
    ),
    "FP32": ("Qwen2.5-0.5B-Instruct", ["model.dtype=float32", "parallel.data=2"]),
    "14B, PP4 x DP64": ("Qwen2.5-14B", ["parallel.pipeline=4", "parallel.data=64"]),
    "30B-A3B, EP8 x DP16": ("Qwen3-30B-A3B", ["parallel.expert=8", "parallel.data=16"]),
}


def assert_as_built(config, shape=None, *, padding: float) -> None:
    """Padding of Megatron's buffers, of parameters and buckets, is what shapes leave out."""
    models = find_models(config, shape)
    for stage, real in zip(footprint(config, models).stages, built(config, models), strict=True):
        for told, counted in zip((stage.policy, stage.critic), real, strict=True):
            if counted is None:
                assert told is None
                continue
            assert (told.parameters, told.largest) == (counted.parameters, counted.largest)
            assert vars(told) == pytest.approx(vars(counted), rel=padding)


@pytest.mark.parametrize("case", BUILT)
def test_memory_from_shapes_is_that_of_built_models(case, tmp_path):
    model, overrides = BUILT[case]
    given = [f"model.path=models/{model}", "data.prompts_per_step=768", *overrides]
    config = recipe(tmp_path, *given, text="[train]\nmicro_batch = 2\n")
    assert_as_built(config, padding=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(tensor=2, data=2, pipeline=2),
        dict(expert=2, data=2),
        dict(expert=4, tensor=2, data=4, pipeline=2),
        dict(expert=2, tensor=2, context=2, data=2),
        dict(expert=8, data=8),
    ],
    ids=lambda sizes: " ".join(f"{key}={size}" for key, size in sizes.items()),
)
def test_so_is_that_of_experts(sizes, tmp_path):
    shape = tmp_path / "config.json"
    wider = {"hidden_size": 256, "moe_intermediate_size": 128, "vocab_size": 101}
    shape.write_text(json.dumps(QWEN3_MOE | wider))
    layout = [f"parallel.{key}={size}" for key, size in sizes.items()]
    assert_as_built(recipe(tmp_path, *layout), shape, padding=1e-3)


def test_what_megatron_does_not_compute_is_refused_from_shapes_alone(tmp_path):
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=2.0, high_freq_factor=4.0)
    scaling["original_max_position_embeddings"] = 8192
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(QWEN3_MOE | {"model_type": "llama", "rope_scaling": scaling}))
    config = recipe(tmp_path)
    with pytest.raises(ConfigError, match="Megatron computes"):
        footprint(config, find_models(config, shape))


def test_the_room_for_log_probs_is_what_they_are_worked_out_in():
    assert SCRATCH_BYTES["cuda"] == memory.SCRATCH


def test_a_format_that_cuts_its_squares_on_the_engines_is_not_listed():
    for name, missing in (("grpo_qwen3_30b_a3b", {"fp8_block"}), ("grpo_qwen3_32b", set())):
        run = footprint(load(f"launch/recipes/{name}.toml", []))
        assert set(run.engine.weights) == set(SERVED) - missing
