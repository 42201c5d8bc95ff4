"""The main loop: rollout, reward, advantage, score, update, publish; it reads like the algorithm.

Every rank runs it. The leading rank alone talks to engines, files and the terminal, and tells the
others what it collected; everything between is the same program on all of them.

A synchronous run is reproducible: prompts, seeds and the order of samples follow from the recipe
and the step, and a checkpoint holds the state between two steps. Interrupted and resumed, a run
writes the same metrics as one that was left alone, bit for bit on the same layout and machine:
collectives and matrix products add in an order of their own on another.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from qurl_megatron.config import RunConfig
from qurl_megatron.errors import ConfigError
from qurl_megatron.model.policy import Policy
from qurl_megatron.observe.metrics import Metric, Timer, merge, values
from qurl_megatron.rollout.client import EngineError
from qurl_megatron.rollout.collect import Interrupted
from qurl_megatron.runtime.megatron import megatron_runtime
from qurl_megatron.sync.publisher import Publisher
from qurl_megatron.sync.senders import make_sender
from qurl_megatron.training import checkpoint
from qurl_megatron.training.lead import Lead, Rollout
from qurl_megatron.training.rank import StopRequest
from qurl_megatron.training.state import TrainState, claim, latest
from qurl_megatron.training.step import improve

HEALS = 3  # times that one step waits for engines to come back


def train(config: RunConfig, stop: StopRequest) -> bool:
    """Start a run, or resume the one in ``train.run_dir``.

    Returns:
        True when all steps are done, False after a clean stop with a checkpoint.
    """
    run_dir = Path(config.train.run_dir)
    with megatron_runtime(config.parallel, seed=config.train.seed) as ranks:
        lock = claim(run_dir, config) if ranks.leads else nullcontext()
        policy = Policy.build(
            config.model,
            config.parallel,
            config.optimizer,
            ranks,
            uaq_scale=config.quant.uaq_scale,
            keep_reference=config.algo.kl_coef > 0,
        )
        state = _resume(run_dir, policy)
        with (
            lock,
            Lead(config, run_dir, stop, state.step, state.cursor)
            if ranks.leads
            else nullcontext() as lead,
        ):
            sender = make_sender(config.sync, config.rollout, policy, run_dir)
            publisher = Publisher(
                policy,
                lead and lead.fleet,
                config.quant,
                config.sync,
                sender,
                # Engines that wait anyway had better load while the ranks quantize.
                stage=config.rollout.max_staleness > 0 and sender.kind == "files",
                timeline=lead and lead.timeline,
            )
            with publisher:
                publisher.publish(state.step)
                if lead:
                    lead.published(state.step)
                state = _run(config, policy, publisher, lead, state)
            if lead:
                lead.finish(state)
    return state.step >= config.train.steps


def _run(
    config: RunConfig, policy: Policy, publisher: Publisher, lead: Lead | None, state: TrainState
) -> TrainState:
    """Steps until the last one or a stop; what is returned is also on disk.

    Raises:
        EngineError, ConfigError: no engine could be used, or no version written; what was trained
            is on disk all the same.
    """
    run_dir = Path(config.train.run_dir)
    saved = state.step if state.step else None
    failure = None
    if state.step == 0 and config.train.eval_prompts:
        state, failure = _evaluated(lead, publisher, state)
        state = replace(state, accuracy_before=state.accuracy)
    while state.step < config.train.steps and failure is None:
        step = state.step + 1
        timer = lead.timer(step) if lead else Timer()
        rollout, failure = _samples(lead, publisher, step, timer)
        if rollout is None:
            break
        metrics = improve(policy, rollout.samples, config, step=step, timer=timer)
        with timer.phase("publish"):
            published, failure = _publish(lead, publisher, step)
            metrics |= published
        if lead and failure is None:
            lead.published(step)
        measured = _over_ranks({**metrics, **timer.metrics()})
        state = replace(state, step=step)
        if lead:
            lead.write(
                step,
                {**values(merge([measured, rollout.metrics])), **_throughput(measured, rollout)},
            )
            state = replace(state, cursor=lead.cursor)
        evaluate = config.train.eval_prompts and _due(
            step, config.train.eval_every, config.train.steps
        )
        if evaluate and failure is None:
            state, failure = _evaluated(lead, publisher, state)
        if config.checkpoint.every and step % config.checkpoint.every == 0:
            checkpoint.save(run_dir, policy, state, keep=config.checkpoint.keep)
            saved = step
    if saved != state.step:
        checkpoint.save(run_dir, policy, state, keep=config.checkpoint.keep)
    if lead:
        lead.happened(state.step)  # in a step that was not finished
    if failure is not None:
        raise type(failure)(f"{failure}; step {state.step} is saved, start again to go on from it")
    return state


def _samples(
    lead: Lead | None, publisher: Publisher, step: int, timer: Timer
) -> tuple[Rollout | None, Exception | None]:
    """One step's samples, on every rank; none where the run was stopped, or cannot go on.

    Where no engine is left, one that comes back gets the weights and the same prompts again.
    """
    for _ in range(HEALS):
        rollout, failure = _share(_rollout(lead, step, timer))
        if failure is None:
            return rollout, None
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
            return {}, EngineError(f"{failure}; {gone}")
        try:
            return publisher.publish(version), None
        except EngineError as error:
            failure = error
        except ConfigError as error:
            return {}, error
    return {}, failure


def _recovered(lead: Lead | None) -> EngineError | None:
    """None once an engine is back; else why none is, on every rank."""
    failure = None
    if lead:
        try:
            lead.recover()
        except EngineError as error:
            failure = error
    return _share((None, failure))[1]


def _rollout(
    lead: Lead | None, step: int, timer: Timer
) -> tuple[Rollout | None, EngineError | None]:
    """The leading rank's rollout; none on the others, and where it was stopped or failed."""
    if lead is None or lead.stop:
        return None, None
    try:
        rollout = lead.rollout(step, timer)
        lead.rest()
        return rollout, None
    except Interrupted:
        return None, None
    except EngineError as error:
        return None, error


def _evaluated(
    lead: Lead | None, publisher: Publisher, state: TrainState
) -> tuple[TrainState, Exception | None]:
    """The state with its held-out accuracy, on the leading rank; what went wrong, on all."""
    for _ in range(HEALS):
        failure = None
        if lead:
            try:
                state = replace(state, accuracy=lead.evaluate(state.step))
            except EngineError as error:
                failure = error
        _, failure = _share((None, failure))
        if failure is None:
            return state, None
        _, unhealed = _publish(lead, publisher, state.step, failure)
        if unhealed is not None:
            return state, unhealed
    return state, failure


def _share(
    outcome: tuple[Rollout | None, EngineError | None],
) -> tuple[Rollout | None, EngineError | None]:
    """What the leading rank has, on every rank."""
    box = [outcome]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _over_ranks(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Metrics of all ranks merged, on every rank."""
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, metrics)
    return merge(everywhere)


def _throughput(metrics: dict[str, Metric], rollout: Rollout) -> dict[str, float]:
    generated = sum(len(s.response_ids) for s in rollout.samples)
    trained = generated + sum(len(s.prompt.input_ids) for s in rollout.samples)
    return {
        "throughput/rollout_tokens_per_s": generated / rollout.seconds,
        "throughput/train_tokens_per_s": trained / metrics["time/train"].value,
    }


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _resume(run_dir: Path, policy: Policy) -> TrainState:
    """The newest checkpoint's state, loaded into the policy; a fresh state where there is none."""
    path = latest(run_dir)
    if path is None:
        return TrainState()
    checkpoint.load(path, policy)
    state = TrainState.read(path)
    if policy.ranks.leads:
        print(f"resuming {run_dir} after step {state.step}", flush=True)
    return state
