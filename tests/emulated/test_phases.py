"""What a rank does with its GPU in each phase of a run, as the emulated device counts it.

Memory is what the dry run says, nothing of it is read before it is written (it is full of NaN), and
only tensors travel over NCCL.
"""

import contextlib
import json
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.config import AlgoConfig, QuantConfig, SyncConfig
from qurl_megatron.data.responses import Responses
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.metrics import Timer
from qurl_megatron.plan.footprint import footprint
from qurl_megatron.training.state import TrainState, latest
from tests.support.meta_ranks import small_recipe
from tests.support.models import random_samples, tiny_checkpoint
from tests.support.publishing import KeepsVersions
from tests.support.ranks import RankError, run_on_ranks

SLACK = 64 << 10
"""Bytes of random states, flags and norms, beside models of some MiB."""


class Phases:
    """Bytes after each phase, and at most in it, beyond what was there before all; as they were
    asked for, without what the allocator rounds them up to."""

    def __init__(self) -> None:
        self.after: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self._begun, _ = self._asked_for()

    @contextlib.contextmanager
    def __call__(self, name: str):
        torch.cuda.reset_peak_memory_stats()
        yield
        now, most = self._asked_for()
        self.after[name], self.most[name] = now - self._begun, most - self._begun

    def _asked_for(self) -> tuple[int, int]:
        found = torch.cuda.memory_stats()
        return tuple(found[f"requested_bytes.all.{which}"] for which in ("current", "peak"))


class Staged:
    """Bytes of tensors that were copied from the GPU and are still there: now, and at most."""

    def __init__(self) -> None:
        self.live = self.most = 0

    def _counting(self, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def copied(tensor: Tensor, *args, **kwargs) -> Tensor:
            copy = plain(tensor, *args, **kwargs)
            if tensor.is_cuda and copy.device.type == "cpu":
                self.live += copy.nbytes
                self.most = max(self.most, self.live)
                weakref.finalize(copy, self._gone, copy.nbytes)
            return copy

        return copied

    def _gone(self, size: int) -> None:
        self.live -= size

    @contextlib.contextmanager
    def watch(self):
        with contextlib.ExitStack() as stack:
            for name in ("cpu", "to"):
                counting = self._counting(getattr(Tensor, name))
                stack.enter_context(mock.patch.object(Tensor, name, counting))
            yield self


def go_through_all(device, config, out: Path) -> None:
    from emulated_cuda.distributed import object_collectives

    from qurl_megatron.actor.critic import Critic
    from qurl_megatron.actor.policy import Policy
    from qurl_megatron.publish.publisher import Publisher, make_sender
    from qurl_megatron.training import checkpoint
    from qurl_megatron.training.step import improve

    models = (config.model, config.parallel)
    with megatron_runtime(config.parallel) as ranks:
        phase, critic = Phases(), None
        with phase("build"):
            policy = Policy.build(*models, config.optimizer, ranks)
            if config.algo.advantage == "gae":
                critic = Critic.build(*models, config.critic_optimizer, ranks)
        fleet = KeepsVersions(out) if ranks.leads else None
        sender = make_sender(config.sync, config.rollout, policy, out)
        with Publisher(policy, fleet, config.quant, config.sync, sender) as publisher:
            for step in (1, 2):
                with phase(f"step {step}"):
                    samples = Responses.of(random_samples(16))
                    improve(policy, samples, config, step=step, timer=Timer(), critic=critic)
                with phase(f"publish {step}"):
                    publisher.publish(step)
        with Staged().watch() as staged:
            checkpoint.save(out, policy, TrainState(step=2), keep=1)
        with phase("save"):
            checkpoint.save(out, policy, TrainState(step=2), keep=1, critic=critic)
        with phase("load"):
            checkpoint.load(latest(out), policy, critic)
        assert not object_collectives()
        found = {"stage": ranks.pipeline.rank, **vars(phase), "staged": staged.most}
        (out / f"rank-{ranks.rank}.json").write_text(json.dumps(found))


CASES = {
    "TP2 x DP2": dict(tensor=2, data=2),
    "TP2 x PP2, critic": dict(tensor=2, pipeline=2, algo=AlgoConfig(advantage="gae")),
}


@pytest.mark.parametrize("case", CASES)
def test_each_phase_takes_the_memory_that_the_dry_run_says(case, nccl, tmp_path):
    sizes = dict(hidden_size=128, intermediate_size=512, vocab_size=2051)
    folder = tiny_checkpoint(tmp_path / "model", "qwen2", **sizes)
    config = replace(
        small_recipe(folder, **CASES[case]),
        quant=QuantConfig(scheme="int8"),
        sync=SyncConfig(bucket_mb=0.25, dir=str(tmp_path / "versions")),
    )
    out = tmp_path / "out"
    out.mkdir()
    run_on_ranks(go_through_all, config.parallel.world_size, nccl, tmp_path, config, out)
    stages = footprint(config).stages
    for rank in range(config.parallel.world_size):
        real = json.loads((out / f"rank-{rank}.json").read_text())
        stage = stages[real["stage"]]
        # Moments are there before the first step, so that engines find what will stay free.
        for phase, held in real["after"].items():
            assert abs(held - stage.at_rest) < SLACK, phase
        most = {phase: size - stage.at_rest for phase, size in real["most"].items()}
        # A bound: enough, and of a model that is split both ways within a factor of four.
        least = stage.publishing / 4 if case == "TP2 x DP2" else 0
        for publication in ("publish 1", "publish 2"):
            assert least < most[publication] < stage.publishing + SLACK
        assert most["save"] < SLACK
        assert most["load"] < stage.loading + SLACK
        assert max(real["most"]["step 1"], real["most"]["step 2"]) < stage.total
        assert 0 < real["staged"] <= stage.policy.host["save"]


def engines_are_started(*_arguments) -> None:
    """What engines would find in the trainer's hands: reports it, and ends the run."""
    idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    raise ConfigError(f"idle: {idle} bytes")


def resume_until_engines_start(device, config) -> None:
    from qurl_megatron.actor.policy import Policy
    from qurl_megatron.training import checkpoint, train

    with megatron_runtime(config.parallel) as ranks:
        policy = Policy.build(config.model, config.parallel, config.optimizer, ranks)
        checkpoint.save(Path(config.train.run_dir), policy, TrainState(step=1), keep=1)
    prompts = mock.patch.object(train, "read_prompts")  # of a model without a tokenizer
    with mock.patch.object(train, "leading", engines_are_started), prompts as read:
        read.return_value = mock.Mock(remarks=list)
        train.train(config, stop=False)


def test_engines_find_what_the_trainer_does_not_hold(nccl, tmp_path):
    """A resumed rank had its peer's half of the weights beside its own, 23 MiB.

    Tensors above 10 MiB have segments of their own; two of smaller ones share 20 MiB.
    """
    sizes = dict(hidden_size=256, intermediate_size=512, vocab_size=48000)
    config = small_recipe(tiny_checkpoint(tmp_path / "model", "qwen2", **sizes), data=2)
    config = replace(config, train=replace(config.train, run_dir=str(tmp_path / "run")))
    with pytest.raises(RankError, match="idle: ") as told:
        run_on_ranks(resume_until_engines_start, 2, nccl, tmp_path, config)
    # Segments of smaller tensors may be idle in part; with the peer's half it would be 60 MiB.
    assert int(re.search(r"idle: (\d+)", str(told.value))[1]) < 16 << 20


def count_waits(device, config, out: Path) -> None:
    """How often the host waits for the GPU in one update, by the number of its microbatches; and
    while it makes a message."""
    import emulated_cuda

    from qurl_megatron.actor.policy import Policy
    from qurl_megatron.publish.drift import Drift
    from qurl_megatron.publish.shards import RankShards
    from qurl_megatron.training.step import improve
    from qurl_megatron.wire.message import fill, lay_out

    with megatron_runtime(config.parallel) as ranks:
        policy = Policy.build(config.model, config.parallel, config.optimizer, ranks)
        waits = {}
        for count in (2, 4):
            cut = replace(config, train=replace(config.train, micro_batch=16 // count))
            emulated_cuda.reset_synchronizations()
            improve(policy, Responses.of(random_samples(16)), cut, step=1, timer=Timer())
            waits[count] = sum(emulated_cuda.synchronizations().values())
        shards = RankShards(policy, replace(config.quant, scheme="int8"), 1 << 30, 0)
        emulated_cuda.reset_synchronizations()
        made = shards.quantized(0, 1, None, Drift(QuantConfig(diagnostics_every=0)))
        pieces, size = lay_out(made)
        blob = torch.empty(size, dtype=torch.uint8, device=device)
        fill(blob, pieces, [shard.value for shard in made])
        waits["message"] = sum(emulated_cuda.synchronizations().values())
        (out / f"{config.model.path.rpartition('/')[2]}-{ranks.rank}.json").write_text(
            json.dumps(waits)
        )


def test_the_host_waits_for_the_gpu_once_in_a_while_and_not_in_every_layer(nccl, tmp_path):
    found = {}
    for layers in (2, 4):
        folder = tiny_checkpoint(tmp_path / f"layers{layers}", "qwen2", num_hidden_layers=layers)
        run_on_ranks(count_waits, 2, nccl, tmp_path, small_recipe(folder, tensor=2), tmp_path)
        found[layers] = json.loads((tmp_path / f"layers{layers}-0.json").read_text())
    # Megatron's gradient norm fetches that of each parameter, where neither Transformer Engine nor
    # apex has a better one: 7 in a layer, in both updates.
    more_layers = 2 * 7 * 2
    # Whether all scales are finite, all checksums, and the blob for other processes.
    assert [waits.pop("message") for waits in found.values()] == [3, 3]
    assert found[4] == {count: waits + more_layers for count, waits in found[2].items()}
    # A microbatch: seven copies to the GPU; where its response tokens are, in both passes; metrics.
    assert found[2]["4"] - found[2]["2"] <= 2 * 16
