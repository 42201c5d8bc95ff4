"""Which tokens the loss averages over, and who gets which responses."""

from dataclasses import replace

import pytest
import torch

from qurl_megatron.config import (
    AlgoConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from qurl_megatron.data.passes import plan_passes
from qurl_megatron.data.responses import Responses
from qurl_megatron.planning.training_time import deal_out
from qurl_megatron.planning.workload import Workload
from qurl_megatron.training.step import (
    asks_to_share,
    counted_tokens,
    deal,
    deal_families,
    hand_out,
    shares_prefix,
    unshared_because,
)
from qurl_megatron.types import Prompt, Sample


def sample(length: int, reward: float, finish: str = "stop") -> Sample:
    ids, log_probs = (1,) * length, (-1.0,) * length
    return Sample(Prompt(0, (1,), "", ""), ids, log_probs, finish, ((1, length),), reward=reward)


SUMMARY = Responses.of(
    [sample(3, 1.0), sample(5, 0.0, "length"), sample(2, 1.0), sample(4, 1.0)]
).summary
PLAIN = RunConfig(
    model=ModelConfig(path="x"),
    data=DataConfig(task="sort_digits", prompts_per_step=16),
    rollout=RolloutConfig(samples_per_prompt=2),
)


def test_all_tokens_count_unless_something_leaves_them_out():
    assert counted_tokens(SUMMARY, PLAIN) == [3, 5, 2, 4]


def test_masked_responses_that_were_cut_off_do_not_count():
    config = replace(PLAIN, algo=AlgoConfig(mask_truncated=True))
    assert counted_tokens(SUMMARY, config) == [3, 0, 2, 4]


def test_groups_that_only_fill_up_a_batch_of_dynamic_sampling_do_not_count():
    config = replace(PLAIN, algo=AlgoConfig(dynamic_sampling=True))
    assert counted_tokens(SUMMARY, config) == [3, 5, 0, 0]


def test_a_plan_deals_responses_as_the_trainer_does():
    work = Workload(
        prompts=16, samples=6, prompt=20.0, mean=30.0, longest=200, minibatches=1, epochs=1
    )
    lengths = [20 + length for length in work.lengths(96)]
    for data in (1, 2, 3, 8):
        (hands,) = hand_out(lengths, 1, data, seed=0, evenly=True)
        fullest = max((([lengths[i] for i in hand]) for hand in hands), key=sum)
        found = deal_out(work, data, 400, 1, True)
        assert found.tokens == sum(fullest)
        assert found.squares == sum(length * length for length in fullest)
        assert found.passes == len(plan_passes(fullest, 400, packed=True))


def family(number: int, prompt: int, lengths: list[int]) -> list[Sample]:
    ids = Prompt(number, (number,) * prompt, "", "")
    return [replace(sample(length, 1.0), prompt=ids) for length in lengths]


GROUPS = Responses.of(
    [s for n in range(8) for s in family(n, 3 + 10 * n, [1, 2 + n, 30, 4 * n + 1])]
).summary


@pytest.mark.parametrize("data", [1, 2, 4])
@pytest.mark.parametrize("budget", [0, 150])
def test_sharing_prompts_leaves_every_response_in_its_minibatch(data, budget):
    plain = deal(GROUPS.totals, 2, data, 4, seed=7, budget=budget)
    shared = deal_families(GROUPS, 2, data, 4, seed=7, budget=budget)
    for update, expected in zip(shared, plain, strict=True):
        found = [i for rank in update for one in rank for part in one for i in part]
        assert sorted(found) == sorted(i for rank in expected for one in rank for i in one)
        assert all(rank for rank in update)


def test_data_ranks_are_balanced_by_what_they_compute():
    (update,) = deal_families(GROUPS, 1, 4, 4, seed=7, budget=150)
    loads = [sum(GROUPS.tree(part).stop for one in rank for part in one) for rank in update]
    assert max(loads) <= 1.1 * sum(loads) / 4, loads


def test_prompts_are_shared_on_cpus_by_default_and_not_where_they_cannot_be():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert shares_prefix(PLAIN, cpu) and unshared_because(PLAIN, cpu) == ""
    assert not shares_prefix(PLAIN, gpu)
    assert unshared_because(PLAIN, gpu) == "the attention that shares a prompt runs on CPUs alone"
    split = replace(PLAIN, parallel=ParallelConfig(context=2))
    assert not shares_prefix(split, cpu)
    assert unshared_because(split, cpu) == "parallel.context=2 splits sequences"


def test_nobody_is_told_of_prompts_that_are_not_to_be_shared():
    off = replace(PLAIN, train=TrainConfig(share_prefix=False))
    alone = replace(
        PLAIN,
        rollout=RolloutConfig(samples_per_prompt=1),
        algo=AlgoConfig(advantage="reinforce_pp"),
    )
    assert [asks_to_share(config) for config in (PLAIN, off, alone)] == [True, False, False]
