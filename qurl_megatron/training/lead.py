"""The leading rank's part of a step: responses from the engines, their grades, and the journal.

Prompts are drawn in the recipe's order and answered in the background, ahead of the step that
trains on them where ``rollout.max_staleness`` allows it (``ahead``).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from qurl_megatron.config import RunConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.data.responses import Responses
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.collect import EVALUATION, collect, greedy
from qurl_megatron.fleet.fleet import IN_ALL, Fleet
from qurl_megatron.fleet.turns import Turns
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.errors import Interrupted
from qurl_megatron.kit.stop import stop_comes
from qurl_megatron.observe.metrics import Mean, Metric, Timer
from qurl_megatron.observe.text import how_many
from qurl_megatron.observe.timeline import Span
from qurl_megatron.rewards import RewardPool, overlong_penalty
from qurl_megatron.rewards.pool import Tally, graded, refuse_none_scored
from qurl_megatron.rewards.workers import Abandoned
from qurl_megatron.training.ahead import Ahead
from qurl_megatron.training.groups import (
    Draft,
    conversation_metrics,
    example_indices,
    fill,
    reward_metrics,
    routing_metrics,
    sample_metrics,
    useful,
)
from qurl_megatron.training.journal import Journal
from qurl_megatron.training.state import TrainState
from qurl_megatron.types import Prompt, Sample


@dataclass(frozen=True)
class Rollout:
    """Facts about one step's responses, on every rank."""

    metrics: dict[str, Metric]
    tokens: int  # that the engines generated, dropped groups included
    seconds: float  # that the engines took
    cursor: dict[str, Any]  # where a run that trains on this step goes on drawing prompts


class Lead:
    """Use as a context manager: leaving it gives up the batches under way."""

    def __init__(
        self,
        config: RunConfig,
        state: TrainState,
        prompts: PromptStream,
        fleet: Fleet,
        rewards: RewardPool,
        journal: Journal,
        turns: Turns | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            state: the state that the run goes on from.
            prompts: positioned where the run goes on.
            rewards: started.
            journal: takes the alarms and the progress.
            turns: with an environment, which answers.
            stop: true once a person wants the run to end.
        """
        self.config, self.prompts, self.fleet = config, prompts, fleet
        self.rewards, self.journal = rewards, journal
        self.samples: list[Sample] = []
        """All samples of the step at hand, where the recipe saves them."""
        self.kept: dict[int, Sample] = {}
        """Responses of the step at hand that are examples, by their places in it."""
        self._turns, self._stop = turns, stop
        self._remarked: set[str] = set()  # remarks that are made once
        self._drawing, self._grading = threading.Lock(), threading.Lock()
        self._ahead = Ahead(
            self._draw,
            self._produce,
            prompts.state_dict,
            first=state.step + 1,
            last=config.train.steps,
            max_staleness=config.rollout.max_staleness,
        )

    def __enter__(self) -> "Lead":
        return self

    def __exit__(self, *exception: object) -> None:
        self.rewards.leave()  # so that a slow server is not waited for
        if self._turns:
            self._turns.pool.leave()
        self._ahead.__exit__(*exception)

    def published(self, version: int) -> None:
        """Begin the batches that may be generated from ``version`` while the policy trains."""
        if self.config.rollout.max_staleness:
            self._ahead.admit(version)

    def take(self, step: int, timer: Timer) -> tuple[Responses, Rollout]:
        """Return the graded responses of one step, generated ahead or now.

        Raises:
            Interrupted: a stop was requested; nothing is lost, because the same prompts come again
                after a restart.
            EngineError: no engine is left; after ``retry`` the step can be taken again.
            ConfigError, RewardDown: a response has no score and the recipe ends the run then; no
                response has one; or the journal cannot be written.
        """
        if self._stop():
            raise Interrupted(f"stopped before the rollout of step {step}")
        if self.journal.refused:
            raise self.journal.refused
        self.journal.progress.phase("rollout")
        self._ahead.admit(step - 1)
        start = time.perf_counter()
        draft, cursor = self._ahead.take(step, self._stop)
        waited = time.perf_counter() - start
        # The trainer's waiting time, grading last; the rest was hidden behind its own work.
        grading = min(draft.grading_s, waited)
        timer.add("rollout", waited - grading)
        timer.add("reward", grading)
        samples = [sample for group in draft.chosen() for sample in group]
        metrics = self._metrics(step, draft, samples)
        self._raise_alarms(step, draft, samples)
        self.samples = samples if self.config.train.save_rollouts else []
        responses = Responses.of(samples)
        count = self.config.observe.samples
        self.kept = {index: samples[index] for index in example_indices(responses.summary, count)}
        if self.config.rollout.colocate:  # until the next version the trainer has the memory
            with suppress(EngineError):  # those that refuse are out; the next version heals them
                self.fleet.release()
        return responses, Rollout(metrics, draft.generated_tokens, draft.generating_s, cursor)

    def retry(self) -> None:
        """Generate the unanswered batches, now that the engines have the weights again."""
        self._ahead.retry()

    def evaluate(self, state: TrainState) -> float:
        """Return the score of ``state`` on the held-out prompts, at rollout precision.

        Raises:
            Interrupted: a stop was requested meanwhile.
            EngineError, ConfigError, RewardDown: as ``take``.
        """
        samples, tally = self.answer_held_out()
        self._tell_unscored(tally, state.step)
        self._tell_left_out(samples, state.step)
        return self.journal.evaluated(state, samples, tally)

    def answer_held_out(self) -> tuple[list[Sample], Tally]:
        """Return graded responses to the held-out prompts."""
        train, prompts = self.config.train, self.prompts.held_out
        self.journal.progress.phase("evaluate")
        if train.eval_samples == 1:
            limit = self.config.rollout.max_new_tokens
            samples = greedy(self.fleet, prompts, limit, turns=self._turns, stop=self._stop)
        else:
            sampling = replace(self.config.rollout, samples_per_prompt=train.eval_samples)
            # One seed for all evaluations: they differ by the policy, not by luck.
            samples = collect(
                self.fleet,
                prompts,
                sampling,
                seed=train.seed,
                step=EVALUATION,
                turns=self._turns,
                stop=self._stop,
            )
        try:
            samples, tally = self._graded(samples, self._stop)
        except Abandoned:
            raise Interrupted("stopped while an evaluation was scored") from None
        refuse_none_scored(tally, self.config.reward.setting)
        return samples, tally

    def write(
        self, step: int, metrics: Mapping[str, float], advantages: Mapping[int, float]
    ) -> None:
        """Write a step's metrics and examples, and the engines' events meanwhile."""
        self.journal.step(step, {**metrics, **self.drain_events(step)})
        self.journal.keep_examples(step, self.kept, advantages)

    def drain_events(self, step: int) -> dict[str, float]:
        """Record the engines' events since the last call; return their metrics."""
        events, metrics = self.fleet.drain()
        self.journal.record_events(step, events)
        return metrics

    def recover(self) -> None:
        """Wait until an engine can take the weights in again, when none is left.

        Raises:
            Interrupted: a stop was requested meanwhile.
            EngineError: none came back.
        """
        self.journal.progress.phase("waiting for an engine")
        end = time.monotonic() + IN_ALL * self.config.rollout.start_limit_s
        while True:
            try:
                self.fleet.await_recruits(timeout_s=1.0)
                return
            except EngineError:
                hopeless = not self.fleet.engines() or time.monotonic() > end
                if stop_comes(self._stop) if hopeless else self._stop():
                    raise Interrupted("stopped while an engine was waited for") from None
                if hopeless:
                    raise

    def _tell_unscored(self, tally: Tally, step: int) -> None:
        """Say why responses have no score, each cause once in a run; metrics go on counting."""
        if new := tally.causes.keys() - self._remarked:
            self._remarked |= new
            self.journal.alarm(
                "reward",
                f"{tally.failed} of {how_many(tally.responses, 'response')} could not be scored "
                f"and got reward.failed={self.config.reward.failed:g}: {tally.said(new)}",
                step,
            )

    def _tell_left_out(self, samples: Sequence[Sample], step: int) -> None:
        """Say once per start that the environment's words did not fit."""
        count = sum(sample.left_out for sample in samples)
        if not count or "left_out" in self._remarked:
            return
        self._remarked.add("left_out")
        self.journal.alarm(
            "rollout",
            f"{count} of {how_many(len(samples), 'conversation')} ended early: what the "
            "environment said next did not fit into rollout.max_new_tokens="
            f"{self.config.rollout.max_new_tokens}, which all turns and its words share, or into "
            "the model's context; raise it, have the environment say less, or leave out long "
            "prompts (data.max_prompt_tokens)",
            step,
        )

    def _metrics(self, step: int, draft: Draft, samples: list[Sample]) -> dict[str, Metric]:
        config, rollout, reward = self.config, self.config.rollout, self.config.reward
        # Groups that only fill up the batch teach nothing, so their rewards are left out.
        learnt: list[Sample] = []
        for group in draft.chosen():
            if useful(group) or not config.algo.dynamic_sampling:
                learnt += group
        metrics = sample_metrics(samples, newest=step - 1) | reward_metrics(learnt)
        metrics |= draft.metrics()
        # Ahead admits no batch too early, and no engine serves an older version than it confirmed.
        assert metrics["sync/staleness"].value <= rollout.max_staleness
        if self._turns:
            metrics |= conversation_metrics(samples)
        if self.fleet.routed:
            metrics |= routing_metrics(samples)
        metrics |= draft.graded.metrics()
        if reward.overlong_fraction > 0:
            limit, fraction = rollout.max_new_tokens, reward.overlong_fraction
            penalties = 0.0
            for sample in samples:
                length = sample.written_tokens
                penalties += overlong_penalty(length, limit, fraction, reward.overlong_penalty)
            metrics["reward/overlong_penalty"] = Mean(penalties, len(samples))
        return metrics

    def _raise_alarms(self, step: int, draft: Draft, samples: list[Sample]) -> None:
        self._tell_left_out(samples, step)
        self._tell_unscored(draft.graded, step)
        if draft.unfilled:
            self.journal.alarm(
                "sampling",
                f"{draft.unfilled} of {draft.group_count} groups have answers that are all right "
                f"or all wrong, after {len(draft.groups)} prompts; they fill up the batch and "
                "teach nothing",
                step,
            )

    def _draw(self) -> tuple[dict[str, Any], Draft]:
        algo, count = self.config.algo, self.config.data.prompts_per_step
        with self._drawing:
            cursor = self.prompts.state_dict()
            prompts = self.prompts.next_batch(count)
        return cursor, Draft(prompts, count, algo.max_refills if algo.dynamic_sampling else None)

    def _produce(self, step: int, draft: Draft, stop: Callable[[], bool]) -> Draft:
        """Have one step's prompts answered and graded; runs on a thread of its own."""
        config, timeline = self.config, self.journal.timeline

        def answer(prompts: Sequence[Prompt]) -> list[Sample]:
            start = now()
            samples = collect(
                self.fleet,
                prompts,
                config.rollout,
                seed=config.train.seed,
                step=step,
                stop=stop,
                turns=self._turns,
            )
            generated = now()
            samples, tally = self._graded(samples)
            draft.graded.add(tally)
            refuse_none_scored(draft.graded, config.reward.setting)
            end = now()
            timeline.add(Span("engines", "rollout", step, start, generated))
            timeline.add(Span("engines", "reward", step, generated, end))
            draft.generating_s += generated - start
            draft.grading_s += end - generated
            return samples

        def draw(count: int) -> list[Prompt]:
            with self._drawing:
                return self.prompts.next_batch(count)

        return fill(draft, answer, draw)

    def _graded(
        self, samples: list[Sample], stop: Callable[[], bool] = lambda: False
    ) -> tuple[list[Sample], Tally]:
        with self._grading:  # the workers take one batch at a time
            results, scores = graded(samples, self.rewards, self.prompts.tokenizer, stop)
        return results, Tally.of(scores)
