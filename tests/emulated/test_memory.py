"""What the phases of a run take besides, on a GPU and its host, against the formulas."""

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
from qurl_megatron.config import QuantConfig, SyncConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.plan.footprint import footprint
from qurl_megatron.training.state import TrainState
from tests.emulated.phases import SLACK, Phases, build, save_and_load, train_and_publish
from tests.support.meta_ranks import small_recipe
from tests.support.models import tiny_checkpoint
from tests.support.ranks import RankError, run_on_ranks

SIZES = dict(hidden_size=128, intermediate_size=512, vocab_size=2051)


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


def count_all(device, config, out: Path) -> None:
    from qurl_megatron.training import checkpoint

    with megatron_runtime(config.parallel) as ranks:
        phase = Phases()
        policy, critic = build(phase, config, ranks)
        train_and_publish(phase, config, policy, critic, out)
        with Staged().watch() as staged:
            checkpoint.save(out, policy, TrainState(step=2), keep=1)
        save_and_load(phase, policy, critic, out)
        found = {**vars(phase), "staged": staged.most}
        (out / f"rank-{ranks.rank}.json").write_text(json.dumps(found))


def test_what_a_phase_takes_is_what_the_formulas_say(nccl, tmp_path):
    """The formulas are bounds: what they say is enough, and no more than a few times too much."""
    folder = tiny_checkpoint(tmp_path / "model", "qwen2", **SIZES)
    config = replace(
        small_recipe(folder, tensor=2, data=2),
        quant=QuantConfig(scheme="int8"),
        sync=SyncConfig(bucket_mb=0.25, dir=str(tmp_path / "versions")),
    )
    out = tmp_path / "out"
    out.mkdir()
    run_on_ranks(count_all, config.parallel.world_size, nccl, tmp_path, config, out)
    stage = footprint(config).stages[0]
    for rank in range(config.parallel.world_size):
        real = json.loads((out / f"rank-{rank}.json").read_text())
        most = {name: size - stage.at_rest for name, size in real["most"].items()}
        print(rank, most, real["staged"], stage)
        # Moments are there before the first step, so that engines find what will stay free.
        assert abs(real["after"]["build"] - stage.at_rest) < SLACK
        for publication in ("publish 1", "publish 2"):
            assert stage.publishing / 4 < most[publication] < stage.publishing + SLACK
        assert most["save"] < SLACK
        assert most["load"] < stage.loading + SLACK
        assert 0 < real["staged"] <= stage.policy.host["save"]


def engines_are_started(*_arguments) -> None:
    """What engines would find in the trainer's hands: reports it, and ends the run."""
    idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    raise ConfigError(f"idle: {idle} bytes")


def resume_until_engines_start(device, config) -> None:
    from qurl_megatron.training import checkpoint, train

    with megatron_runtime(config.parallel) as ranks:
        policy, _ = build(Phases(), config, ranks)
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
