"""A run on one rank: find where it goes on, load models, start engines, and enter ``loop``."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from qurl_megatron.actor.aligned import Align
from qurl_megatron.actor.critic import Critic
from qurl_megatron.actor.megatron import (
    Ranks,
    held,
    kept_on_lead,
    megatron_runtime,
    on_lead,
    release_memory,
    together,
)
from qurl_megatron.actor.policy import Policy, Reference
from qurl_megatron.checkpoints.places import description_of
from qurl_megatron.config import RunConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.fleet.answer import Routed
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.fleet.turns import Turns
from qurl_megatron.kit.errors import ConfigError, Interrupted
from qurl_megatron.kit.place import ranks_here
from qurl_megatron.kit.stop import StopRequest
from qurl_megatron.observe.text import how_many
from qurl_megatron.publish.publisher import Publisher, make_sender
from qurl_megatron.rewards import RewardPool
from qurl_megatron.rewards.own_code import checksums
from qurl_megatron.rewards.workers import EnvironmentPool
from qurl_megatron.tensors.arch import arch_of, facts_of, read_stop_ids
from qurl_megatron.training import checkpoint
from qurl_megatron.training.each_node import engines_here
from qurl_megatron.training.guard import NotFinite, examine
from qurl_megatron.training.inputs import read_prompts, sources
from qurl_megatron.training.journal import Journal
from qurl_megatron.training.lead import Lead
from qurl_megatron.training.loop import Run
from qurl_megatron.training.newest import newest_whole, refuse_damaged_together
from qurl_megatron.training.state import (
    COMPARABLE_UNLESS,
    Claim,
    TrainState,
    claim,
    stop_sentence,
    tell_done,
)
from qurl_megatron.wire.lease import Owner
from qurl_megatron.wire.store import check_host
from qurl_megatron.wire.transport import settle_nccl


def train(config: RunConfig, stop: StopRequest, prepare: Callable[[], None] | None = None) -> bool:
    """Start a run, or resume the one in ``train.run_dir``.

    Args:
        prepare: called on the leading rank once all ranks have met, before anything else; its
            ConfigError ends them all.

    Returns:
        True when all steps are done, False after a clean stop with a checkpoint.
    """
    run_dir = Path(config.train.run_dir)
    if config.sync.transport == "group":
        settle_nccl()
    with megatron_runtime(config.parallel, seed=config.train.seed) as ranks:
        if prepare:
            on_lead(prepare, ranks, waiting_for="checking rewards")
        begin = partial(claim, run_dir, config)
        claimed = kept_on_lead(begin, ranks, waiting_for="taking the run directory")
        folder, before = newest_whole(run_dir, ranks) or (None, TrainState())
        if folder and before.finished(config.train.steps):
            on_lead(
                lambda: tell_done(run_dir, before, config, held(claimed).changes),
                ranks,
                waiting_for="its last words",
            )
            return True
        if config.transport in ("group", "relay") and (host := config.sync.host):
            on_lead(lambda: check_host(host), ranks, waiting_for="looking at sync.host")

        refuse_damaged_together(sources(config, resumed=folder is not None), ranks)
        read = partial(_read_prompts, config, folder, before)
        prompts = kept_on_lead(read, ranks, waiting_for="reading the data")
        policy, critic = models_of(config, ranks)
        if folder:
            checkpoint.load(folder, policy, critic)
        state, remarks = on_lead(
            lambda: adapt(config, held(claimed), before),
            ranks,
            waiting_for="looking at what has changed",
        )
        norm = _finite_norm(policy, critic)
        release_memory()

        with ExitStack() as stack:
            engines = None
            if config.rollout.each_node:
                engines = stack.enter_context(engines_here(config, ranks))

            def start() -> Lead:
                lead = leading(held(claimed), stop, state, norm, held(prompts), remarks)
                return stack.enter_context(lead)

            try:
                lead = kept_on_lead(start, ranks, waiting_for="starting engines")
            except Interrupted:
                last_words = stop_sentence(stop.by, state.step, config.train.steps)
                on_lead(lambda: print(last_words, flush=True), ranks, waiting_for="its last words")
                return False
            sender = make_sender(config.sync, config.rollout, policy, run_dir)
            publisher = Publisher(
                policy,
                lead.fleet if lead else None,
                config.quant,
                config.sync,
                sender,
                seed=config.train.seed,
                # Without staleness engines wait anyway, so they load while the ranks quantize.
                stage=config.rollout.max_staleness > 0 and sender.lasting,
                timeline=lead.journal.timeline if lead else None,
            )
            with publisher:
                saved = state.step if folder else None
                run = Run(config, policy, critic, publisher, lead, state, saved, engines)
                run.to_the_end()
            on_lead(
                lambda: held(lead).journal.finish(run.state, stop.by),
                ranks,
                waiting_for="writing the report",
            )
    return run.state.finished(config.train.steps)


def _read_prompts(config: RunConfig, folder: Path | None, state: TrainState) -> PromptStream:
    """Read the prompts of the run, and print remarks on them before models load.

    Args:
        folder: checkpoint that the run goes on from.
    """
    prompts = read_prompts(config, state)
    for remark in prompts.remarks():
        print(remark, flush=True)
    print(f"loading {folder or config.model.path}", flush=True)
    return prompts


def adapt(config: RunConfig, claimed: Claim, state: TrainState) -> tuple[TrainState, list[str]]:
    """Adapt the state to the present recipe and user code.

    Returns:
        The part of the state that still holds, and the changes since it was saved, a sentence each.
    """
    if state.step:
        print(f"resuming {claimed.run_dir} after step {state.step}", flush=True)
    comparable = COMPARABLE_UNLESS.isdisjoint(change.key for change in claimed.changes)
    remarks = []
    if claimed.changes:
        remarks.append(f"settings changed: {', '.join(map(str, claimed.changes))}")
    sums = checksums(config.own_code.values())
    own_code = {key: sums[name] for key, name in config.own_code.items() if name in sums}
    for key, checksum in own_code.items():
        if state.own_code.get(key, checksum) == checksum:
            continue
        consequence = "the policy learns by the new one from here on"
        if key != "algo.function":
            comparable = False
            consequence = "held-out scores from here on are not compared with earlier ones"
        setting = f"{key}={config.own_code[key]}"
        remarks.append(f"the code of {setting} has changed since step {state.step}: {consequence}")
    state = replace(state, own_code=own_code)
    if not comparable:
        state = state.without_scores()
    return state, remarks


def _finite_norm(policy: Policy, critic: Critic | None) -> float:
    """Return the norm of the weights the run begins with.

    Raises:
        ConfigError: they are not finite.
    """
    try:
        models = [model for model in (policy, critic) if model]
        return math.sqrt(sum(together(lambda: examine(models))))
    except NotFinite as error:
        raise ConfigError(
            f"the run would begin with broken weights ({error}); name another model.path, or "
            "delete the newest checkpoint in train.run_dir to resume from the one before"
        ) from error


def models_of(config: RunConfig, ranks: Ranks) -> tuple[Policy, Critic | None]:
    """Load the policy, with a reference where the recipe has one; and its critic, if any."""
    algo, reference = config.algo, None
    if algo.kl_coef > 0:
        reference = Reference(algo.reference, algo.reference_memory)
    policy = Policy.build(
        config.model,
        config.parallel,
        config.policy_optimizer,
        ranks,
        uaq_scale=config.quant.uaq_scale,
        reference=reference,
        align=alignment(config, ranks.device),
    )
    if algo.advantage != "gae":
        return policy, None
    critic = Critic.build(config.model, config.parallel, config.critic_optimizer, ranks)
    return policy, critic


def alignment(config: RunConfig, device: torch.device) -> Align | None:
    """Return how linear layers follow the engines'; None: they compute with weights as they are.

    Args:
        device: of the policy; SGLang engines of a run on a CPU have the embedded engine's kernels.
    """
    if config.train.align == "none":
        return None
    return Align(
        scheme=config.quant.scheme,
        activations=config.train.align == "full",
        arithmetic=config.rollout.kind.arithmetic if device.type == "cuda" else "exact",
        engine_tensor=config.engine_tensor,
    )


@contextmanager
def leading(
    claimed: Claim,
    stop: StopRequest,
    state: TrainState,
    weight_norm: float,
    prompts: PromptStream,
    remarks: Sequence[str],
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
    rollout = config.rollout
    with ExitStack() as stack:
        stack.enter_context(claimed)
        if places := rollout.rendezvous or ", ".join(rollout.urls):
            print(f"looking for engines at {places}", flush=True)
        else:
            engines = how_many(rollout.engines, f"{rollout.backend} engine")
            print(f"starting {engines}; logs are in {claimed.run_dir / 'logs'}", flush=True)
        described = description_of(config.model.path)
        arch, routed = arch_of(described), None
        if config.model.routing_replay == "rollout":
            routed = Routed(arch.num_layers, arch.routed.top_k, arch.routed.count)
        fleet = Fleet(
            rollout,
            model_dir=Path(config.model.path),
            scheme=config.quant.scheme,
            dtype=config.model.dtype,
            log_dir=claimed.run_dir / "logs",
            vocabulary=arch.vocab,
            routed=routed,
            facts=facts_of(described),
            stops=read_stop_ids(described, prompts.tokenizer.stop_ids()),
            owner=Owner.of(claimed.run_dir),
            trainer_ranks=ranks_here(os.environ),
            stop=lambda: bool(stop),
        )
        stack.enter_context(fleet)
        rewards = stack.enter_context(RewardPool(config.reward))
        turns = None
        if config.rollout.environment:
            pool = stack.enter_context(EnvironmentPool(config.rollout))
            turns = Turns(pool, prompts.tokenizer, chat=config.data.chat)
        journal = stack.enter_context(Journal(claimed, state, weight_norm, remarks))
        yield stack.enter_context(
            Lead(config, state, prompts, fleet, rewards, journal, turns, stop=lambda: bool(stop))
        )
