"""The phases of a run on one rank, and the memory of the emulated device after each."""

import contextlib

import torch

from qurl_megatron.data.responses import Responses
from qurl_megatron.observe.metrics import Timer
from qurl_megatron.training.state import TrainState, latest
from tests.support.models import random_samples
from tests.support.publishing import KeepsVersions

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


def build(phase, config, ranks):
    from qurl_megatron.actor.critic import Critic
    from qurl_megatron.actor.policy import Policy

    with phase("build"):
        policy = Policy.build(config.model, config.parallel, config.optimizer, ranks)
        critic = None
        if config.algo.advantage == "gae":
            critic = Critic.build(
                config.model, config.parallel, config.critic, config.optimizer, ranks
            )
    return policy, critic


def train_and_publish(phase, config, policy, critic, out) -> None:
    from qurl_megatron.publish.publisher import Publisher, make_sender
    from qurl_megatron.training.step import improve

    fleet = KeepsVersions(out) if policy.ranks.leads else None
    sender = make_sender(config.sync, config.rollout, policy, out)
    with Publisher(policy, fleet, config.quant, config.sync, sender) as publisher:
        for step in (1, 2):
            with phase(f"step {step}"):
                samples = Responses.of(random_samples(16))
                improve(policy, samples, config, step=step, timer=Timer(), critic=critic)
            with phase(f"publish {step}"):
                publisher.publish(step)


def save_and_load(phase, policy, critic, out) -> None:
    from qurl_megatron.training import checkpoint

    with phase("save"):
        checkpoint.save(out, policy, TrainState(step=2), keep=1, critic=critic)
    with phase("load"):
        checkpoint.load(latest(out), policy, critic)
