"""A prompt that is computed once for all its responses changes no score and no gradient."""

from dataclasses import replace

import pytest
import torch

from qurl_megatron.config import TrainConfig
from qurl_megatron.types import Prompt, Sample
from tests.cases import all_but
from tests.distributed.test_policy import (
    ALGO,
    assert_same_training,
    first_gradients,
    recipe,
    reference_gradients,
    relative,
    train_twice,
)
from tests.support.models import random_samples, tiny_checkpoint
from tests.support.ranks import run_on_ranks


def grouped_samples(*, empty: bool = False) -> list[Sample]:
    """Four prompts of 1 to 30 tokens with four responses each; some of these have one token."""
    samples = random_samples(16, seed=3)
    found = []
    for index, sample in enumerate(samples):
        number, length = divmod(index, 4)[0], (1, 5, 12, 30)[index // 4]
        ids = tuple((7 * number + 11 * place) % 128 for place in range(length))
        count = 1 if index % 4 == 0 else len(sample.response_ids)
        if empty and index % 4 == 1:
            count = 0
        found.append(
            replace(
                sample,
                prompt=Prompt(number, ids, "", ""),
                response_ids=sample.response_ids[:count],
                behaviour_log_probs=sample.behaviour_log_probs[:count],
                written=sample.written[:count],
                versions=((0, int(sample.written[:count].sum())),),
            )
        )
    return found


def trained(tmp_path, backend, config, name, samples=None) -> dict:
    out = tmp_path / f"{name}.pt"
    body, ranks = train_twice, config.parallel.world_size
    run_on_ranks(body, ranks, backend, tmp_path, config, samples or grouped_samples(), out)
    return torch.load(out, weights_only=True)


BUDGET = dict(max_tokens=40)
CASES = {
    "alone": ("qwen2", {}, dict(micro_batch=8)),
    "groups cut over microbatches": ("qwen2", {}, dict(micro_batch=4)),
    "budget": ("qwen3", {}, BUDGET),
    "TP2": ("qwen2", dict(tensor=2), dict(micro_batch=4)),
    "TP2 without sequence parallelism": ("gemma", dict(tensor=2, sequence=False), BUDGET),
    "PP2, groups cut": ("llama", dict(pipeline=2), dict(micro_batch=2)),
    "PP2, packed": ("qwen2", dict(pipeline=2), dict(packed=True, **BUDGET)),
    "DP2": ("qwen2", dict(data=2), BUDGET),
    "TP2 x PP2": ("qwen3", dict(tensor=2, pipeline=2), BUDGET),
    "experts": ("qwen3_moe", {}, BUDGET),
    "recomputed": ("qwen2", {}, dict(micro_batch=4)),
}


@pytest.mark.parametrize(
    "case", all_but(CASES, "TP2 without sequence parallelism", "TP2", "experts", "DP2")
)
def test_training_with_shared_prompts_equals_training_without(case, backend, alone, tmp_path):
    if backend != "gloo":
        pytest.skip("prompts are shared on CPUs alone")
    family, layout, train = CASES[case]
    folder, _ = alone(family, **ALGO)
    config = recipe(folder, layout, **ALGO)
    plain = trained(tmp_path, backend, recipe(folder, {}, **ALGO), "plain")
    model = replace(config.model, recompute=case == "recomputed")
    shared = replace(config, model=model, train=TrainConfig(share_prefix=True, **train))
    actual = trained(tmp_path, backend, shared, "shared")
    fractions = [run["metrics"][0].pop("train/shared_fraction") for run in (actual, plain)]
    [run["metrics"][1].pop("train/shared_fraction") for run in (actual, plain)]
    assert_same_training(actual, plain, rounding=2e-5)
    assert fractions[0] > 0.2 and fractions[1] == 0.0


def test_gradients_with_shared_prompts_equal_autograd_in_float64(backend, tmp_path):
    from qurl_megatron.training.step import deal

    if backend != "gloo":
        pytest.skip("prompts are shared on CPUs alone")
    folder = tiny_checkpoint(tmp_path / "model", "qwen2")
    config = recipe(folder, {}, kl_coef=0.1, entropy_coef=0.01)
    samples, found = grouped_samples(), {}
    first = [i for batch in deal([1] * 16, 2, 1, 2, seed=1)[0][0] for i in batch]
    truth = reference_gradients(folder, samples, first, config)
    for share in (False, True):
        out = tmp_path / f"{share}.pt"
        laid = replace(config, train=TrainConfig(micro_batch=8, share_prefix=share))
        run_on_ranks(first_gradients, 1, backend, tmp_path, laid, samples, out)
        gradients = torch.load(out)
        found[share] = max(relative(gradients[name], truth[name]) for name in truth)
    assert max(found.values()) < 1e-5, found
