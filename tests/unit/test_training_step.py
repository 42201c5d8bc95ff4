"""Which tokens the loss averages over, and who gets which responses."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from qurl_megatron.config import (
    AlgoConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from qurl_megatron.data.responses import Responses
from qurl_megatron.training.layout import averaged_without, counted_tokens, lay_out
from qurl_megatron.types import Prompt, Sample


def sample(length: int, reward: float, finish: str = "stop") -> Sample:
    ids, log_probs = (1,) * length, (-1.0,) * length
    return Sample(Prompt(0, (1,), "", ""), ids, log_probs, finish, ((1, length),), reward=reward)


SAMPLES = Responses.of([sample(3, 1.0), sample(5, 0.0, "length"), sample(2, 1.0), sample(4, 1.0)])
SUMMARY = SAMPLES.summary
PLAIN = RunConfig(
    model=ModelConfig(path="x"),
    data=DataConfig(task="sort_digits", prompts_per_step=16),
    rollout=RolloutConfig(samples_per_prompt=2),
)


@pytest.mark.parametrize(
    ("algo", "counted"),
    [
        ({}, [3, 5, 2, 4]),
        ({"mask_truncated": True}, [3, 0, 2, 4]),
        ({"dynamic_sampling": True}, [3, 5, 0, 0]),  # groups that only fill up the batch
    ],
)
def test_all_tokens_count_unless_something_leaves_them_out(algo, counted):
    assert counted_tokens(SUMMARY, replace(PLAIN, algo=AlgoConfig(**algo))) == counted


def weights_without(rejected: list[int], **algo) -> dict[int, float]:
    """Weight of a token of each response, all in one minibatch."""
    one = SimpleNamespace(rank=0, size=1)
    axes = dict(data=one, context=one, tensor=one, expert=one)
    ranks = SimpleNamespace(device=torch.device("cpu"), **axes)
    config = replace(
        PLAIN, algo=AlgoConfig(minibatches=1, **algo), train=TrainConfig(micro_batch=2)
    )
    (batches,) = lay_out(ranks, SAMPLES, config, step=1)
    return {
        index: part[0].item()
        for batch in averaged_without(rejected, batches, SUMMARY, config, step=1)
        for index, part in zip(batch.indices, batch.weights.split(batch.lengths), strict=True)
    }


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token_mean", [1 / 9, 0, 1 / 9, 1 / 9]),  # 3 + 2 + 4 tokens are left
        ("response_mean", [1 / 9, 0, 1 / 6, 1 / 12]),  # of 3 responses
        ("response_sum", [1 / 3, 0, 1 / 3, 1 / 3]),
    ],
)
def test_rejected_responses_leave_the_denominator_too(aggregation, weights):
    found = weights_without([1], aggregation=aggregation)
    assert [found[i] for i in range(4)] == pytest.approx(weights)


def test_a_minibatch_without_a_kept_response_weighs_nothing():
    assert set(weights_without([0, 1, 2, 3]).values()) == {0.0}
