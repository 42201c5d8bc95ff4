"""The reference policy scores with its own weights, wherever these wait, and leaves no trace."""

import pytest
import torch

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.actor.policy import Reference
from qurl_megatron.algo.kl import k3
from qurl_megatron.config import ParallelConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import read_config
from qurl_megatron.training.state import TrainState, latest
from tests.support.models import tiny_checkpoint
from tests.support.policies import SAMPLES, build, hf_scores, improve_at, recipe, scores, whole
from tests.support.ranks import run_on_ranks


def moved_away(folder, by: float):
    """A copy of a checkpoint with other weights."""
    from safetensors.torch import load_file, save_file

    other = tiny_checkpoint(folder.with_name("other"), read_config(folder)["model_type"])
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    noise = {n: by * torch.randn(w.shape, generator=generator) for n, w in weights.items()}
    save_file({n: w + noise[n] for n, w in weights.items()}, other / "model.safetensors")
    return other


def check_same_weights(device, config, reference) -> None:
    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, reference=reference, uaq_scale=1.5)
        own, theirs = scores(policy)
        assert len(own) == len(SAMPLES)
        for i, log_probs in own.items():
            assert not k3(log_probs, theirs[i]).any()


@pytest.mark.parametrize("where", ["where the actor came from", "a conversion of it"])
def test_before_any_update_the_divergence_from_the_same_weights_is_exactly_zero(
    where, backend, qwen2, tmp_path
):
    from qurl_megatron.checkpoints.job import run
    from qurl_megatron.checkpoints.source import open_checkpoint
    from qurl_megatron.checkpoints.to_megatron import to_megatron

    path = ""
    if where == "a conversion of it":
        path = str(tmp_path / "megatron")
        run(to_megatron(open_checkpoint(qwen2), tmp_path / "megatron", uaq_scale=1.5))
    config = recipe(qwen2, dict(tensor=2), dtype="bfloat16")
    run_on_ranks(check_same_weights, 2, backend, tmp_path, config, Reference(path))


def check_other(device, config, reference, expected) -> None:
    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, reference=reference, uaq_scale=1.5)
        before = whole(policy)
        own, theirs = scores(policy)
        for i, (current, frozen) in expected.items():
            torch.testing.assert_close(
                k3(own[i].double(), theirs[i].double()), k3(current, frozen), rtol=1e-3, atol=1e-5
            )
        assert all(torch.equal(value, before[name]) for name, value in whole(policy).items())


@pytest.mark.parametrize(
    "family, layout",
    [
        ("llama", dict(pipeline=2)),  # tied: both stages have the embedding
        pytest.param("llama", dict(tensor=2, data=2), marks=pytest.mark.thorough),
        ("qwen3_moe", dict(tensor=2, pipeline=2)),
    ],
    ids=str,
)
def test_the_divergence_from_a_second_checkpoint_is_that_of_the_two_models(
    family, layout, backend, tmp_path
):
    folder = tiny_checkpoint(tmp_path / "model", family)
    other = moved_away(folder, by=0.02)
    ours, theirs = hf_scores(folder, SAMPLES), hf_scores(other, SAMPLES)
    expected = {i: (ours[i][0], theirs[i][0]) for i in range(len(SAMPLES))}
    assert max(k3(*pair).max() for pair in expected.values()) > 0.01
    config = recipe(folder, layout)
    reference = Reference(str(other), "host")
    run_on_ranks(
        check_other, config.parallel.world_size, backend, tmp_path, config, reference, expected
    )


def check_memories(device, config, path) -> None:
    with megatron_runtime(config.parallel) as ranks:
        seen = []
        for memory in ("device", "host"):
            policy = build(config, ranks, reference=Reference(path, memory))
            tensors = policy._reference.tensors
            there = torch.device("cpu") if memory == "host" else ranks.device
            assert all(t.device == there for t in tensors)
            pinned = memory == "host" and ranks.device.type == "cuda"
            assert all(t.is_pinned() == pinned for t in tensors)
            before = [p.detach().clone() for p in policy.gpt.parameters()]
            kept = [t.clone() for t in tensors]
            seen.append(scores(policy)[1])
            places = [p.data_ptr() for p in policy.gpt.parameters()]
            with policy.reference():
                # Copied in place: whoever holds the parameters, such as the optimizer, still does.
                assert places == [p.data_ptr() for p in policy.gpt.parameters()]
                for held, reference in zip(policy.gpt.parameters(), kept, strict=True):
                    assert torch.equal(held.cpu(), reference.cpu())
            for now, then in zip(policy.gpt.parameters(), before, strict=True):
                assert torch.equal(now, then)
            for now, then in zip(policy._reference.tensors, kept, strict=True):
                assert torch.equal(now, then)
        for i, log_probs in seen[0].items():
            assert torch.equal(log_probs, seen[1][i])


def test_weights_that_wait_on_the_host_score_bit_for_bit_the_same(backend, qwen2, tmp_path):
    other = moved_away(qwen2, by=0.02)
    config = recipe(qwen2, dict(tensor=2), dtype="bfloat16")
    run_on_ranks(check_memories, 2, backend, tmp_path, config, str(other))


def check_after_resume(device, config, run_dir) -> None:
    from qurl_megatron.training import checkpoint

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, reference=Reference())
        began, frozen = scores(policy)
        improve_at(policy, config, 1)
        checkpoint.save(run_dir, policy, TrainState(step=1), keep=1)
        trained, still = scores(policy)
        resumed = build(config, ranks, reference=Reference())
        checkpoint.load(latest(run_dir), resumed)
        own, reference = scores(resumed)
        for i in began:
            assert not torch.equal(trained[i], began[i])
            assert torch.equal(own[i], trained[i])
            for same in (frozen, still, reference):
                assert torch.equal(same[i], began[i])


def test_a_resumed_run_has_the_reference_it_began_with(backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "llama")
    config = recipe(folder, dict(pipeline=2), dtype="bfloat16", kl_coef=0.1)
    run_on_ranks(check_after_resume, 2, backend, tmp_path, config, tmp_path / "run")


def check_refused(device, config, cases) -> None:
    with megatron_runtime(ParallelConfig()) as ranks:
        for path, message in cases:
            with pytest.raises(ConfigError, match=message):
                build(config, ranks, reference=Reference(path))


def test_a_reference_of_another_shape_is_refused_by_name(backend, qwen2, tmp_path):
    more = tiny_checkpoint(tmp_path / "more", "qwen2", vocab_size=160)
    deep = tiny_checkpoint(tmp_path / "deep", "qwen2", num_hidden_layers=2)
    tied = tiny_checkpoint(tmp_path / "tied", "qwen2", tie_word_embeddings=True)
    cases = [
        (str(more), "algo.reference=.*more has vocab=160 where the actor, .*model, has 128"),
        (str(deep), "algo.reference=.*deep has num_layers=2 where the actor, .*model, has 4"),
        (str(tied), "algo.reference=.*tied has tied=True where the actor, .*model, has False"),
        (str(tmp_path / "none"), "none is not a folder; name a checkpoint"),
    ]
    run_on_ranks(check_refused, 1, backend, tmp_path, recipe(qwen2, {}), cases)
