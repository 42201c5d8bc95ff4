"""With ``train.align`` the policy computes with what the engines have, however it is split."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from qurl_megatron.actor.megatron import everywhere, megatron_runtime
from qurl_megatron.config import QuantConfig
from qurl_megatron.engines.embedded.decoder import Matrix
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.metrics import Timer, merge, values
from qurl_megatron.quant import dequantize, quantize, quantize_tokens
from qurl_megatron.tensors.table import is_quantized
from qurl_megatron.types import Prompt, Sample
from tests.support import policies
from tests.support.cases import all_but
from tests.support.engine_models import decoding_by, engine_for, finish, sequence
from tests.support.models import as_stored, random_samples, tiny_checkpoint
from tests.support.policies import (
    assert_goes_on,
    batches,
    build,
    delivered,
    gradient,
    improve_at,
    joined,
    recipe,
    relative,
    save_then_go_on,
    save_weights,
    scores,
    whole,
)
from tests.support.ranks import run_on_ranks, run_with_stand_in

SPLIT = ("TP2", "PP2", "CP2", "TP2 x DP2")
LAYOUTS = {"alone": {}} | {name: policies.LAYOUTS[name] for name in SPLIT}


def aligned_recipe(folder: Path, parallel: dict, align: str, scheme: str = "int8", **more):
    config = recipe(folder, parallel, dtype=more.pop("dtype", "float32"), **more)
    train = replace(config.train, align=align)
    return replace(config, train=train, quant=QuantConfig(scheme=scheme, uaq_scale=1.0))


def check_codes(device, config, samples) -> None:
    """Before and after an update, the layers hold the codes of the whole masters' versions."""
    from qurl_megatron.training.step import improve

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        for step in (1, 2):
            policy._take_codes()
            published = {
                name: quantize(value, config.quant.scheme)
                for name, value in whole(policy).items()
                if is_quantized(name)
            }
            held = {layer.weight: layer.quantized for layer in policy._aligned}
            held_bytes = sum(q.values.nbytes + q.scale.nbytes for q in held.values())
            assert held_bytes == counted(config, ranks)
            for part in ("values", "scale"):
                found = whole_of(policy, {p: getattr(q, part) for p, q in held.items()})
                assert found.keys() == published.keys()
                for name, value in found.items():
                    expected = getattr(published[name], part).float().cpu()
                    assert torch.equal(value[:, : expected.shape[1]], expected), (step, name)
            share = delivered(ranks, samples)
            improve(policy, share, config, step=step, timer=Timer())


def counted(config, ranks) -> int:
    """What a dry run says the codes of this rank's stage take."""
    from qurl_megatron.plan.footprint import footprint
    from qurl_megatron.training.shapes import find_models

    return footprint(config, find_models(config)).stages[ranks.pipeline.rank].codes


def whole_of(policy, held: dict) -> dict[str, torch.Tensor]:
    """What is held for some parameters, by Hugging Face name, joined from all ranks."""
    return joined(
        shard
        for index, (_, parameter) in enumerate(policy._parameters)
        if parameter in held
        for shard in policy.hf_parameter(index, lambda p: held[p].float())
    )


@pytest.mark.crossed
@pytest.mark.parametrize("layout", ["alone", "TP2", "PP2", "TP2 x DP2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_hold_the_published_codes_and_scales_bit_for_bit(
    layout, dtype, backend, qwen2, tmp_path
):
    config = aligned_recipe(qwen2, LAYOUTS[layout], "full", dtype=dtype)
    run_on_ranks(
        check_codes, config.parallel.world_size, backend, tmp_path, config, random_samples(16)
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_experts_hold_theirs_and_routers_none(family, backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", family)
    config = aligned_recipe(folder, dict(tensor=2), "weights", "int4")
    run_on_ranks(check_codes, 2, backend, tmp_path, config, random_samples(16))


class StraightThrough(nn.Module):
    """A dense float64 layer on the grids of weights and tokens; gradients know of no rounding."""

    def __init__(self, plain: nn.Linear, scheme: str, tokens: bool) -> None:
        super().__init__()
        self.plain, self.scheme, self.tokens = plain, scheme, tokens

    def forward(self, x):
        weight = self.plain.weight
        on_grid = dequantize(quantize(weight.float(), self.scheme)).double()
        weight = weight + (on_grid - weight).detach()
        if self.tokens:
            codes, scale = quantize_tokens(x.float(), self.scheme)
            x = x + (codes.double() * scale - x).detach()
        return nn.functional.linear(x, weight, self.plain.bias)


def dense_gradients(folder, samples, chosen, config) -> dict[str, torch.Tensor]:
    """Of the mean log-prob of every token, over responses."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if name.endswith("_proj"):
                    full = config.train.align == "full"
                    setattr(block, name, StraightThrough(child, config.quant.scheme, full))
    loss = 0.0
    for i in chosen:
        sample = samples[i]
        ids = torch.tensor([[*sample.prompt.input_ids, *sample.response_ids]])
        start, count = len(sample.prompt.input_ids), len(sample.response_ids)
        rows = model(ids).logits[0, start - 1 : start - 1 + count].log_softmax(-1)
        log_probs = rows.gather(1, ids[0, start:, None])[torch.tensor(sample.written)]
        loss = loss + log_probs.mean() / len(chosen)
    loss.backward()
    found = {name.replace(".plain.", "."): p.grad.float() for name, p in model.named_parameters()}
    return as_stored(found)


def sharded_gradients(device, config, samples, out) -> None:
    from qurl_megatron.training.layout import lay_out
    from qurl_megatron.training.losses import Scorer

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        score = Scorer(policy, 1.0)
        share = delivered(ranks, samples)

        def mean_log_prob(logits, batch):
            return (score(logits, batch)[0] * batch.weights).sum(), {}

        policy.accumulate(lay_out(ranks, share, config, step=1)[0], mean_log_prob)
        gradients = whole(policy, gradient(policy))
        if ranks.leads:
            torch.save(gradients, out)


def found_gradients(runner, backend, tmp_path, config) -> dict[str, torch.Tensor]:
    out = tmp_path / "found.pt"
    world = config.parallel.world_size
    runner(sharded_gradients, world, backend, tmp_path, config, random_samples(16), out)
    return torch.load(out)


def assert_gradients(backend, tmp_path, folder, config, *, rounding: float) -> None:
    from qurl_megatron.data.dealing import shuffled

    actual = found_gradients(run_on_ranks, backend, tmp_path, config)
    expected = dense_gradients(folder, random_samples(16), shuffled(16, 2, seed=1)[0], config)
    assert actual.keys() == expected.keys()
    worst = max((relative(actual[name], expected[name]), name) for name in expected)
    assert worst[0] < rounding, worst


@pytest.mark.parametrize(
    ("align", "rounding"),
    [
        ("weights", 2e-5),
        # Float32 and float64 may round a token to different codes, and then what follows it too. A
        # gradient by tokens as they were before the rounding would be off by 0.1 and more.
        ("full", 1e-2),
    ],
)
@pytest.mark.parametrize("layout", all_but(LAYOUTS, "TP2 x DP2", "PP2"))
def test_gradients_equal_a_dense_straight_through_reference(
    layout, align, rounding, backend, qwen2, tmp_path
):
    config = aligned_recipe(qwen2, LAYOUTS[layout], align, "int4")
    assert_gradients(backend, tmp_path, qwen2, config, rounding=rounding)


class Halves(Matrix):
    """A matrix as an engine of two tensor ranks multiplies by it: each quantizes its half of a
    token by itself, and their products are summed."""

    def __init__(self, whole: Matrix) -> None:
        super().__init__(whole.scheme, whole.weight_OI, whole.scale)
        self.halves = [
            Matrix(self.scheme, half_OI.contiguous(), self.scale)
            for half_OI in self.weight_OI.chunk(2, dim=1)
        ]
        for half in self.halves:
            half.pack()

    def __call__(self, x_TI: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
        for half, part_TI in zip(self.halves, x_TI.chunk(2, dim=1), strict=True):
            addend = half(part_TI.contiguous(), addend)
        return addend


def generated(
    folder: Path, scheme: str, *, prompts: int = 4, group: int = 4, tensor: int = 1
) -> list[Sample]:
    """What an embedded engine samples with the weights it quantizes from a checkpoint.

    Args:
        tensor: over how many ranks the engine is split, 1 or 2.
    """
    made = random_samples(prompts, seed=3)
    engine = engine_for(folder, scheme=scheme)
    if tensor == 2:
        decoder = engine.decoder
        decoder.layers = [
            replace(
                layer,
                out=Halves(layer.out),
                mlp=replace(layer.mlp, down=Halves(layer.mlp.down)),
            )
            for layer in decoder.layers
        ]
    asked = [
        sequence(list(made[i].prompt.input_ids), 12, seed=i * group + k)
        for i in range(prompts)
        for k in range(group)
    ]
    finish(engine, *asked)
    return [
        Sample(
            prompt=Prompt(at // group, tuple(one.prompt), "", ""),
            response_ids=tuple(one.output_ids),
            behaviour_log_probs=tuple(one.log_probs),
            finish_reason="length",
            versions=((0, len(one.output_ids)),),
            reward=float(at % 2),
        )
        for at, one in enumerate(asked)
    ]


def measure(device, config, samples, out) -> None:
    from qurl_megatron.training.step import improve

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        share = delivered(ranks, samples)
        metrics, _ = improve(policy, share, config, step=1, timer=Timer())
        seen = values(merge(everywhere(metrics)))
        if ranks.leads:
            torch.save(seen, out)


def mismatch(backend, tmp_path, folder, samples, align, scheme, layout=None, train=None) -> dict:
    config = aligned_recipe(folder, layout or {}, align, scheme)
    config = replace(config, rollout=replace(config.rollout, temperature=1.0))
    config = replace(config, train=replace(config.train, **train or {}))
    out = tmp_path / "metrics.pt"
    run_on_ranks(measure, config.parallel.world_size, backend, tmp_path, config, samples, out)
    return torch.load(out)


@pytest.mark.parametrize("scheme", all_but(["int8", "int5", "int4", "fp8"], "int5"))
def test_an_aligned_policy_has_the_log_probs_of_the_engine(scheme, backend, qwen2, tmp_path):
    samples = generated(qwen2, scheme)
    none, weights, full = (
        mismatch(backend, tmp_path, qwen2, samples, align, scheme)
        for align in ("none", "weights", "full")
    )
    kl = "rollout/kl_k3"
    assert full[kl] < weights[kl] < none[kl] and none[kl] > 1e-5
    if (backend, scheme) == ("nccl", "fp8"):  # GPUs give FP8 products in BF16, the engine had FP32
        return
    # A sum in another order, as on another CPU, may round a token to another code: 3e-9 there.
    assert full[kl] < 1e-7 and full["rollout/rho_max"] < 1.01, full


TRAINED = {name: (LAYOUTS[name], {}) for name in SPLIT[:3]}
TRAINED["packed"] = ({}, dict(packed=True, max_tokens=64))


@pytest.mark.parametrize("case", all_but(TRAINED, "PP2"))
def test_it_has_them_however_it_is_split_and_laid_out(case, backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "qwen3")
    samples = generated(folder, "int8")
    layout, train = TRAINED[case]
    found = mismatch(backend, tmp_path, folder, samples, "full", "int8", layout, train=train)
    # 1.7e-4 without. A sum in another order may round a token to another code, and then whatever
    # depends on it too: 1e-6 where that happened.
    assert found["rollout/kl_k3"] < 1e-5


def measure_each(device, configs, samples, folder) -> None:
    for name, config in configs.items():
        measure(device, config, samples, folder / f"{name}.pt")


@pytest.mark.parametrize("size", [1, 2])
def test_two_trainer_ranks_have_the_log_probs_of_an_engine_of_one_rank_and_of_two(
    size, backend, qwen2, tmp_path
):
    """With its ``rollout.engine_tensor``; with the other one as little as with ``weights``."""
    with decoding_by("torch"):  # the native step knows no halves
        samples = generated(qwen2, "int8", tensor=size)
    aligned = {"full": ("full", size), "other": ("full", 3 - size)}
    aligned |= {align: (align, size) for align in ("weights", "none")}
    configs = {}
    for name, (align, engine_tensor) in aligned.items():
        config = aligned_recipe(qwen2, dict(tensor=2), align)
        engines = dict(backend="sglang", engine_tensor=engine_tensor, temperature=1.0)
        configs[name] = replace(config, rollout=replace(config.rollout, **engines))
    run_on_ranks(measure_each, 2, backend, tmp_path, configs, samples, tmp_path)
    kl = {name: torch.load(tmp_path / f"{name}.pt")["rollout/kl_k3"] for name in configs}
    assert all(20 * kl["full"] < kl[name] for name in configs if name != "full"), kl
    assert kl["full"] < 1e-6, kl  # see above


def check_the_others(device, config) -> None:
    from qurl_megatron.actor.aligned import aligned_layers, plain
    from qurl_megatron.actor.critic import Critic
    from qurl_megatron.actor.policy import Reference

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, reference=Reference())
        own, reference = scores(policy)
        again, _ = scores(policy)
        with plain(policy._aligned):
            full_precision, _ = scores(policy)
        for i, value in own.items():
            assert torch.equal(again[i], value) and not torch.equal(reference[i], value)
            assert torch.equal(full_precision[i], reference[i])
        critic = Critic.build(config.model, config.parallel, config.critic_optimizer, ranks)
        assert not aligned_layers(critic.gpt)


def test_reference_and_critic_compute_in_full_precision(backend, qwen2, tmp_path):
    config = aligned_recipe(qwen2, dict(tensor=2), "full", "int4")
    run_on_ranks(check_the_others, 2, backend, tmp_path, config)


def score_then_load_and_go_on(device, config, run_dir, out) -> None:
    """The codes that it computed with before are of other weights."""
    from qurl_megatron.training import checkpoint
    from qurl_megatron.training.newest import newest_whole

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        policy.score(batches(ranks), lambda logits, _: logits.sum())
        checkpoint.load(newest_whole(run_dir, ranks)[0], policy)
        improve_at(policy, config, 2)
        save_weights(policy, out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_policy_takes_the_same_next_step_bit_for_bit(dtype, backend, qwen2, tmp_path):
    config = aligned_recipe(qwen2, dict(tensor=2, data=2), "full", dtype=dtype)
    bodies = (save_then_go_on, score_then_load_and_go_on)
    assert_goes_on(config, config, backend, tmp_path, bodies=bodies)


def test_recomputed_activations_are_rounded_as_they_were(backend, qwen2, tmp_path):
    config = aligned_recipe(qwen2, dict(tensor=2), "full")
    again = replace(config, model=replace(config.model, recompute=True))
    kept, recomputed = (
        found_gradients(run_on_ranks, backend, tmp_path, one) for one in (config, again)
    )
    assert all(torch.equal(recomputed[name], kept[name]) for name in kept)


@pytest.mark.parametrize("layout", [dict(tensor=2), dict(context=2)], ids=["TP2", "CP2"])
def test_beside_transformer_engine_the_gradients_are_the_same(layout, backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "qwen3")
    config = aligned_recipe(folder, layout, "weights")
    expected = found_gradients(run_on_ranks, backend, tmp_path, config)
    found = found_gradients(run_with_stand_in, backend, tmp_path, config)
    for name, value in expected.items():
        assert relative(found[name], value) < 2e-5, name


@pytest.mark.parametrize(
    "kind, size, refused", [("sglang", 2, False), ("sglang", 4, True), ("embedded", 1, True)]
)
def test_engines_other_than_those_aligned_to_are_refused(kind, size, refused):
    from qurl_megatron.actor.aligned import Align
    from qurl_megatron.engines.kinds import ENGINE_KINDS
    from qurl_megatron.fleet.fleet import EngineRecord
    from qurl_megatron.publish.publisher import refuse_unlike

    engines = [EngineRecord("one", tp=2), EngineRecord("two", kind=ENGINE_KINDS[kind], tp=size)]
    refuse_unlike(Align("int8", engine_tensor=2), "sglang", engines)
    full = Align("int8", activations=True, engine_tensor=2)
    message = f"rollout.engine_tensor=2 does, and .* is {kind} with a tensor size of {size}"
    with pytest.raises(ConfigError, match=message) if refused else nullcontext():
        refuse_unlike(full, "sglang", engines)


def check_split(device) -> None:
    from qurl_megatron.actor.aligned import as_engines_split

    group, rank = dist.group.WORLD, dist.get_rank()
    amax_T1 = torch.tensor([[1.0, 5.0, 3.0, 2.0], [8.0, 6.0, 7.0, 9.0]], device=device)
    mine = amax_T1[:, rank : rank + 1]
    whole = as_engines_split(mine, group, 1)
    assert whole.tolist() == [[5.0], [9.0]]
    halves = as_engines_split(mine, group, 2)
    assert halves.tolist() == ([[5.0], [8.0]] if rank < 2 else [[3.0], [9.0]])
    assert torch.equal(as_engines_split(mine, group, 4), mine)
    broken = torch.full_like(mine, torch.nan if rank == 1 else 1.0)
    assert as_engines_split(broken, group, 1).isinf().all()


def test_ranks_share_a_tokens_scale_as_far_as_an_engine_rank_has_their_parts(backend, tmp_path):
    run_on_ranks(check_split, 4, backend, tmp_path)
