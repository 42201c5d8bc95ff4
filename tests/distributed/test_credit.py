"""What needs a whole group, or the whole batch, is the same wherever its responses were dealt."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.config import (
    AlgoConfig,
    CorrectionConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from qurl_megatron.data.pack import pad_samples
from qurl_megatron.data.responses import Responses
from qurl_megatron.training.credit import attach_advantages, attach_correction, rejected_responses
from qurl_megatron.types import Prompt, Sample
from tests.support.ranks import run_on_ranks

REWARDS = [1.0, 0.0, 0.0, 1.0]  # two prompts, two responses each
LENGTHS = [1, 2, 1, 2]
DEALT = [[3, 0], [2, 1]]  # responses of the data ranks: groups are torn apart


def sample(index: int) -> Sample:
    n = LENGTHS[index]
    prompt = Prompt(index // 2, (5, 6), "", "")
    return Sample(prompt, (7,) * n, (-1.0,) * n, "stop", ((0, n),), reward=REWARDS[index])


WHOLE = Responses.of([sample(index) for index in range(4)])


def my_batch(device, rho: dict[int, float]):
    """This rank's responses; ``rho`` of each response's tokens is given."""
    mine = DEALT[dist.get_rank()]
    batch = pad_samples(WHOLE, mine, [1.0] * 2, length=8)
    log_rho = torch.tensor([math.log(rho[i]) for i in mine])[batch.owners]
    proximal = batch.behaviour + log_rho
    # The reference is less sure of each token by 0.5 nats: k1 = 0.5.
    return dataclasses.replace(batch, proximal=proximal, reference=proximal - 0.5).to(device)


def ranks(device):
    axis = SimpleNamespace(group=dist.group.WORLD, rank=dist.get_rank(), size=2)
    return SimpleNamespace(last_stage=True, device=device, data=axis)


def config(**algo) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="x"),
        data=DataConfig(task="chain_sum", prompts_per_step=2),
        rollout=RolloutConfig(samples_per_prompt=2, max_new_tokens=4),
        algo=AlgoConfig(minibatches=1, **algo),
        train=TrainConfig(micro_batch=2),
    )


def advantages(device, algo: dict, expected: dict[int, list[float]]) -> None:
    (batch,), _ = attach_advantages(
        ranks(device),
        [my_batch(device, dict.fromkeys(range(4), 1.0))],
        WHOLE.summary,
        config(**algo),
    )
    parts = batch.advantages.cpu().split(batch.lengths)
    for index, part in zip(batch.indices, parts, strict=True):
        torch.testing.assert_close(part, torch.tensor(expected[index]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "algo, expected",
    [
        # Rewards less 0.1 * 0.5 per token: 0.95, -0.1 | -0.05, 0.9; each minus the other one.
        (
            dict(advantage="rloo", kl_coef=0.1, kl_in="reward", kl_estimator="k1"),
            {0: [1.05], 1: [-1.05] * 2, 2: [-0.95], 3: [0.95] * 2},
        ),
        # Without a penalty each group is 1, 0: half apart from its mean.
        (dict(advantage="dr_grpo"), {0: [0.5], 1: [-0.5] * 2, 2: [-0.5], 3: [0.5] * 2}),
        # Still to come: 1 | 0, 0 | 0 | 1, 1. Mean 0.5, sample deviation sqrt(6 * 0.25 / 5).
        (
            dict(advantage="reinforce_pp"),
            {i: [(1 if REWARDS[i] else -1) * 0.5 / math.sqrt(0.3)] * LENGTHS[i] for i in range(4)},
        ),
    ],
    ids=["rloo with a penalty in the reward", "dr_grpo", "reinforce_pp"],
)
def test_advantages_by_hand_over_two_data_ranks(algo, expected, backend, tmp_path):
    run_on_ranks(advantages, 2, backend, tmp_path, algo, expected)


def correction(device) -> None:
    batch = my_batch(device, {0: 4.0, 1: 1.0, 2: 0.5, 3: 1e-6})
    (plain,), metrics = attach_correction(ranks(device), [batch], CorrectionConfig())
    assert plain.kept is None and metrics == {}
    criteria = CorrectionConfig(reject_high=3.0, veto=1e-4)
    (batch,), metrics = attach_correction(ranks(device), [batch], criteria)
    marks = (part.all().item() for part in batch.kept.split(batch.lengths))
    kept = dict(zip(batch.indices, marks, strict=True))
    assert kept == {i: i in (1, 2) for i in DEALT[dist.get_rank()]}  # 0 is too far up, 3 vetoed
    rejected = metrics["correction/rejected_responses"].value
    assert rejected == (1.0 if dist.get_rank() == 0 else 0.0)
    assert rejected_responses(ranks(device), [batch], 4) == [0, 3]  # on both
    assert rejected_responses(ranks(device), [plain], 4) == []


def test_far_responses_are_rejected_on_all_ranks(backend, tmp_path):
    run_on_ranks(correction, 2, backend, tmp_path)
