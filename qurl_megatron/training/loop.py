"""The main loop: rollout, reward, advantage, score, update, publish; it reads like the algorithm.

Every rank runs it. The leading rank alone talks to engines, files and the terminal, and tells the
others what it collected; everything between is the same program on all of them.

A synchronous run is reproducible: prompts, seeds and the order of samples follow from the recipe
and the step, and a checkpoint holds the state between two steps. Interrupted and resumed, a run
writes the same metrics as one that was left alone, bit for bit on the same layout and machine:
collectives and matrix products add in an order of their own on another.
"""

import socket
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from qurl_megatron.algo import group_advantages
from qurl_megatron.config import RunConfig
from qurl_megatron.model.policy import Policy
from qurl_megatron.observe.metrics import Metric, Timer, merge, values
from qurl_megatron.rollout.collect import Interrupted
from qurl_megatron.runtime.megatron import megatron_runtime
from qurl_megatron.sync.publisher import Publisher, versions_root
from qurl_megatron.training import checkpoint
from qurl_megatron.training.lead import Lead, Rollout
from qurl_megatron.training.rank import StopRequest
from qurl_megatron.training.state import TrainState, claim, latest
from qurl_megatron.training.step import improve


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
            publisher = Publisher(
                policy,
                lead and lead.fleet,
                config.quant,
                _versions(config, policy),
                keep=config.sync.keep,
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
    """Steps until the last one or a stop; what is returned is also on disk."""
    run_dir = Path(config.train.run_dir)
    saved = state.step if state.step else None
    if lead and state.step == 0 and config.train.eval_prompts:
        accuracy = lead.evaluate(step=0)
        state = replace(state, accuracy_before=accuracy, accuracy=accuracy)
    while state.step < config.train.steps:
        step = state.step + 1
        timer = lead.timer(step) if lead else Timer()
        rollout = _share(_rollout(lead, step, timer))
        if rollout is None:
            break
        advantages = _advantages(rollout, config)
        metrics = improve(policy, rollout.samples, advantages, config, step=step, timer=timer)
        with timer.phase("publish"):
            published = publisher.publish(step)
        if lead:
            lead.published(step)
        measured = _over_ranks({**metrics, **published, **timer.metrics()})
        state = replace(state, step=step)
        if lead:
            lead.write(
                step,
                {**values(merge([measured, rollout.metrics])), **_throughput(measured, rollout)},
            )
            state = replace(state, cursor=lead.cursor)
            if config.train.eval_prompts and _due(
                step, config.train.eval_every, config.train.steps
            ):
                state = replace(state, accuracy=lead.evaluate(step))
        if config.checkpoint.every and step % config.checkpoint.every == 0:
            checkpoint.save(run_dir, policy, state, keep=config.checkpoint.keep)
            saved = step
    if saved != state.step:
        checkpoint.save(run_dir, policy, state, keep=config.checkpoint.keep)
    return state


def _rollout(lead: Lead | None, step: int, timer: Timer) -> Rollout | None:
    """The leading rank's rollout; None on the others, and where a stop was requested."""
    if lead is None or lead.stop:
        return None
    try:
        return lead.rollout(step, timer)
    except Interrupted:
        return None


def _share(rollout: Rollout | None) -> Rollout | None:
    """What the leading rank has, on every rank."""
    box = [rollout]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _advantages(rollout: Rollout, config: RunConfig) -> list[float]:
    """One advantage per sample, prompt-major as the samples are."""
    rewards = torch.tensor([sample.reward for sample in rollout.samples], dtype=torch.float32)
    groups = rewards.view(-1, config.rollout.samples_per_prompt)
    return group_advantages(groups, config.algo.advantage).flatten().tolist()


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


def _versions(config: RunConfig, policy: Policy) -> Path:
    """Where versions go, as the leading rank decides it."""
    here = sum(p.numel() for p in policy.gpt.parameters())
    hosts: list = [None] * policy.ranks.world_size
    dist.all_gather_object(hosts, socket.gethostname())
    root: list[Path | None] = [None]
    if policy.ranks.leads:
        whole = here * policy.ranks.tensor.size * policy.ranks.pipeline.size
        root[0] = versions_root(
            config.sync,
            Path(config.train.run_dir),
            one_machine=len(set(hosts)) == 1 and not config.rollout.urls,
            bytes_needed=4 * whole * (config.sync.keep + 1),
        )
    dist.broadcast_object_list(root, src=0)
    return root[0]
