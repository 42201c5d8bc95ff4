"""The main loop: rollout, reward, advantage, score, update, publish; it reads like the algorithm.

Every rank runs it. The leading rank alone talks to engines, files and the terminal, and tells the
others what it collected; everything between is the same program on all of them.

A synchronous run is reproducible: prompts, seeds and the order of samples follow from the recipe
and the step, and a checkpoint holds the state between two steps. Interrupted and resumed, a run
writes the same metrics as one that was left alone, bit for bit on the same layout and machine with
embedded engines: collectives and matrix products add in an order of their own on another, and what
SGLang computes depends on who shares a batch.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qurl_megatron.config import RunConfig
from qurl_megatron.data.responses import Responses
from qurl_megatron.errors import ConfigError
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.collect import Interrupted
from qurl_megatron.model.critic import Critic
from qurl_megatron.model.policy import Policy
from qurl_megatron.model.reference import Reference
from qurl_megatron.observe.failures import HERE
from qurl_megatron.observe.metrics import Metric, Timer, merge, values
from qurl_megatron.publish.drift import of_an_update
from qurl_megatron.publish.publisher import Publisher
from qurl_megatron.publish.senders import make_sender
from qurl_megatron.rewards.own_code import checksums, edited, named_code
from qurl_megatron.rewards.pool import RewardDown
from qurl_megatron.runtime.megatron import by_lead, megatron_runtime, share
from qurl_megatron.training import checkpoint
from qurl_megatron.training.alignment import alignment
from qurl_megatron.training.delivery import deliver
from qurl_megatron.training.finite import NotFinite, check_losses, look, norm_of
from qurl_megatron.training.guard import Collapse, Verdict
from qurl_megatron.training.inputs import read_prompts
from qurl_megatron.training.lead import Lead, Rollout
from qurl_megatron.training.newest import newest_whole
from qurl_megatron.training.rank import StopRequest
from qurl_megatron.training.sources import sources
from qurl_megatron.training.state import Claim, TrainState, after, claim, tell_done
from qurl_megatron.training.step import asks_to_share, improve, shares, unshared_because
from qurl_megatron.training.whole import refuse_damaged_together
from qurl_megatron.wire.facts import settle_nccl

HEALS = 3  # times that one step waits for engines to come back


def train(config: RunConfig, stop: StopRequest, prepare: Callable[[], None] | None = None) -> bool:
    """Start a run, or resume the one in ``train.run_dir``.

    Args:
        prepare: what the leading rank does once all ranks have met, and before anything else; its
            ConfigError ends them all.

    Returns:
        True when all steps are done, False after a clean stop with a checkpoint.
    """
    run_dir = Path(config.train.run_dir)
    if config.sync.transport == "group":
        settle_nccl()
    with megatron_runtime(config.parallel, seed=config.train.seed) as ranks:
        if prepare:
            by_lead(prepare, ranks, waiting_for="checking rewards")
        claimed = claim(run_dir, config) if ranks.leads else None
        newest = newest_whole(run_dir, ranks)
        if newest and newest[1].finished(config.train.steps):
            if ranks.leads:
                tell_done(run_dir, newest[1], config, claimed.changes)
            return True
        refuse_damaged_together(sources(config, resumed=newest is not None), ranks)
        read = partial(read_prompts, config, newest and newest[1])
        prompts = by_lead(read, ranks, waiting_for="reading the data")
        for remark in prompts.remarks() if prompts else ():
            print(remark, flush=True)
        if ranks.leads:
            print(f"loading {config.model.path if newest is None else newest[0]}", flush=True)
        policy = Policy.build(
            config.model,
            config.parallel,
            config.policy_optimizer,
            ranks,
            uaq_scale=config.quant.uaq_scale,
            reference=Reference(config.algo.reference, config.algo.reference_memory)
            if config.algo.kl_coef > 0
            else None,
            align=alignment(config, ranks.device),
        )
        critic = (
            Critic.build(
                config.model, config.parallel, config.critic, config.critic_optimizer, ranks
            )
            if config.algo.advantage == "gae"
            else None
        )
        state = _resume(newest, policy, critic)
        told: list[str] = []
        if claimed:
            state, told = _taken_up(config, claimed, state)
        scheme = state.scheme(config.quant.scheme)
        if scheme == "none":
            policy.unalign()
        if (
            ranks.leads
            and asks_to_share(config)
            and (why := unshared_because(config, ranks.device))
        ):
            print(f"train.share_prefix does not apply here: {why}", flush=True)
        norm = _sound(policy, critic)
        _make_room()
        leading = (
            Lead(config, claimed, stop, state, norm, prompts, told) if claimed else nullcontext()
        )
        with leading as lead:
            sender = make_sender(config.sync, config.rollout, policy, run_dir)
            publisher = Publisher(
                policy,
                lead and lead.fleet,
                replace(config.quant, scheme=scheme),
                config.sync,
                sender,
                seed=config.train.seed,
                # Engines that wait anyway had better load while the ranks quantize.
                stage=config.rollout.max_staleness > 0 and sender.kind == "files",
                timeline=lead and lead.timeline,
            )
            with publisher:
                publisher.publish(state.step)
                if lead:
                    lead.published(state.step)
                parts = _Parts(config, policy, critic, publisher, lead)
                state = _run(parts, state, saved=newest and state.step)
            if lead:
                lead.finish(state)
    return state.finished(config.train.steps)


def _taken_up(config: RunConfig, claimed: Claim, state: TrainState) -> tuple[TrainState, list[str]]:
    """What of the state holds for the recipe and the user's code as they are now, and what has
    changed since it was saved, a sentence each."""
    changed = claimed.changes
    told = [f"settings changed: {', '.join(map(str, changed))}"] if changed else []
    named = named_code(config.reward, config.rollout)
    code = edited(named, state.own_code)
    told += [
        f"the code of {one} has changed since step {state.step}: what is measured with it from "
        "here on is not compared with what was measured before"
        for one in code.values()
    ]
    state = after([*(one.key for one in changed), *code], state)
    return replace(state, own_code=checksums(named)), told


def _sound(policy: Policy, critic: Critic | None) -> float:
    """The norm of the weights the run begins with.

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


@dataclass(frozen=True)
class _Parts:
    """What every step works with; ``lead`` is there on the leading rank alone."""

    config: RunConfig
    policy: Policy
    critic: Critic | None
    publisher: Publisher
    lead: Lead | None

    def save(self, state: TrainState) -> None:
        run_dir, keep = Path(self.config.train.run_dir), self.config.checkpoint.keep
        # How long it takes tells a job when it has to begin.
        timeline = self.lead.timeline if self.lead else None
        span = timeline.span("trainer", "save", state.step) if timeline else nullcontext()
        with HERE.doing("saving"), span:
            checkpoint.save(run_dir, self.policy, state, keep=keep, critic=self.critic)
        if self.lead:
            self.lead.saved()


def _run(parts: _Parts, state: TrainState, saved: int | None) -> TrainState:
    """Steps until the last one or a stop; what is returned is also on disk.

    Args:
        saved: the step whose checkpoint the run goes on from; None where it begins.

    Raises:
        EngineError, RewardDown, ConfigError: no engine or reward could be used, or no version
            written; what was trained is on disk all the same.
        Collapse: the guard halted the run.
    """
    config, failure, going = parts.config, None, True
    if state.unevaluated or (state.step == 0 and config.train.eval_prompts):
        state = _made_up_for(parts, state)
        if state.unevaluated:
            return state
    while going and failure is None and state.step < config.train.steps:
        before = state.step
        state, saved, failure = _step(parts, state, saved)
        going = state.step > before
    _end(parts, state, saved, failure)
    return state


def _made_up_for(parts: _Parts, state: TrainState) -> TrainState:
    """The state with the evaluation before the first step of a run or fork, or with the one in
    which it was stopped; unevaluated where it is stopped now. All of it but that is on disk.

    Raises:
        EngineError, RewardDown, ConfigError: it cannot be done, on every rank.
    """
    owed, state = state.unevaluated, replace(state, unevaluated=False)
    if parts.config.train.eval_prompts:
        state, failure = _evaluated(parts.lead, parts.publisher, state)
        if failure is not None:
            _end(parts, state, state.step, failure)
            return state
    if state.step == state.begun:
        state = replace(state, accuracy_before=state.accuracy)
    if owed:
        write = partial(checkpoint.evaluated, Path(parts.config.train.run_dir), state)
        by_lead(write, parts.policy.ranks, waiting_for="writing what an evaluation came to")
    return state


def _step(
    parts: _Parts, state: TrainState, saved: int | None
) -> tuple[TrainState, int | None, Exception | None]:
    """Rollout, update, guard, publication, metrics, evaluation, checkpoint.

    Returns:
        The state, of the same step where there were no samples; the newest step that is saved; and
        what ends the run, on every rank.
    """
    config, lead, publisher = parts.config, parts.lead, parts.publisher
    step = state.step + 1
    HERE.step, HERE.version, HERE.phase = step, state.step, "rollout"
    timer = lead.timer(step) if lead else Timer(HERE.enter)

    rollout, failure = _samples(config, lead, publisher, step, timer)
    if rollout is None:
        return state, saved, failure

    measured, norm, advantages = _improved(parts, rollout.samples, step, timer, saved)
    if config.rollout.colocate:
        _make_room()  # for engines that take their memory back, or are started anew
    state = replace(state, step=step)
    if config.algo.reference_every and step % config.algo.reference_every == 0:
        parts.policy.move_reference()

    judged = values(merge([measured, rollout.metrics]))
    state, noted, failure = _guarded(lead, publisher, state, judged, timer)

    published: dict[str, Metric] = {}
    if failure is None:
        with timer.phase("publish"):
            published, failure = _publish(lead, publisher, step)
        if failure is None:
            HERE.version = step
        if lead and failure is None:
            lead.published(step)

    sent = of_an_update(_over_ranks({**published, **timer.metrics()}))
    measured = merge([measured, sent])
    if lead:
        noted = {**noted, **_throughput(measured, rollout), "optimizer/weight_norm": norm}
        lead.write(step, {**values(merge([measured, rollout.metrics])), **noted})
        lead.keep_examples(step, advantages)
        state = replace(state, cursor=lead.cursor)

    evaluate = config.train.eval_prompts and _due(step, config.train.eval_every, config.train.steps)
    if evaluate and failure is None:
        state, failure = _evaluated(lead, publisher, state)

    if config.checkpoint.every and step % config.checkpoint.every == 0:
        parts.save(state)
        saved = step
    return state, saved, failure


def _end(parts: _Parts, state: TrainState, saved: int | None, failure: Exception | None) -> None:
    """Save what is not saved yet, and raise what ended the run, unless a person did."""
    # A run without a step is left as it was: it begins anew, with whatever settings it likes.
    done = not parts.config.train.steps and failure is None
    if saved != state.step and (state.step or done):
        try:
            parts.save(state)
        except ConfigError as error:
            raise ConfigError(f"{failure}; {error}" if failure else str(error)) from error
    lead = parts.lead
    if lead:
        lead.happened(state.step)  # in a step that was not finished
    if lead and isinstance(failure, Collapse):
        lead.finish(state)  # the report says more than one sentence
    if failure is not None and not isinstance(failure, Interrupted):
        raise _ending(failure, state.step)


def _ending(failure: Exception, step: int) -> Exception:
    """What ended the run, and what to do; a request that engines refuse is a mistake in the input.

    Args:
        step: the newest that is saved; 0: none.
    """
    refused = isinstance(failure, EngineError) and failure.ours
    then = "start again to go on from it"
    if refused:
        then = "change what the engines refuse before you start again"
    saved = f"step {step} is saved, {then}" if step else "no step was done"
    return (ConfigError if refused else type(failure))(f"{failure}; {saved}")


def _improved(
    parts: _Parts, samples: Responses, step: int, timer: Timer, saved: int | None
) -> tuple[dict[str, Metric], float, dict[int, float]]:
    """Update on one step's samples.

    Returns:
        The metrics of all ranks, the norm of the weights, and the advantages of the responses that
        are kept as examples.

    Raises:
        Collapse: numbers are not finite; what is saved and what engines hold is from before.
    """
    config, policy, critic = parts.config, parts.policy, parts.critic
    try:
        keep = parts.lead and partial(parts.lead.keep_rollout, step)
        learnt = improve(
            policy, samples, config, step=step, timer=timer, critic=critic, scored=keep
        )
        everywhere = _everywhere((*learnt, look([policy, critic] if critic else [policy])))
        metrics, advantages, weights = zip(*everywhere, strict=True)
        measured = merge(metrics)
        check_losses(values(measured))
        return (
            measured,
            norm_of(weights),
            {i: one for part in advantages for i, one in part.items()},
        )
    except NotFinite as error:
        mend = "start again with a smaller optimizer.lr"
        if saved is not None:
            mend += f", to go on from step {saved}"
        raise Collapse(
            f"step {step} broke the policy: {error}; nothing of it is published or saved; {mend}"
        ) from error


def _guarded(
    lead: Lead | None,
    publisher: Publisher,
    state: TrainState,
    metrics: dict[str, float],
    timer: Timer,
) -> tuple[TrainState, dict[str, float], Exception | None]:
    """Let the guard judge a step before its version is published, and do what it says.

    A fall-back to unquantized rollouts begins with this version: the run goes on as it does when it
    is started again from here.

    Returns:
        The state with the guard's part, the guard's metrics, and what ends the run; on every rank.
    """
    verdict: Verdict = _share(lead and lead.judge(state.step, metrics))
    state = replace(state, guard=verdict.counts)
    if verdict.fall_back:
        notice = f"rollouts are unquantized since step {state.step}, by the guard: {verdict.why}"
        state = replace(state, unquantized_since=state.step, notice=notice)
        publisher.publish_as("none")
        publisher.policy.unalign()
    failure: Exception | None = None
    if verdict.halt:
        failure = Collapse(f"the guard halted the run: {verdict.why}")
        state = replace(state, notice=str(failure))
    elif verdict.fall_back:
        with timer.phase("restart"):
            failure = _share(lead and _fallen_back(lead, state.step))
    return state, verdict.metrics, failure


def _fallen_back(lead: Lead, version: int) -> Exception | None:
    """None where the engines are up for unquantized weights; else what ends the run."""
    try:
        lead.fall_back(version)
    except (Interrupted, ConfigError) as error:
        return error
    return None


def _samples(
    config: RunConfig, lead: Lead | None, publisher: Publisher, step: int, timer: Timer
) -> tuple[Rollout | None, Exception | None]:
    """One step's samples, each rank's share on it; none where the run was stopped, or cannot go on.

    Where no engine is left, one that comes back gets the weights and the same prompts again.
    """
    for _ in range(HEALS):
        collected, failure = _rollout(lead, step, timer)
        # Objects are pickled on their way; of the tokens nothing may be among them.
        rollout, failure = _share((collected and replace(collected, samples=None), failure))
        if rollout is None and not isinstance(failure, EngineError):
            return None, failure
        if failure is None:
            whole = collected and collected.samples
            ranks = publisher.policy.ranks
            split = partial(shares, ranks, config=config, step=step)
            return replace(rollout, samples=deliver(ranks, whole, split)), None
        _, unhealed = _publish(lead, publisher, step - 1, failure)
        if unhealed is not None:
            return None, unhealed
        if lead:
            lead.retry()
    return None, failure


def _publish(
    lead: Lead | None, publisher: Publisher, version: int, failure: EngineError | None = None
) -> tuple[dict[str, Metric], Exception | None]:
    """Publish, where no engine takes the version also to those that come back.

    Args:
        failure: why all engines are known to be gone; they are waited for first.

    Returns:
        The metrics, and what went wrong, the same on every rank.
    """
    for _ in range(HEALS):
        if failure is not None and (gone := _recovered(lead)):
            return {}, type(gone)(f"{failure}; {gone}")
        try:
            return publisher.publish(version), None
        except EngineError as error:
            failure = error
        except ConfigError as error:
            return {}, error
    return {}, failure


def _recovered(lead: Lead | None) -> EngineError | ConfigError | None:
    """None once an engine is back; else why none is, on every rank."""
    failure = None
    if lead:
        try:
            lead.recover()
        except (EngineError, ConfigError) as error:
            failure = error
    return _share((None, failure))[1]


def _rollout(
    lead: Lead | None, step: int, timer: Timer
) -> tuple[Rollout | None, EngineError | RewardDown | ConfigError | None]:
    """The leading rank's rollout; none on the others, and where it was stopped or failed."""
    if lead is None or lead.stop:
        return None, None
    if lead.refused:
        return None, lead.refused
    try:
        rollout = lead.rollout(step, timer)
        lead.rest()
        return rollout, None
    except Interrupted:
        return None, None
    except (EngineError, RewardDown, ConfigError) as error:
        return None, error


def _evaluated(
    lead: Lead | None, publisher: Publisher, state: TrainState
) -> tuple[TrainState, Exception | None]:
    """The state with its held-out score, on the leading rank; what went wrong, on all.

    A run that goes on from a state without this evaluation makes up for it.
    """
    missing = replace(state, unevaluated=True)
    state = replace(state, unevaluated=False)
    HERE.enter("evaluate")
    for _ in range(HEALS):
        failure = None
        if lead:
            try:
                state = replace(state, accuracy=lead.evaluate(state.step))
            except (Interrupted, EngineError, RewardDown, ConfigError) as error:
                failure = error
        _, failure = _share((None, failure))
        if failure is None:
            return state, None
        if not isinstance(failure, EngineError):
            return missing, failure
        _, unhealed = _publish(lead, publisher, state.step, failure)
        if unhealed is not None:
            return missing, unhealed
    return missing, failure


def _share(outcome: Any, waiting_for: str = "rollouts, or engines") -> Any:
    """What the leading rank has, on every rank."""
    return share(outcome, waiting_for=waiting_for)


def _over_ranks(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Metrics of all ranks merged, on every rank."""
    return merge(_everywhere(metrics))


def _everywhere(mine: Any) -> list:
    """What each rank has, on every rank."""
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return everywhere


def _throughput(metrics: dict[str, Metric], rollout: Rollout) -> dict[str, float]:
    trained = sum(rollout.samples.summary.totals)
    return {
        "throughput/rollout_tokens_per_s": rollout.tokens / rollout.seconds,
        "throughput/train_tokens_per_s": trained / metrics["time/train"].value,
    }


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _resume(
    newest: tuple[Path, TrainState] | None, policy: Policy, critic: Critic | None
) -> TrainState:
    """The newest checkpoint's state, loaded into the policy; a fresh state where there is none."""
    if newest is None:
        return TrainState()
    path, state = newest
    checkpoint.load(path, policy, critic)
    if policy.ranks.leads:
        print(f"resuming {path.parents[1]} after step {state.step}", flush=True)
        if state.notice:
            print(state.notice, flush=True)
    return state
