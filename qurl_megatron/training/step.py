"""One rollout batch into updates: lay out, score, then one update per minibatch and epoch."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import islice

import torch.distributed as dist
from torch import Tensor

from qurl_megatron.actor.critic import Critic
from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.actor.policy import Policy
from qurl_megatron.actor.trained import Loss, Trained
from qurl_megatron.config import RunConfig
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.data.responses import Responses
from qurl_megatron.observe.metrics import Max, Mean, Metric, Timer, merge
from qurl_megatron.training.credit import attach_worth
from qurl_megatron.training.groups import example_indices
from qurl_megatron.training.guard import NotFinite, check_gradient
from qurl_megatron.training.journal import Proximal
from qurl_megatron.training.layout import Minibatch, lay_out, layout_metrics
from qurl_megatron.training.losses import PolicyLoss, Scorer, ValueLoss, attach_values, with_scores
from qurl_megatron.training.mismatch import batch_mismatch
from qurl_megatron.training.routes import with_routes


def improve(
    policy: Policy,
    samples: Responses,
    config: RunConfig,
    *,
    step: int,
    timer: Timer,
    critic: Critic | None = None,
    scored: Callable[[Proximal], None] | None = None,
) -> tuple[dict[str, Metric], dict[int, float]]:
    """Score the samples, then update the policy on them; all ranks call it together.

    Args:
        samples: of one step.
        critic: updated on the same minibatches, each time before the policy.
        scored: on the leading rank, gets the proximal log-probs before any update, where
            ``train.save_rollouts`` keeps them.

    Returns:
        This rank's metrics, to be merged over ranks; and the mean advantages of this rank's
        responses that are kept as examples.

    Raises:
        NotFinite: a gradient is not finite; on every rank, and the weights are lost.
    """
    ranks, algo, summary = policy.ranks, config.algo, samples.summary
    score = Scorer(policy, config.rollout.temperature)
    replay = config.model.routing_replay
    minibatches = lay_out(ranks, samples, config, step=step)
    if replay == "rollout":
        minibatches = with_routes(ranks, policy.arch, samples, minibatches)
    sizes = [len(minibatch) for minibatch in minibatches]
    batches = [batch for minibatch in minibatches for batch in minibatch]
    learns = critic is None or step > config.critic.ahead_steps
    # The first update's own pass is by the proximal policy: scoring would give the same.
    unscored = 0 if config.scores_first_minibatch or not learns else sizes[0]
    with timer.phase("score"):
        batches = attach_scores(
            policy,
            batches,
            score,
            begin=unscored,
            with_reference=algo.kl_coef > 0,
            record=replay == "proximal",
        )
        if critic:
            batches = attach_values(critic, batches)
        batches, credit = attach_worth(ranks, batches, summary, config, step=step)
    if config.train.save_rollouts:
        proximal = gather_proximal(ranks, batches)
        if scored:
            scored(proximal)

    metrics: list[dict[str, Metric]] = []
    advantages: dict[int, float] = {}
    if ranks.last_stage and ranks.counted:
        advantages = mean_advantages(batches, example_indices(summary, config.observe.samples))
        metrics += [credit, layout_metrics(batches, summary)]

    learners: list[tuple[Trained, Loss]] = []
    if critic:
        learners.append((critic, ValueLoss(ranks.context, clip=config.critic.clip)))
    if learns:
        learners.append((policy, PolicyLoss(score, algo, config.correction)))
    with timer.phase("train"):
        for _ in range(algo.epochs):
            remaining = iter(batches)
            for size in sizes:
                minibatch = list(islice(remaining, size))
                for model, loss in learners:
                    metrics += _update(model, minibatch, loss)
    if ranks.last_stage and ranks.counted:
        metrics += [batch_mismatch(batch, algo.cap) for batch in batches[unscored:]]
    if policy.routing:
        metrics.append(policy.routing.metrics())
    return _merged(metrics, algo.epochs * algo.minibatches / ranks.data.size), advantages


def attach_scores(
    policy: Policy,
    batches: Sequence[TokenBatch],
    score: Scorer,
    *,
    begin: int = 0,
    with_reference: bool,
    record: bool = False,
) -> list[TokenBatch]:
    """Return the microbatches with reference log-probs, and from ``begin`` on proximal ones.

    Args:
        record: also add the experts that the proximal policy chose, from ``begin`` on.
    """

    def log_probs(logits: Tensor, batch: TokenBatch) -> Tensor:
        return score(logits, batch)[0]

    later = batches[begin:]
    if record:
        with policy.recording() as routes:
            proximal = policy.score(later, log_probs)
        later = [replace(b, routes=chosen) for b, chosen in zip(later, routes, strict=True)]
    else:
        proximal = policy.score(later, log_probs)
    later = with_scores(later, "proximal", proximal)
    scored = [*batches[:begin], *later]
    if with_reference:
        with policy.reference():
            scored = with_scores(scored, "reference", policy.score(batches, log_probs))
    return scored


def gather_proximal(ranks: Ranks, batches: Sequence[TokenBatch]) -> Proximal:
    """Gather all ranks' log-probs on the leading rank; others get nothing. All ranks call it.

    Args:
        batches: this rank's microbatches of the step, scored.
    """
    own_scores: Proximal = {}
    if ranks.last_stage and ranks.counted:
        own_scores = {
            index: part.float().cpu().numpy()
            for batch in batches
            for index, part in zip(batch.indices, batch.proximal.split(batch.lengths), strict=True)
        }
    gathered: list[Proximal] | None = [{}] * ranks.world_size if ranks.leads else None
    dist.gather_object(own_scores, gathered)
    return {i: log_probs for part in gathered or () for i, log_probs in part.items()}


def mean_advantages(batches: Sequence[TokenBatch], kept: Collection[int]) -> dict[int, float]:
    """Return the mean advantage of each kept response that lies on this rank and has tokens."""
    means = {}
    for batch in batches:
        parts = batch.advantages.split(batch.lengths)
        for index, advantages in zip(batch.indices, parts, strict=True):
            if index in kept and len(advantages):
                means[index] = advantages.double().mean().item()
    return means


def _merged(metrics: Sequence[dict[str, Metric]], updates: float) -> dict[str, Metric]:
    """Merge metrics. Shares of a loss add up within an update; updates are averaged.

    Args:
        updates: of the step, divided by the data-parallel ranks.
    """
    merged = merge(metrics)
    for name in {"policy/loss", "critic/loss"} & merged.keys():
        loss_share = merged[name]
        assert isinstance(loss_share, Mean)
        merged[name] = Mean(loss_share.total, updates)
    return merged


def _update(model: Trained, minibatch: Minibatch, loss: Loss) -> list[dict[str, Metric]]:
    """Make one optimizer update; return metrics of every microbatch and of the update."""
    metrics = model.accumulate(minibatch, loss)
    try:
        grad_norm, lr = model.apply()
    except RuntimeError as error:  # of torch's Adam, on every rank
        if "without overflow" not in str(error):
            raise
        raise NotFinite("an update by this learning rate does not fit into FP32") from error
    check_gradient(model, grad_norm)
    owner = "critic" if isinstance(model, Critic) else "optimizer"
    update: dict[str, Metric] = {
        f"{owner}/grad_norm": Mean(grad_norm, 1.0),
        f"{owner}/lr": Max(lr),
    }
    return [*metrics, update] if model.ranks.counted else [update]
