"""What a dry run says a rank holds is what a rank that is really built holds, to the byte."""

import json
from pathlib import Path

import pytest

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.config import (
    AlgoConfig,
    OptimizerConfig,
    RunConfig,
)
from qurl_megatron.data.responses import Responses
from qurl_megatron.plan.footprint import footprint
from tests.support.meta_ranks import small_recipe
from tests.support.models import random_samples, tiny_checkpoint
from tests.support.ranks import run_on_ranks


def what_is_held(model) -> dict[str, int]:
    """Counted over the tensors themselves, after a step."""
    inner = [
        one.optimizer for one in getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    ]
    buffers = model.model.buffers
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.gpt.parameters()}
    masters = [p for one in inner for group in one.param_groups for p in group["params"]]
    return {
        "parameters": sum(p.numel() for p in model.gpt.parameters()),
        "largest": max(p.numel() for p in model.gpt.parameters()),
        "weights": sum(storage.nbytes() for storage in weights.values()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "masters": sum(p.nbytes for p in masters if p.untyped_storage().data_ptr() not in weights),
        "moments": sum(
            state[name].nbytes
            for one in inner
            for state in one.state.values()
            for name in ("exp_avg", "exp_avg_sq")
        ),
    }


def train_once_and_count(device, config: RunConfig, folder: Path) -> None:
    from qurl_megatron.actor.critic import Critic
    from qurl_megatron.actor.policy import Policy
    from qurl_megatron.observe.metrics import Timer
    from qurl_megatron.training.step import improve

    with megatron_runtime(config.parallel) as ranks:
        policy = Policy.build(config.model, config.parallel, config.optimizer, ranks)
        critic = None
        if config.algo.advantage == "gae":
            critic = Critic.build(
                config.model, config.parallel, config.critic, config.optimizer, ranks
            )
        improve(
            policy, Responses.of(random_samples(16)), config, step=1, timer=Timer(), critic=critic
        )
        if ranks.tensor.rank == ranks.data.rank == ranks.context.rank == 0:
            found = {
                "policy": what_is_held(policy),
                "critic": what_is_held(critic) if critic else None,
            }
            (folder / f"stage-{ranks.pipeline.rank}.json").write_text(json.dumps(found))


CASES = {
    "FP32": dict(dtype="float32"),
    "whole optimizer on every rank": dict(optimizer=OptimizerConfig(distributed=False)),
    "DP2": dict(data=2),
    "CP2": dict(context=2),
    "TP2 x PP2": dict(tensor=2, pipeline=2),
    "TP2 x PP2, tied": dict(tensor=2, pipeline=2, tied=True),
    "PP2, tied, critic": dict(pipeline=2, tied=True, algo=AlgoConfig(advantage="gae")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_counts_what_a_real_run_holds(case, backend, tmp_path):
    options = dict(CASES[case])
    # 131 tokens do not divide over two ranks: padding counts as well.
    sizes = dict(vocab_size=131, tie_word_embeddings=options.pop("tied", False))
    config = small_recipe(tiny_checkpoint(tmp_path / "model", "qwen2", **sizes), **options)
    run_on_ranks(
        train_once_and_count, config.parallel.world_size, backend, tmp_path, config, tmp_path
    )
    stages = footprint(config).stages
    assert len(stages) == config.parallel.pipeline
    for index, stage in enumerate(stages):
        real = json.loads((tmp_path / f"stage-{index}.json").read_text())
        assert vars(stage.policy) == real["policy"]
        assert (stage.critic and vars(stage.critic)) == real["critic"]
