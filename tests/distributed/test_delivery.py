"""Every rank gets what it trains on, and nothing else, in every layout."""

import math
import pickle
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.config import (
    AlgoConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from qurl_megatron.data.responses import Responses
from tests.support.models import random_samples
from tests.support.ranks import BACKENDS, run_on_ranks

LAYOUTS = [
    dict(data=4),
    dict(tensor=2, data=2),
    dict(pipeline=2, data=2),
    dict(context=2, data=2),
    dict(tensor=2, pipeline=2),
    dict(pipeline=3, data=1),  # a team whose size is no power of two
]
TRAIN = [dict(micro_batch=2), dict(max_tokens=48), dict(max_tokens=48, packed=True)]
SAMPLES = [replace(s, prompt=replace(s.prompt, text="x" * 10_000)) for s in random_samples(16)]


def config(layout: dict, **train) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="x"),
        data=DataConfig(task="chain_sum", prompts_per_step=4),
        rollout=RolloutConfig(samples_per_prompt=4),
        algo=AlgoConfig(minibatches=2),
        parallel=ParallelConfig(**layout),
        train=TrainConfig(**train),
    )


def check_shares(device, layout: dict) -> None:
    from qurl_megatron.training.layout import deliver, lay_out, shares

    whole = Responses.of(SAMPLES)
    with megatron_runtime(ParallelConfig(**layout)) as ranks:
        for train in TRAIN:
            recipe = config(layout, **train)
            split = partial(shares, ranks, config=recipe, step=3)
            share = deliver(ranks, whole if ranks.leads else None, split)
            for field in fields(whole.summary):
                expected = getattr(whole.summary, field.name)
                assert torch.equal(getattr(share.summary, field.name), expected), field.name
            held: list = [None] * ranks.data.size
            dist.all_gather_object(held, share.held, group=ranks.data.group)
            assert sorted(i for part in held for i in part) == list(range(16))
            assert len(share.tokens) == sum(whole.summary.totals[i] for i in share.held)
            # The microbatches are those of a rank that holds everything.
            mine = lay_out(ranks, share, recipe, step=3)
            right = lay_out(ranks, whole, recipe, step=3)
            assert [len(batches) for batches in mine] == [len(batches) for batches in right]
            for batches, expected in zip(mine, right, strict=True):
                for one, other in zip(batches, expected, strict=True):
                    for field in fields(one):
                        a, b = getattr(one, field.name), getattr(other, field.name)
                        same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
                        assert same, field.name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_data_rank_gets_its_share_and_trains_on_the_same_batches(layout, backend, tmp_path):
    run_on_ranks(check_shares, math.prod(layout.values()), backend, tmp_path, layout)


def check_pickles(device) -> None:
    from qurl_megatron.observe.metrics import Timer
    from qurl_megatron.training.lead import Rollout
    from qurl_megatron.training.loop import Run
    from qurl_megatron.training.state import TrainState

    collected = Responses.of(SAMPLES), Rollout({}, tokens=7, seconds=0.5, cursor={"epoch": 1})
    sent: list[int] = []
    plain = dist.broadcast_object_list

    def counting(objects: list, src: int) -> None:
        sent.append(len(pickle.dumps(objects)))
        plain(objects, src=src)

    dist.broadcast_object_list = counting
    recipe = config(dict(data=2), micro_batch=2)
    with megatron_runtime(recipe.parallel) as ranks:
        take = SimpleNamespace(take=lambda step, timer: collected)
        lead = take if ranks.leads else None
        run = Run(recipe, SimpleNamespace(ranks=ranks), None, None, lead, TrainState(), None)
        samples, rollout = run._samples(1, Timer())
    assert rollout == collected[1]
    assert len(samples.held) == 8 and len(samples) == 16
    assert sum(sent) < 1000, f"{sum(sent)} bytes were pickled"


def test_no_token_and_no_prompt_is_pickled_on_its_way(tmp_path):
    run_on_ranks(check_pickles, 2, "gloo", tmp_path)
