"""Every rank gets the responses of a step."""

import pickle
from dataclasses import fields, replace
from types import SimpleNamespace

import torch
import torch.distributed as dist

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.config import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from qurl_megatron.data.responses import Responses
from tests.support.models import random_samples
from tests.support.ranks import run_on_ranks

SAMPLES = [replace(s, prompt=replace(s.prompt, text="x" * 10_000)) for s in random_samples(16)]


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
    recipe = RunConfig(
        model=ModelConfig(path="x"),
        data=DataConfig(task="chain_sum", prompts_per_step=4),
        rollout=RolloutConfig(samples_per_prompt=4),
        parallel=ParallelConfig(tensor=3),
        train=TrainConfig(micro_batch=2),
    )
    with megatron_runtime(recipe.parallel) as ranks:
        take = SimpleNamespace(take=lambda step, timer: collected)
        lead = take if ranks.leads else None
        run = Run(recipe, SimpleNamespace(ranks=ranks), None, None, lead, TrainState(), None)
        samples, rollout = run._samples(1, Timer())
    assert rollout == collected[1]
    whole = Responses.of(SAMPLES)
    for one, other in ((samples, whole), (samples.summary, whole.summary)):
        for field in fields(one):
            value, expected = getattr(one, field.name), getattr(other, field.name)
            assert field.name == "summary" or torch.equal(value, expected), field.name
    assert sum(sent) < 1000, f"{sum(sent)} bytes were pickled"


def test_every_rank_gets_all_responses_and_nothing_is_pickled_on_the_way(tmp_path):
    run_on_ranks(check_pickles, 3, "gloo", tmp_path)
