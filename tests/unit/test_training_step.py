"""Which tokens the loss averages over."""

from dataclasses import replace

from qurl_megatron.config import AlgoConfig, DataConfig, ModelConfig, RolloutConfig, RunConfig
from qurl_megatron.data.passes import plan_passes
from qurl_megatron.data.responses import Responses
from qurl_megatron.planning.training_time import deal_out
from qurl_megatron.planning.workload import Workload
from qurl_megatron.training.step import counted_tokens, hand_out
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
