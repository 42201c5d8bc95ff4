"""Whole updates of every algorithm, with every correction, do not depend on the layout."""

import dataclasses
from pathlib import Path

import pytest
import torch

from qurl_megatron.actor.megatron import everywhere, megatron_runtime
from qurl_megatron.config import ALGORITHMS, CorrectionConfig, CriticConfig, RunConfig
from qurl_megatron.data.responses import Responses
from tests.support.models import random_samples, tiny_checkpoint
from tests.support.policies import build, recipe, relative, whole
from tests.support.ranks import run_on_ranks

# Arithmetic on few numbers, and much of it.
pytestmark = pytest.mark.thorough("nccl")

CORRECTIONS = {
    "rejection": dict(reject_low=0.2, reject_high=8.0, veto=1e-4),
    "geometric": dict(level="geometric"),
    "sequence": dict(level="sequence"),
}


def variants(folder: Path, parallel: dict) -> dict[str, RunConfig]:
    """A recipe for every preset, then GRPO with every correction."""
    made = {}
    for name, preset in ALGORITHMS.items():
        keys = {k.removeprefix("algo."): v for k, v in preset.items() if "algo." in k}
        made[name] = recipe(folder, parallel, name=name, kl_coef=0.05, **keys)
    for name, keys in CORRECTIONS.items():
        plain = recipe(folder, parallel)
        made[name] = dataclasses.replace(plain, correction=CorrectionConfig(**keys))
    made["icepop, masked, dual clip"] = recipe(
        folder, parallel, objective="icepop", mask_truncated=True, dual_clip=3.0, entropy_coef=0.01
    )
    return {
        name: dataclasses.replace(config, critic=CriticConfig(lr=1e-3))
        for name, config in made.items()
    }


def train_all(device, folder: Path, parallel: dict, out: Path) -> None:
    """Weights and metrics after two steps of each."""
    from qurl_megatron.actor.critic import Critic
    from qurl_megatron.actor.policy import Reference
    from qurl_megatron.observe.metrics import Timer, merge, values
    from qurl_megatron.training.step import improve

    samples = random_samples(8)
    samples[3] = dataclasses.replace(samples[3], finish_reason="length")
    responses = Responses.of(samples)
    done = {}
    configs = variants(folder, parallel)
    with megatron_runtime(next(iter(configs.values())).parallel) as ranks:
        for name, config in configs.items():
            policy = build(config, ranks, reference=Reference() if config.algo.kl_coef else None)
            critic = None
            if config.algo.advantage == "gae":
                critic = Critic.build(config.model, config.parallel, config.critic_optimizer, ranks)
            for step in (1, 2):
                metrics, _ = improve(
                    policy, responses, config, step=step, timer=Timer(), critic=critic
                )
            seen = values(merge(everywhere(metrics)))
            done[name] = {"weights": whole(policy), "metrics": seen}
        if ranks.leads:
            torch.save(done, out)


@pytest.fixture(scope="module")
def alone(backend, tmp_path_factory) -> tuple[Path, dict]:
    """The model, and what one process makes of it."""
    tmp_path = tmp_path_factory.mktemp("alone")
    folder = tiny_checkpoint(tmp_path / "model", "qwen2")
    run_on_ranks(train_all, 1, backend, tmp_path, folder, {}, tmp_path / "out.pt")
    return folder, torch.load(tmp_path / "out.pt", weights_only=True)


def test_algorithms_differ(alone):
    norms = {done["metrics"]["optimizer/grad_norm"] for done in alone[1].values()}
    assert len(norms) == len(alone[1])


@pytest.mark.parametrize("layout", [dict(tensor=2, data=2), dict(pipeline=2, context=2)], ids=str)
def test_every_algorithm_trains_alike_in_every_layout(layout, alone, backend, tmp_path):
    folder, expected = alone
    run_on_ranks(train_all, 4, backend, tmp_path, folder, layout, tmp_path / "out.pt")
    split = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, done in expected.items():
        actual = split[name]
        for tensor, value in done["weights"].items():
            assert relative(actual["weights"][tensor], value) < 1e-4, (name, tensor)
        assert actual["metrics"].keys() == done["metrics"].keys(), name
        for metric, value in done["metrics"].items():
            if not metric.startswith(("time/", "train/passes")):
                close = pytest.approx(value, rel=5e-3, abs=1e-5)
                assert actual["metrics"][metric] == close, (name, metric)
