"""The main loop: rollout, reward, advantage, score, update, publish; it reads like the algorithm.

Every rank runs it. The leading rank alone talks to engines, files and the terminal (``on_lead``);
all ranks get the result or the exception. Everything between is the same program on
all of them.

A synchronous run is reproducible: prompts, seeds and the order of samples follow from the recipe
and the step, and a checkpoint holds the state between two steps. Interrupted and resumed, a run
writes the same metrics as one that was left alone, bit for bit on the same layout and machine with
embedded engines. On another machine collectives and matrix products add in another order, and
SGLang's results depend on the other requests of a batch.
"""

import gc
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from qurl_megatron.actor.critic import Critic
from qurl_megatron.actor.megatron import Ranks, held, kept_on_lead, megatron_runtime, on_lead
from qurl_megatron.actor.policy import Policy
from qurl_megatron.config import RunConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.data.responses import Responses
from qurl_megatron.data.rows import DataFile
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.kit.errors import ConfigError, Foreseen, Interrupted
from qurl_megatron.kit.stop import StopRequest
from qurl_megatron.observe.failures import HERE
from qurl_megatron.observe.metrics import Metric, Timer, merge, values
from qurl_megatron.observe.timeline import FALL_BACK, HALTED
from qurl_megatron.publish.drift import of_an_update
from qurl_megatron.publish.publisher import Publisher
from qurl_megatron.publish.senders import make_sender
from qurl_megatron.rewards.own_code import checksums, edited, named_code
from qurl_megatron.training import checkpoint
from qurl_megatron.training.delivery import deliver
from qurl_megatron.training.finite import NotFinite, check_losses, look, norm_of
from qurl_megatron.training.guard import Collapse, Guard, Verdict
from qurl_megatron.training.inputs import read_prompts
from qurl_megatron.training.lead import Lead, leading
from qurl_megatron.training.newest import newest_whole
from qurl_megatron.training.rollout_source import Rollout
from qurl_megatron.training.sources import sources
from qurl_megatron.training.state import Claim, TrainState, after, claim, stopped, tell_done
from qurl_megatron.training.step import improve, shares
from qurl_megatron.training.trained_models import models_of
from qurl_megatron.training.whole import refuse_damaged_together
from qurl_megatron.wire.facts import settle_nccl
from qurl_megatron.wire.group import check_host

HEALS = 3  # times that one step waits for engines to come back
FORMATS = {"bfloat16": "BF16", "float32": "FP32"}  # of unquantized weights

T = TypeVar("T")


def train(
    config: RunConfig, stop: StopRequest, prepare: Callable[[], dict[str, DataFile]] | None = None
) -> bool:
    """Start a run, or resume the one in ``train.run_dir``.

    Args:
        prepare: called on the leading rank once all ranks have met, before anything else; its
            ConfigError ends them all. Returns the data files, which it has read.

    Returns:
        True when all steps are done, False after a clean stop with a checkpoint.
    """
    run_dir = Path(config.train.run_dir)
    if config.sync.transport == "group":
        settle_nccl()
    with megatron_runtime(config.parallel, seed=config.train.seed) as ranks:
        files = None
        if prepare:
            files = kept_on_lead(prepare, ranks, waiting_for="checking rewards")
        begin = partial(claim, run_dir, config)
        claimed = kept_on_lead(begin, ranks, waiting_for="taking the run directory")
        newest = newest_whole(run_dir, ranks)
        if newest and newest[1].finished(config.train.steps):
            tell = partial(tell_done, run_dir, newest[1], config)
            on_lead(lambda: tell(held(claimed).changes), ranks, waiting_for="its last words")
            return True
        if config.sync.transport == "group" and (host := config.sync.host):
            on_lead(lambda: check_host(host), ranks, waiting_for="looking at sync.host")
        refuse_damaged_together(sources(config, resumed=newest is not None), ranks)
        read = partial(_read_prompts, config, newest, files)
        prompts = kept_on_lead(read, ranks, waiting_for="reading the data")
        policy, critic = models_of(config, ranks)
        if newest:
            checkpoint.load(newest[0], policy, critic)
        state, remarks = on_lead(
            lambda: _begun(config, held(claimed), newest, ranks),
            ranks,
            waiting_for="looking at what has changed",
        )
        scheme = state.scheme(config.quant.scheme)
        if scheme == "none":
            policy.unalign()
        norm = _sound(policy, critic)
        _make_room()
        with ExitStack() as stack:

            def start() -> Lead:
                led = leading(held(claimed), stop, state, norm, held(prompts), remarks)
                return stack.enter_context(led)

            try:
                lead = kept_on_lead(start, ranks, waiting_for="starting engines")
            except Interrupted:
                last_words = stopped(stop.by, state.step, config.train.steps)
                on_lead(lambda: print(last_words, flush=True), ranks, waiting_for="its last words")
                return False
            sender = make_sender(config.sync, config.rollout, policy, run_dir)
            publisher = Publisher(
                policy,
                lead.fleet if lead else None,
                replace(config.quant, scheme=scheme),
                config.sync,
                sender,
                seed=config.train.seed,
                # Engines that wait anyway had better load while the ranks quantize.
                stage=config.rollout.max_staleness > 0 and sender.lasting,
                timeline=lead.journal.timeline if lead else None,
            )
            with publisher:
                run = _Run(config, policy, critic, publisher, lead, state, newest and state.step)
                run.to_the_end()
            on_lead(
                lambda: held(lead).journal.finish(run.state, stop.by),
                ranks,
                waiting_for="writing the report",
            )
    return run.state.finished(config.train.steps)


def _read_prompts(
    config: RunConfig,
    newest: tuple[Path, TrainState] | None,
    files: dict[str, DataFile] | None,
) -> PromptStream:
    """Read the prompts of the run, and print remarks on them before models load."""
    prompts = read_prompts(config, newest and newest[1], files)
    for remark in prompts.remarks():
        print(remark, flush=True)
    print(f"loading {newest[0] if newest else config.model.path}", flush=True)
    return prompts


def _begun(
    config: RunConfig, claimed: Claim, newest: tuple[Path, TrainState] | None, ranks: Ranks
) -> tuple[TrainState, list[str]]:
    """Return the state to begin or go on with, and the changes since, a sentence each."""
    state = TrainState()
    if newest:
        path, state = newest
        print(f"resuming {path.parents[1]} after step {state.step}", flush=True)
        if state.notice:
            print(state.notice, flush=True)
    return _taken_up(config, claimed, state)


def _taken_up(config: RunConfig, claimed: Claim, state: TrainState) -> tuple[TrainState, list[str]]:
    """Adapt the state to the present recipe and user code.

    Returns:
        The part of the state that still holds, and the changes since it was saved, a sentence each.
    """
    changed = claimed.changes
    remarks = [f"settings changed: {', '.join(map(str, changed))}"] if changed else []
    named = named_code(config.reward, config.rollout, config.algo.function)
    code = edited(named, state.own_code)
    for key, setting in code.items():
        consequence = "what is measured with it from here on is not compared with earlier figures"
        if key == "algo.function":
            consequence = "the policy learns by the new one from here on"
        remarks.append(f"the code of {setting} has changed since step {state.step}: {consequence}")
    state = after([*(change.key for change in changed), *code], state)
    return replace(state, own_code=checksums(named)), remarks


def _sound(policy: Policy, critic: Critic | None) -> float:
    """Return the norm of the weights the run begins with.

    Raises:
        ConfigError: they are not finite.
    """
    try:
        return norm_of(_everywhere(look([policy, critic] if critic else [policy])))
    except NotFinite as error:
        raise ConfigError(
            f"the run would begin with broken weights ({error}); name another model.path, or "
            "delete the newest checkpoint in train.run_dir to resume from the one before"
        ) from error


def _make_room() -> None:
    """Let go of the device memory that no tensor uses; no rank goes on before all have.

    Engines are sized by the memory they find free, and the leading rank starts those on all GPUs.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    dist.barrier()


@dataclass
class _Run:
    """A run on one rank; ``lead`` is there on the leading one alone."""

    config: RunConfig
    policy: Policy
    critic: Critic | None
    publisher: Publisher
    lead: Lead | None
    state: TrainState
    """After the newest step; its cursor and scores, too, are the same on every rank."""

    saved: int | None
    """The newest step that is on disk; None: none is."""

    def __post_init__(self) -> None:
        rollout = self.config.rollout
        own_engines = not (rollout.urls or rollout.rendezvous)
        self.guard = Guard(self.config.guard, self.state.guard, own_engines=own_engines)

    def to_the_end(self) -> None:
        """Run steps until the last one or a stop; ``state`` is then also on disk.

        Raises:
            EngineError, RewardDown, ConfigError: no engine or reward could be used, or no version
                written; the trained steps are on disk all the same.
            Collapse: the guard halted the run, or numbers are not finite; of such a step nothing is
                on disk, or with the engines.
        """
        config = self.config
        try:
            self._published(self.state.step)
            self._on_lead(lambda lead: lead.source.published(self.state.step))
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
        """Rollout, update, guard, publication, metrics, evaluation.

        Raises:
            Foreseen: a cause that ends the run, on every rank. Before the update the state is the
                previous step's; after it, it is this step's, and its metrics are written.
            NotFinite: the update broke the policy.
        """
        config, step = self.config, self.state.step + 1
        HERE.step, HERE.version, HERE.phase = step, self.state.step, "rollout"
        timer = self.lead.journal.timer(step) if self.lead else Timer(HERE.enter)

        samples, rollout = self._healed(lambda: self._samples(step, timer), step - 1)
        measured, norm, advantages = self._improved(samples, step, timer)
        if config.rollout.colocate:
            _make_room()  # for engines that take their memory back, or are started again
        self.state = replace(self.state, step=step, cursor=rollout.cursor)
        if config.algo.reference_every and step % config.algo.reference_every == 0:
            self.policy.move_reference()

        verdict = self._judged(values(merge([measured, rollout.metrics])))

        def write(published: dict[str, Metric]) -> None:
            sent = of_an_update(_over_ranks({**published, **timer.metrics()}))
            merged = merge([measured, sent])
            metrics = {
                **values(merge([merged, rollout.metrics])),
                **verdict.metrics,
                **_throughput(merged, samples, rollout),
                "optimizer/weight_norm": norm,
            }
            self._on_lead(lambda lead: lead.write(step, metrics, advantages))

        try:
            published = self._served(verdict, timer)
        except Foreseen:
            write({})
            raise
        write(published)
        if config.train.eval_prompts and _due(step, config.train.eval_every, config.train.steps):
            self._evaluate()

    def _samples(self, step: int, timer: Timer) -> tuple[Responses, Rollout]:
        """One step's samples, each rank's share on it.

        Raises:
            As ``RolloutSource.take``, on every rank.
        """
        responses: Responses | None = None  # stays where it is: of the tokens nothing is pickled

        def take(lead: Lead) -> Rollout:
            nonlocal responses
            responses, rollout = lead.source.take(step, timer)
            return rollout

        rollout = self._on_lead(take)
        ranks = self.policy.ranks
        split = partial(shares, ranks, config=self.config, step=step)
        return deliver(ranks, responses, split), rollout

    def _improved(
        self, samples: Responses, step: int, timer: Timer
    ) -> tuple[dict[str, Metric], float, dict[int, float]]:
        """Update on one step's samples.

        Returns:
            The metrics of all ranks, the norm of the weights, and the advantages of the responses
            that are kept as examples.

        Raises:
            NotFinite: the policy is broken, on every rank.
        """
        models = [self.policy, self.critic] if self.critic else [self.policy]
        learnt = improve(
            self.policy,
            samples,
            self.config,
            step=step,
            timer=timer,
            critic=self.critic,
            scored=partial(self.lead.keep_rollout, step) if self.lead else None,
        )
        metrics, advantages, weights = zip(*_everywhere((*learnt, look(models))), strict=True)
        measured = merge(metrics)
        check_losses(values(measured))
        return (
            measured,
            norm_of(weights),
            {i: advantage for part in advantages for i, advantage in part.items()},
        )

    def _broken(self, error: NotFinite) -> Collapse:
        fix = "start again with a smaller optimizer.lr"
        if self.saved is not None:
            fix += f", to go on from step {self.saved}"
        return Collapse(
            f"step {self.state.step + 1} broke the policy: {error}; nothing of it is published or "
            f"saved; {fix}"
        )

    def _judged(self, metrics: dict[str, float]) -> Verdict:
        """The guard's word on the step before its version is published; all ranks come to it."""
        step = self.state.step
        verdict = self.guard.judge(step, metrics, quantized=self.publisher.scheme != "none")
        self.state = replace(self.state, guard=verdict.counts)
        if verdict.why:
            consequence = f"{_consequence(verdict, self.config.model.dtype)}: {verdict.why}"
            self._on_lead(lambda lead: lead.journal.alarm("guard", consequence, step))
        return verdict

    def _served(self, verdict: Verdict, timer: Timer) -> dict[str, Metric]:
        """Carry out the guard's verdict, and bring the step's version to the engines.

        A fall-back to unquantized rollouts begins with this version: the run goes on as it does
        when it is started again from here.

        Returns:
            This rank's metrics of the publication.

        Raises:
            Collapse: the guard halts the run.
            Interrupted, ConfigError, EngineError: engines cannot be started again, or none takes
                the version.
        """
        step = self.state.step
        if verdict.fall_back:
            notice = f"rollouts are unquantized since step {step}, by the guard: {verdict.why}"
            self.state = replace(self.state, unquantized_since=step, notice=notice)
            self.publisher.publish_as("none")
            self.policy.unalign()
        if verdict.halt:
            notice = f"the guard halted the run: {verdict.why}"
            self.state = replace(self.state, notice=notice)
            raise Collapse(notice)
        if verdict.fall_back:
            with timer.phase("restart"):
                self._on_lead(lambda lead: lead.source.fall_back(step))
        with timer.phase("publish"):
            published = self._published(step)
        HERE.version = step
        self._on_lead(lambda lead: lead.source.published(step))
        return published

    def _published(self, version: int, failure: EngineError | None = None) -> dict[str, Metric]:
        """Publish, where no engine takes the version also to those that come back.

        Args:
            failure: why all engines are known to be gone; they are waited for first.

        Raises:
            EngineError, ConfigError: none came back or took it, on every rank.
        """
        for _ in range(HEALS):
            if failure is not None:
                try:
                    self._on_lead(lambda lead: lead.source.recover())
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

        Raises:
            EngineError: it needs engines that do not come back.
            Exception: any other that ``act`` raises.
        """
        for _ in range(HEALS):
            try:
                return act()
            except EngineError as error:
                failure = error
            self._published(version, failure)
            self._on_lead(lambda lead: lead.source.retry())
        raise failure

    def _evaluate(self) -> None:
        """Have the state's held-out score. A run that ends meanwhile makes up for it later."""
        step, self.state = self.state.step, replace(self.state, unevaluated=True)
        HERE.enter("evaluate")
        score = self._healed(lambda: self._on_lead(lambda lead: lead.evaluate(step)), step)
        self.state = self.state.scored(step, score)

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
            self._on_lead(lambda _: checkpoint.evaluated(run_dir, self.state))

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
        step, ended = self.state.step, None if isinstance(failure, Interrupted) else failure
        # A run without a step is left as it was: it begins again, with whatever settings it likes.
        done = not self.config.train.steps and failure is None
        if self.saved != step and (step or done):
            try:
                self._save()
            except ConfigError as error:
                raise ConfigError(f"{ended}; {error}" if ended else str(error)) from error

        def keep(lead: Lead) -> None:
            lead.happened(step)  # in a step that was not finished
            if isinstance(ended, Collapse):
                lead.journal.finish(self.state)  # the report says more than one sentence

        try:
            self._on_lead(keep)
        except ConfigError as error:  # no report can be written; why the run was halted comes first
            ended = Collapse(f"{ended}; {error}")
        if ended:
            raise _ending(ended, step)

    def _on_lead(self, act: Callable[[Lead], T]) -> T:
        return on_lead(
            lambda: act(held(self.lead)), self.policy.ranks, waiting_for="rollouts, or engines"
        )


def _consequence(verdict: Verdict, dtype: str) -> str:
    if verdict.halt:
        return HALTED
    if verdict.fall_back:
        return FALL_BACK + f"{FORMATS[dtype]} rollouts"
    return "warning"


def _ending(failure: Foreseen, step: int) -> Foreseen:
    """Return the cause of the run's end and advice; a request that engines refuse is a user error.

    Args:
        step: the newest that is saved; 0: none.
    """
    refused = isinstance(failure, EngineError) and failure.ours
    then = "start again to go on from it"
    if refused:
        then = "change what the engines refuse before you start again"
    saved = f"step {step} is saved, {then}" if step else "no step was done"
    return (ConfigError if refused else type(failure))(f"{failure}; {saved}")


def _over_ranks(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Merge the metrics of all ranks, on every rank."""
    return merge(_everywhere(metrics))


def _everywhere(mine: Any) -> list:
    """Gather each rank's value on every rank."""
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return everywhere


def _throughput(
    metrics: dict[str, Metric], samples: Responses, rollout: Rollout
) -> dict[str, float]:
    trained = sum(samples.summary.totals)
    return {
        "throughput/rollout_tokens_per_s": rollout.tokens / rollout.seconds,
        "throughput/train_tokens_per_s": trained / metrics["time/train"].value,
    }


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
