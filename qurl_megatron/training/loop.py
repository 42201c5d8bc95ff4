"""The main loop: rollout, reward, advantage, score, update, publish; it reads like the algorithm.

Every rank runs it. The leading rank alone talks to engines, files and the terminal (``on_lead``);
all ranks get the result or the exception. Everything between is the same program on all of them.

A synchronous run is reproducible: prompts, seeds and the order of samples follow from the recipe
and the step, and a checkpoint holds the state between two steps. Interrupted and resumed, a run
writes the same metrics as one that was left alone, bit for bit on the same layout and machine with
embedded engines. On another machine collectives and matrix products add in another order, and
SGLang's results depend on the other requests of a batch.
"""

import math
from collections import ChainMap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from qurl_megatron.actor.critic import Critic
from qurl_megatron.actor.megatron import everywhere, held, on_lead, release_memory, together
from qurl_megatron.actor.policy import Policy
from qurl_megatron.config import RunConfig
from qurl_megatron.data.responses import Responses
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.offered import Offering
from qurl_megatron.kit.errors import ConfigError, Foreseen, Interrupted
from qurl_megatron.observe.failures import HERE
from qurl_megatron.observe.metrics import Metric, Timer, merge, values
from qurl_megatron.observe.timeline import HALTED
from qurl_megatron.publish.drift import of_an_update
from qurl_megatron.publish.publisher import Publisher
from qurl_megatron.training import checkpoint
from qurl_megatron.training.guard import Collapse, NotFinite, Verdict, check_losses, examine, judge
from qurl_megatron.training.layout import deliver
from qurl_megatron.training.lead import Lead, Rollout
from qurl_megatron.training.state import TrainState
from qurl_megatron.training.step import improve

HEALS = 3  # times that one step waits for engines to come back

T = TypeVar("T")


@dataclass
class Run:
    """A run on one rank."""

    config: RunConfig
    policy: Policy
    critic: Critic | None
    publisher: Publisher
    lead: Lead | None  # on the leading rank alone
    state: TrainState  # after the newest step, the same on every rank
    saved: int | None  # the newest step that is on disk
    engines: Offering | None = None  # of this machine, on its first rank

    def to_the_end(self) -> None:
        """Run steps until the last one or a stop; ``state`` is then also on disk.

        Raises:
            EngineError, RewardDown, ConfigError: no engine or reward could be used, or no version
                written; the trained steps are on disk all the same.
            Collapse: the guard halted the run, or numbers are not finite; such a step reaches
                neither the disk nor the engines.
        """
        config = self.config
        try:
            self._publish(self.state.step)
            self._on_lead(lambda lead: lead.published(self.state.step))
            if self.state.unevaluated or (self.state.step == 0 and config.train.eval_prompts):
                self._make_up_for_an_evaluation()
        except Foreseen as failure:
            return self._end(failure)
        while self.state.step < config.train.steps:
            try:
                self._step()
            except NotFinite as error:
                raise self._broken(error) from error
            except Foreseen as failure:
                return self._end(failure)
            if config.checkpoint.every and self.state.step % config.checkpoint.every == 0:
                self._save()
        self._end()

    def _step(self) -> None:
        """Run one step: rollout, update, guard, publication, metrics, evaluation.

        Raises:
            Foreseen: a cause that ends the run, on every rank. Before the update the state is the
                previous step's; after it, it is this step's, and its metrics are written.
            NotFinite: the update broke the policy.
        """
        config, step = self.config, self.state.step + 1
        HERE.step, HERE.version, HERE.phase = step, self.state.step, "rollout"
        timer = self.lead.journal.timer(step) if self.lead else Timer(HERE.enter)

        samples, rollout = self._healed(lambda: self._samples(step, timer), step - 1)
        lending: AbstractContextManager = nullcontext()
        if self.engines and config.rollout.colocate:
            lending = self.engines.lent()
        with lending:
            measured, weight_norm, advantages = self._update(samples, step, timer)
            if config.rollout.colocate:
                release_memory()  # for engines that take their memory back, or are started again
        self.state = replace(self.state, step=step, cursor=rollout.cursor)

        verdict = self._judge(values(merge([measured, rollout.metrics])))

        def write(published: dict[str, Metric]) -> None:
            sent = of_an_update(merge(everywhere({**published, **timer.metrics()})))
            merged = merge([measured, sent])
            train_s = merged["time/train"].value
            metrics = values(merge([merged, rollout.metrics])) | verdict.metrics
            metrics["throughput/rollout_tokens_per_s"] = rollout.tokens / rollout.seconds
            metrics["throughput/train_tokens_per_s"] = sum(samples.summary.totals) / train_s
            metrics["optimizer/weight_norm"] = weight_norm
            self._on_lead(lambda lead: lead.write(step, metrics, advantages))

        try:
            if verdict.halt:
                raise Collapse(f"the guard halted the run: {verdict.reason}")
            with timer.phase("publish"):
                published = self._publish(step)
            HERE.version = step
            self._on_lead(lambda lead: lead.published(step))
        except Foreseen:
            write({})
            raise
        write(published)
        last, every = step == config.train.steps, config.train.eval_every
        if config.train.eval_prompts and (last or (every > 0 and step % every == 0)):
            self._evaluate()

    def _samples(self, step: int, timer: Timer) -> tuple[Responses, Rollout]:
        """Return one step's graded samples, on every rank."""
        responses: Responses | None = None  # stays on the leading rank: tokens are never pickled

        def take(lead: Lead) -> Rollout:
            nonlocal responses
            responses, rollout = lead.take(step, timer)
            return rollout

        rollout = self._on_lead(take)
        return deliver(responses), rollout

    def _update(
        self, samples: Responses, step: int, timer: Timer
    ) -> tuple[dict[str, Metric], float, dict[int, float]]:
        """Update on one step's samples.

        Returns:
            The metrics of all ranks, the norm of the weights, and the advantages of the examples.

        Raises:
            NotFinite: the policy is broken, on every rank.
        """
        models = [model for model in (self.policy, self.critic) if model]
        scored = None
        if lead := self.lead:
            scored = partial(lead.journal.keep_rollout, step, lead.samples)

        def act() -> tuple[dict[str, Metric], dict[int, float], float]:
            metrics, advantages = improve(
                self.policy,
                samples,
                self.config,
                step=step,
                timer=timer,
                critic=self.critic,
                scored=scored,
            )
            return metrics, advantages, examine(models)

        metrics_by_rank, advantages_by_rank, squares = zip(*together(act), strict=True)
        measured = merge(metrics_by_rank)
        check_losses(values(measured))
        return measured, math.sqrt(sum(squares)), dict(ChainMap(*advantages_by_rank))

    def _broken(self, error: NotFinite) -> Collapse:
        fix = "start again with a smaller optimizer.lr"
        if self.saved is not None:
            fix += f", to go on from step {self.saved}"
        return Collapse(
            f"step {self.state.step + 1} broke the policy: {error}; nothing of it is published or "
            f"saved; {fix}"
        )

    def _judge(self, metrics: dict[str, float]) -> Verdict:
        """Return the guard's verdict on the step before its version is published, on all ranks."""
        step = self.state.step
        verdict = judge(self.config.guard, self.state.guard, step, metrics)
        self.state = replace(self.state, guard=verdict.counts)
        if verdict.reason:
            consequence = HALTED if verdict.halt else "warning"
            alarm = f"{consequence}: {verdict.reason}"
            self._on_lead(lambda lead: lead.journal.alarm("guard", alarm, step))
        return verdict

    def _publish(self, version: int, failure: EngineError | None = None) -> dict[str, Metric]:
        """Publish a version; where no engine takes it, publish again to those that come back.

        Args:
            failure: the reason, if all engines are known to be gone; they are waited for first.

        Returns:
            This rank's metrics of the publication.

        Raises:
            EngineError, ConfigError: none came back or took it, on every rank.
        """
        for _ in range(HEALS):
            if failure is not None:
                try:
                    self._on_lead(lambda lead: lead.recover())
                except (EngineError, ConfigError) as gone:
                    raise type(gone)(f"{failure}; {gone}") from gone
            try:
                return self.publisher.publish(version)
            except EngineError as error:
                failure = error
        assert failure is not None, "it has been tried"
        raise failure

    def _healed(self, act: Callable[[], T], version: int) -> T:
        """Return the result of ``act``.

        Where no engine is left, those that come back get ``version``, and ``act`` is called again.
        """
        for _ in range(HEALS):
            try:
                return act()
            except EngineError as error:
                failure = error
            self._publish(version, failure)
            self._on_lead(lambda lead: lead.retry())
        raise failure

    def _evaluate(self) -> None:
        """Score the held-out prompts. A run that ends meanwhile makes up for it later."""
        self.state = state = replace(self.state, unevaluated=True)
        HERE.enter("evaluate")
        score = self._healed(lambda: self._on_lead(lambda lead: lead.evaluate(state)), state.step)
        self.state = state.scored(score)

    def _make_up_for_an_evaluation(self) -> None:
        """Evaluate before the first step of a run or fork, or where an evaluation was stopped.

        Where there is a checkpoint, all of the state but the outcome is on disk.
        """
        owed = self.state.unevaluated
        if self.config.train.eval_prompts:
            self._evaluate()
        self.state = replace(self.state, unevaluated=False)
        if owed:
            run_dir = Path(self.config.train.run_dir)
            self._on_lead(lambda _: checkpoint.add_evaluation(run_dir, self.state))

    def _save(self) -> None:
        run_dir, keep = Path(self.config.train.run_dir), self.config.checkpoint.keep
        self._on_lead(lambda lead: lead.journal.claimed.refuse_another_folder())
        # How long it takes tells a job when it has to begin.
        timeline = self.publisher.timeline
        span = timeline.span("trainer", "save", self.state.step) if timeline else nullcontext()
        with HERE.doing("saving"), span:
            checkpoint.save(run_dir, self.policy, self.state, keep=keep, critic=self.critic)
        self.saved = self.state.step
        self._on_lead(lambda lead: lead.journal.saved())

    def _end(self, failure: Foreseen | None = None) -> None:
        """Save the newest step if needed, and raise the cause unless a person stopped the run."""
        step, cause = self.state.step, None if isinstance(failure, Interrupted) else failure
        # A run without a step is left as it was: it may begin again with other settings.
        untrained = not self.config.train.steps and failure is None
        if self.saved != step and (step or untrained):
            try:
                self._save()
            except ConfigError as error:
                raise ConfigError(f"{cause}; {error}" if cause else str(error)) from error

        def close(lead: Lead) -> None:
            lead.drain_events(step)  # in a step that was not finished
            if isinstance(cause, Collapse):
                lead.journal.finish(self.state)  # the report says more than one sentence

        try:
            self._on_lead(close)
        except ConfigError as error:  # no report can be written; the cause of the halt comes first
            cause = Collapse(f"{cause}; {error}")
        if cause:
            raise with_advice(cause, step)

    def _on_lead(self, act: Callable[[Lead], T]) -> T:
        return on_lead(
            lambda: act(held(self.lead)), self.policy.ranks, waiting_for="rollouts, or engines"
        )


def with_advice(cause: Foreseen, step: int) -> Foreseen:
    """Return the cause of the run's end with advice; a request engines refuse is a user error.

    Args:
        step: the newest that is saved; 0: none.
    """
    kind, then = type(cause), "start again to go on from it"
    if isinstance(cause, EngineError) and cause.ours:
        kind, then = ConfigError, "change what the engines refuse before you start again"
    saved = "no step was done"
    if step:
        saved = f"step {step} is saved, {then}"
    return kind(f"{cause}; {saved}")
