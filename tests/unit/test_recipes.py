"""Every recipe that ships loads, with the paper's variants, fits its GPUs, and is on the page."""

import re
from pathlib import Path

import pytest

from qurl_megatron.config import load, to_toml
from qurl_megatron.plan.footprint import GIB, Footprint, footprint
from qurl_megatron.training.shapes import find_models

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "launch" / "recipes").glob("*.toml"))
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")

# Recipes for GPUs, and the GiB of one.
ON_GPUS = {
    "gsm8k_ppo_qwen2.5_0.5b": 40,
    "dapo_qwen2.5_7b_math": 80,
    "deepscaler_1.5b_stage1": 80,
    "deepscaler_1.5b_stage2": 80,
    "deepscaler_1.5b_stage3": 80,
    "grpo_qwen2.5_14b": 80,
    "grpo_qwen2.5_32b": 80,
    "grpo_qwen2.5_32b_colocated": 80,
    "grpo_qwen3_14b": 80,
    "grpo_qwen3_32b": 80,
    "grpo_qwen3_30b_a3b": 80,
}

METHODS = {
    "RL": ["algo.objective=proximal", "quant.uaq_scale=1.0"],
    "naive": ["algo.objective=naive", "quant.uaq_scale=1.0"],
    "FlashRL": ["algo.objective=tis", "quant.uaq_scale=1.0"],
    "QuRL without UAQ": ["algo.objective=acr", "quant.uaq_scale=1.0"],
    "QuRL": ["algo.objective=acr", "quant.uaq_scale=1.5"],
}


def recipe(name: str, *overrides: str):
    return load(ROOT / "launch" / "recipes" / f"{name}.toml", overrides)


def rehearsed(name: str) -> Footprint:
    stage = re.match("deepscaler_1.5b_stage[23]", name)  # these begin with a run's checkpoint
    shape = ROOT / "launch" / "models" / "DeepSeek-R1-Distill-Qwen-1.5B" if stage else None
    config = recipe(name)
    return footprint(config, find_models(config, shape), gpu_gib=ON_GPUS[name])


def row(name: str) -> str:
    """The line of a recipe in the page's table of memory."""
    run = rehearsed(name)
    parallel, rollout, engine = run.config.parallel, run.config.rollout, run.engine
    sizes = f"{parallel.tensor} x {parallel.pipeline} x {parallel.data}"
    if parallel.expert > 1:
        sizes += f", context {parallel.context}, expert {parallel.expert}"
    cells = [
        f"`{name}`",
        sizes,
        f"{max(stage.at_rest for stage in run.stages) / GIB:.1f}",
        f"{max(stage.total for stage in run.stages) / GIB:.1f}",
        f"{run.fullest[2] / GIB:.1f}",
        f"{rollout.engines} x {rollout.engine_tensor}",
        f"{engine.room / GIB:.1f}",
        f"{engine.weights['int8'] / GIB:.1f}",
        f"{engine.tokens('int8') / 1000:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scheme", ["int8", "fp8", "none"])
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_with_the_papers_methods_and_formats(path, scheme, method, tmp_path):
    config = load(path, [*METHODS[method], f"quant.scheme={scheme}"])
    assert config.quant.scheme == scheme
    assert config.algo.objective == METHODS[method][0].partition("=")[2]
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    assert load(tmp_path / "resolved.toml") == config


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_recipe_fits_its_gpus(name):
    run = rehearsed(name)
    assert run.notes == []
    for stage in run.stages:
        for phase, rows in run.phases(stage).items():
            assert sum(rows.values()) < run.gpu, f"{phase}: {rows}"
    assert run.models.described_by.is_relative_to(ROOT / "launch" / "models")


def test_a_recipe_that_leaves_too_little_beside_its_engines_is_noted():
    engines = 'rollout.engine_args=["--mem-fraction-static=0.75"]'
    run = footprint(recipe("grpo_qwen2.5_14b", engines))
    assert any("in phase publish: lower --mem-fraction-static" in note for note in run.notes)


@pytest.mark.parametrize("name", ON_GPUS)
def test_the_page_tells_the_memory_that_the_dry_run_finds(name):
    assert row(name) in PAGE


def test_the_page_names_every_recipe():
    for path in RECIPES:
        stage = re.search(r"stage\d", path.stem)
        assert path.name in PAGE or stage and f"`{stage.group()}`" in PAGE, path.name


def test_the_papers_numbers():
    """Section 5.1."""
    gsm8k = recipe("gsm8k_ppo_qwen2.5_0.5b")
    assert gsm8k.algo.name == "ppo" and gsm8k.algo.advantage == "gae"
    assert gsm8k.train.steps == 15 * (7473 // 256) == 435
    assert (gsm8k.data.prompts_per_step, gsm8k.rollout.max_new_tokens) == (256, 512)
    assert (gsm8k.optimizer.lr, gsm8k.quant.uaq_scale) == (1e-5, 1.0)
    assert gsm8k.algo.dual_clip == 3.0  # verl's clip_ratio_c

    dapo = recipe("dapo_qwen2.5_7b_math")
    assert (dapo.data.prompts_per_step, dapo.rollout.samples_per_prompt) == (512, 16)
    assert (dapo.algo.clip_low, dapo.algo.clip_high, dapo.algo.kl_coef) == (0.2, 0.28, 0.0)
    assert dapo.algo.dynamic_sampling
    assert (dapo.optimizer.lr, dapo.quant.uaq_scale, dapo.train.steps) == (1e-6, 1.5, 200)

    stages = [recipe(f"deepscaler_1.5b_stage{n}") for n in (1, 2, 3)]
    assert [s.rollout.max_new_tokens for s in stages] == [8192, 16384, 24576]
    assert [s.rollout.samples_per_prompt for s in stages] == [8, 16, 16]
    assert [s.train.steps for s in stages] == [800, 400, 400]
    for stage in stages:
        assert (stage.data.prompts_per_step, stage.optimizer.lr) == (256, 1e-6)
        assert (stage.algo.kl_coef, stage.rollout.temperature) == (1e-3, 0.6)
        assert (stage.algo.entropy_coef, stage.algo.kl_max) == (1e-3, 10.0)  # the project's verl
        assert stage.algo.aggregation == "response_mean"  # Eq. 1 of the paper


def test_each_deepscaler_stage_begins_where_the_one_before_ends():
    for n in (1, 2):
        before = recipe(f"deepscaler_1.5b_stage{n}")
        last = f"{before.train.run_dir}/checkpoints/step_{before.train.steps:06d}"
        assert recipe(f"deepscaler_1.5b_stage{n + 1}").model.path == last


def test_two_minibatches_at_least_or_acr_would_be_tis():
    for path in RECIPES:
        assert load(path).algo.minibatches >= 2, path
