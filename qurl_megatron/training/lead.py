"""Parts that the leading rank alone has, made in the order of their dependencies."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.checkpoints.places import description_of
from qurl_megatron.config import RunConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.fleet.turns import Turns
from qurl_megatron.kit.place import ranks_here
from qurl_megatron.kit.stop import StopRequest
from qurl_megatron.observe.text import how_many
from qurl_megatron.rewards import RewardPool
from qurl_megatron.rewards.workers import EnvironmentPool
from qurl_megatron.tensors.arch import arch_of, facts_of, read_stop_ids
from qurl_megatron.training.journal import Journal
from qurl_megatron.training.rollout_file import Proximal
from qurl_megatron.training.rollout_source import RolloutSource
from qurl_megatron.training.state import Claim, TrainState
from qurl_megatron.wire.lease import Owner


@dataclass(frozen=True)
class Lead:
    """The engines, the source of responses, and the journal that takes the metrics."""

    fleet: Fleet
    source: RolloutSource
    journal: Journal

    def evaluate(self, step: int) -> float:
        """Return the score on held-out prompts.

        Raises:
            Interrupted, EngineError, ConfigError, RewardDown: as ``RolloutSource.evaluate``.
        """
        samples, tally = self.source.evaluate()
        self.source.tell_unscored(tally, step)
        self.source.tell_left_out(samples, step)
        return self.journal.evaluated(step, samples, tally)

    def write(
        self, step: int, metrics: Mapping[str, float], advantages: Mapping[int, float]
    ) -> None:
        """Write a step's metrics and examples, and the engines' events meanwhile."""
        self.journal.step(step, {**metrics, **self.happened(step)})
        self.journal.keep_examples(step, self.source.kept, advantages)

    def keep_rollout(self, step: int, proximal: Proximal) -> None:
        """Save all responses of a step, with their log-probs under the policy before the update."""
        self.journal.keep_rollout(step, self.source.samples, proximal)

    def happened(self, step: int) -> dict[str, float]:
        """Record the engines' events since the last call; return their metrics."""
        events, metrics = self.fleet.drain()
        self.journal.happened(step, events)
        return metrics


@contextmanager
def leading(
    claimed: Claim,
    stop: StopRequest,
    state: TrainState,
    weight_norm: float,
    prompts: PromptStream,
    remarks: Sequence[str] = (),
) -> Iterator[Lead]:
    """Inside, engines and workers are up; leaving ends them.

    Args:
        claimed: the run's directory, given back on leaving.
        state, prompts: the points that the run goes on from.
        weight_norm, remarks: as for ``Journal``.

    Raises:
        Interrupted: a stop was requested while engines were waited for.
        ConfigError, EngineError: engines cannot be used, or do not come.
    """
    config = claimed.config
    with ExitStack() as stack:
        stack.enter_context(claimed)
        print(_engines_to_come(config, claimed.run_dir), flush=True)
        fleet = stack.enter_context(_fleet(config, claimed.run_dir, stop, prompts.tokenizer))
        rewards = stack.enter_context(RewardPool(config.reward))
        turns = None
        if config.rollout.environment:
            pool = stack.enter_context(EnvironmentPool(config.rollout))
            turns = Turns(pool, prompts.tokenizer, chat=config.data.chat)
        journal = stack.enter_context(Journal(claimed, state, weight_norm, remarks))
        source = stack.enter_context(
            RolloutSource(
                config, state, prompts, fleet, rewards, journal, turns, stop=lambda: bool(stop)
            )
        )
        yield Lead(fleet, source, journal)


def _fleet(config: RunConfig, run_dir: Path, stop: StopRequest, tokenizer: Tokenizer) -> Fleet:
    described = description_of(config.model.path)
    return Fleet(
        config.rollout,
        model_dir=Path(config.model.path),
        scheme=config.quant.scheme,
        dtype=config.model.dtype,
        log_dir=run_dir / "logs",
        vocabulary=arch_of(described).vocab,
        facts=facts_of(described),
        stops=read_stop_ids(described, tokenizer.stop_ids()),
        owner=Owner.of(run_dir),
        trainer_ranks=ranks_here(os.environ),
        stop=lambda: bool(stop),
    )


def _engines_to_come(config: RunConfig, run_dir: Path) -> str:
    rollout = config.rollout
    if places := rollout.rendezvous or ", ".join(rollout.urls):
        return f"looking for engines at {places}"
    engines = how_many(rollout.engines, f"{rollout.backend} engine")
    return f"starting {engines}; logs are in {run_dir / 'logs'}"
