"""Which tokens the loss averages over, and who gets which responses."""

from dataclasses import replace
from types import SimpleNamespace

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
from qurl_megatron.errors import ConfigError
from qurl_megatron.planning.training_time import deal_out, deal_out_shared
from qurl_megatron.planning.workload import Workload, in_turn
from qurl_megatron.training.step import (
    asks_to_share,
    averaged_without,
    counted_tokens,
    deal,
    deal_families,
    hand_out,
    lay_out,
    shares_prefix,
    unshared_because,
)
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


def test_all_tokens_count_unless_something_leaves_them_out():
    assert counted_tokens(SUMMARY, PLAIN) == [3, 5, 2, 4]


def test_masked_responses_that_were_cut_off_do_not_count():
    config = replace(PLAIN, algo=AlgoConfig(mask_truncated=True))
    assert counted_tokens(SUMMARY, config) == [3, 0, 2, 4]


def test_groups_that_only_fill_up_a_batch_of_dynamic_sampling_do_not_count():
    config = replace(PLAIN, algo=AlgoConfig(dynamic_sampling=True))
    assert counted_tokens(SUMMARY, config) == [3, 5, 0, 0]


def prompts_of(minibatch: list[list[int]], group: int) -> set[int]:
    return {i // group for hand in minibatch for i in hand}


@pytest.mark.parametrize("evenly", [False, True])
@pytest.mark.parametrize("data", [1, 2])
def test_a_minibatch_of_whole_groups_holds_all_responses_to_its_prompts(data, evenly):
    lengths = [(7 * i) % 31 + 1 for i in range(512 * 16)]
    dealt = hand_out(lengths, 16, data, seed=0, evenly=evenly, group=16)
    assert [len(prompts_of(minibatch, 16)) for minibatch in dealt] == [32] * 16
    everywhere = sorted(i for minibatch in dealt for hand in minibatch for i in hand)
    assert everywhere == list(range(512 * 16))
    assert {len(hand) for minibatch in dealt for hand in minibatch} == {512 // data}
    if not evenly:  # the same minibatches for another number of ranks
        alone = hand_out(lengths, 16, 1, seed=0, evenly=False, group=16)
        for minibatch, (whole,) in zip(dealt, alone, strict=True):
            assert sorted(i for hand in minibatch for i in hand) == sorted(whole)


def test_a_minibatch_of_single_responses_is_of_most_prompts():
    dealt = hand_out([1] * 8192, 16, 1, seed=0, evenly=False)
    assert len(prompts_of(dealt[0], 16)) > 300


def test_whole_groups_need_prompts_that_divide_into_minibatches():
    with pytest.raises(ConfigError, match=r"data\.prompts_per_step=16 .* algo\.minibatches=32 "):
        replace(
            PLAIN, algo=AlgoConfig(minibatches=32, deal="groups"), train=TrainConfig(micro_batch=1)
        )


def weights_without(rejected: list[int], **algo) -> dict[int, float]:
    """Weight of a token of each response, all in one minibatch."""
    one = SimpleNamespace(rank=0, size=1)
    ranks = SimpleNamespace(device=torch.device("cpu"), data=one, context=one, tensor=one)
    config = replace(
        PLAIN, algo=AlgoConfig(minibatches=1, **algo), train=TrainConfig(micro_batch=2)
    )
    (batches,) = lay_out(ranks, SAMPLES, config, step=1)
    return {
        index: part[0].item()
        for batch in averaged_without(rejected, ranks, batches, SUMMARY, config, step=1)
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


@pytest.mark.parametrize("budget", [0, 300])
@pytest.mark.parametrize("group", [1, 6])
def test_a_plan_shares_prompts_as_the_trainer_does(group, budget):
    """But for the draw: which responses, of what lengths, are in an update."""
    work = Workload(
        prompts=16, samples=6, prompt=20.0, mean=30.0, longest=200, minibatches=2, epochs=1
    )
    lengths = in_turn(work.lengths(48)) * 2
    summary = Responses.of(
        [s for n in range(16) for s in family(n, 20, lengths[6 * n : 6 * n + 6])]
    ).summary
    for data in (1, 2, 4):
        update, _ = deal_families(summary, 2, data, 8, seed=0, budget=budget, group=group)
        fullest = max(
            sum(summary.tree(part).stop for one in rank for part in one) for rank in update
        )
        found = deal_out_shared(work, data, budget, 8, grouped=group > 1)
        assert found.tokens == pytest.approx(fullest, rel=0.15)
        assert found.passes == pytest.approx(max(map(len, update)), abs=1)


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


@pytest.mark.parametrize("budget", [0, 300])
@pytest.mark.parametrize("data", [2, 4, 8])
def test_sharing_prompts_never_gives_the_busiest_data_rank_more(data, budget):
    generator = torch.Generator().manual_seed(data)
    for seed in range(25):
        groups = [
            family(n, length, torch.randint(0, 100, (4,), generator=generator).tolist())
            for n, length in enumerate(torch.randint(1, 40, (8,), generator=generator).tolist())
        ]
        summary = Responses.of([s for group in groups for s in group]).summary
        plain = deal(summary.totals, 2, data, 2, seed, budget=budget, packed=True)
        shared = deal_families(summary, 2, data, 2, seed, budget=budget)
        for expected, update in zip(plain, shared, strict=True):
            # A response's last token predicts nothing, and an empty response has a position.
            alone = [sum(summary.tree([i]).stop for one in rank for i in one) for rank in expected]
            loads = [
                sum(summary.tree(part).stop for one in rank for part in one) for rank in update
            ]
            assert max(loads) <= max(alone)


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
