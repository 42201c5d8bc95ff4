"""Saved and loaded, a policy goes on as if nothing had happened, in another layout too."""

import pytest
import torch

from qurl_megatron.config import ParallelConfig
from qurl_megatron.data.responses import Responses
from qurl_megatron.errors import ConfigError
from qurl_megatron.observe.metrics import Timer
from qurl_megatron.runtime.megatron import megatron_runtime
from qurl_megatron.testing.models import random_samples, tiny_checkpoint
from qurl_megatron.testing.ranks import run_on_ranks
from qurl_megatron.training.state import TrainState, latest
from tests.distributed import test_critic
from tests.distributed.test_policy import build, recipe, relative, whole


def improve_at(policy, config, step):
    from qurl_megatron.training.step import improve

    improve(policy, Responses.of(random_samples(16)), config, step=step, timer=Timer())


def save_then_go_on(device, config, run_dir, out):
    from qurl_megatron.training import checkpoint

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        improve_at(policy, config, 1)
        state = TrainState(step=1, cursor={"epoch": 0}, accuracy_before=0.25, accuracy=0.5)
        checkpoint.save(run_dir, policy, state, keep=2)
        improve_at(policy, config, 2)
        weights = whole(policy)
        if ranks.leads:
            torch.save(weights, out)


def load_and_go_on(device, config, run_dir, out):
    from qurl_megatron.training import checkpoint

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        checkpoint.load(latest(run_dir), policy)
        assert TrainState.read(latest(run_dir)) == TrainState(1, {"epoch": 0}, 0.25, 0.5)
        improve_at(policy, config, 2)
        weights = whole(policy)
        if ranks.leads:
            torch.save(weights, out)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "before, after, exact",
    [
        (dict(tensor=2), dict(tensor=2), True),
        (dict(tensor=2, data=2), dict(tensor=2, data=2), True),
        (dict(tensor=2, pipeline=2), dict(tensor=1), False),
        (dict(data=2), dict(tensor=2), False),
        (dict(context=2), {}, False),
    ],
)
def test_a_loaded_policy_takes_the_same_next_step(dtype, before, after, exact, backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "qwen2")
    saving, loading = (recipe(folder, layout, dtype=dtype) for layout in (before, after))
    run = tmp_path / "run"
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    run_on_ranks(save_then_go_on, saving.parallel.world_size, backend, tmp_path, saving, run, a)
    run_on_ranks(load_and_go_on, loading.parallel.world_size, backend, tmp_path, loading, run, b)
    expected, actual = torch.load(a), torch.load(b)
    for name in expected:
        if exact:
            assert torch.equal(actual[name], expected[name]), name
        else:
            assert relative(actual[name], expected[name]) < (
                1e-5 if dtype == "float32" else 1e-3
            ), name


def build_both(config, ranks):
    critic = test_critic.build(config, ranks)
    critic.folder = config.model.path
    return build(config, ranks), critic


def go_on_with_both(policy, critic, config, out):
    """A second step of both; their weights, the critic's under its own prefix."""
    improve_at(policy, config, 2)
    test_critic.learn(critic, 1)
    learned = whole(test_critic.Named(critic))
    weights = whole(policy) | {f"critic.{name}": value for name, value in learned.items()}
    if policy.ranks.leads:
        torch.save(weights, out)


def save_both_then_go_on(device, config, run_dir, out):
    from qurl_megatron.training import checkpoint

    with megatron_runtime(config.parallel) as ranks:
        policy, critic = build_both(config, ranks)
        improve_at(policy, config, 1)
        test_critic.learn(critic, 0)
        saved = whole(policy)
        checkpoint.save(run_dir, policy, TrainState(step=1), keep=1, critic=critic)
        if ranks.leads:
            torch.save(saved, run_dir / "saved.pt")
        go_on_with_both(policy, critic, config, out)


def load_both_and_go_on(device, config, run_dir, out):
    from qurl_megatron.training import checkpoint

    with megatron_runtime(config.parallel) as ranks:
        policy, critic = build_both(config, ranks)
        checkpoint.load(latest(run_dir), policy, critic)
        go_on_with_both(policy, critic, config, out)


@pytest.mark.parametrize(
    "before, after, dtype, distributed",
    [
        (dict(tensor=2, data=2), dict(tensor=2, data=2), "bfloat16", True),
        (dict(pipeline=2), dict(pipeline=2), "bfloat16", False),
        (dict(tensor=2, pipeline=2), dict(data=2), "float32", True),
    ],
)
def test_a_loaded_critic_takes_the_same_next_step(
    before, after, dtype, distributed, backend, tmp_path
):
    folder = tiny_checkpoint(tmp_path / "model", "llama")
    saving, loading = (
        recipe(folder, layout, dtype=dtype, distributed=distributed) for layout in (before, after)
    )
    run, a, b = (tmp_path / name for name in ("run", "a.pt", "b.pt"))
    run_on_ranks(
        save_both_then_go_on, saving.parallel.world_size, backend, tmp_path, saving, run, a
    )
    run_on_ranks(
        load_both_and_go_on, loading.parallel.world_size, backend, tmp_path, loading, run, b
    )
    expected, actual = torch.load(a), torch.load(b)
    assert expected.keys() == actual.keys() and any("critic." in name for name in expected)
    for name in expected:
        if before == after:
            assert torch.equal(actual[name], expected[name]), name
        else:
            assert relative(actual[name], expected[name]) < 1e-5, name


def test_a_run_with_a_critic_converts_to_the_policy_alone(backend, tmp_path):
    from qurl_megatron.convert import job
    from qurl_megatron.convert.anykind import open_any
    from qurl_megatron.convert.inspect import inspect, text
    from qurl_megatron.convert.to_huggingface import to_huggingface
    from qurl_megatron.weights import HfReader, open_checkpoint

    config = recipe(tiny_checkpoint(tmp_path / "model", "qwen2"), dict(tensor=2), dtype="bfloat16")
    run = tmp_path / "run"
    run_on_ranks(save_both_then_go_on, 2, backend, tmp_path, config, run, tmp_path / "a.pt")
    facts = inspect(open_any(run))
    assert facts["critic"] and "a critic, which no conversion takes along" in text(facts)
    job.run(to_huggingface(open_checkpoint(run), tmp_path / "hf"))
    masters, converted = torch.load(run / "saved.pt"), HfReader(tmp_path / "hf")
    assert converted.names() == masters.keys()
    # The 7 tensors of a layer, all layers' in one; embedding, last norm and output layer.
    assert facts["weights"] == {"bfloat16": 7 + 3}
    for name, value in masters.items():
        assert torch.equal(converted.whole(name).float(), value.to(torch.bfloat16).float()), name


def load_across(device, config, with_critic, without):
    from qurl_megatron.training import checkpoint

    with megatron_runtime(config.parallel) as ranks:
        policy, critic = build_both(config, ranks)
        with pytest.raises(ConfigError, match="has a critic, and algo.advantage needs none"):
            checkpoint.load(latest(with_critic), policy)
        with pytest.raises(ConfigError, match="has no critic, and algo.advantage needs one"):
            checkpoint.load(latest(without), policy, critic)


def test_a_checkpoint_and_a_run_must_agree_on_whether_there_is_a_critic(backend, tmp_path):
    config = recipe(tiny_checkpoint(tmp_path / "model", "qwen2"), {})
    a, b = tmp_path / "a", tmp_path / "b"
    run_on_ranks(save_both_then_go_on, 1, backend, tmp_path, config, a, tmp_path / "a.pt")
    run_on_ranks(save_then_go_on, 1, backend, tmp_path, config, b, tmp_path / "b.pt")
    run_on_ranks(load_across, 1, backend, tmp_path, config, a, b)


def load_into_another_model(device, folder, run_dir):
    from qurl_megatron.training import checkpoint

    config = recipe(folder, {})
    with megatron_runtime(ParallelConfig()) as ranks:
        policy = build(config, ranks)
        with pytest.raises(ConfigError, match="cannot be loaded into this model"):
            checkpoint.load(latest(run_dir), policy)


def test_a_checkpoint_of_another_model_is_refused(backend, tmp_path):
    small = tiny_checkpoint(tmp_path / "small", "qwen2")
    large = tiny_checkpoint(tmp_path / "large", "qwen2", intermediate_size=128)
    run = tmp_path / "run"
    run_on_ranks(save_then_go_on, 1, backend, tmp_path, recipe(small, {}), run, tmp_path / "a.pt")
    run_on_ranks(load_into_another_model, 1, backend, tmp_path, large, run)


def test_an_unfinished_checkpoint_does_not_exist(tmp_path):
    whole, torn = tmp_path / "checkpoints/step_000001", tmp_path / "checkpoints/step_000002"
    for folder in (whole, torn, tmp_path / "checkpoints/.step_000003"):
        folder.mkdir(parents=True)
    TrainState(step=1).write(whole)
    assert latest(tmp_path) == whole
    assert latest(tmp_path / "empty") is None
