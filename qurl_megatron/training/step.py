"""One rollout batch into updates: deal, pad, score, then one update per minibatch and epoch.

A response keeps its place for the whole step: the minibatch, the data-parallel rank and the
microbatch it is dealt to. So scores computed once serve every epoch, and every layout sums
the same terms.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from qurl_megatron.actor.critic import Critic
from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.actor.policy import Policy
from qurl_megatron.actor.trained import Loss, Trained
from qurl_megatron.algo import token_weights
from qurl_megatron.config import RunConfig
from qurl_megatron.data.dealing import deal, round_up, shuffled
from qurl_megatron.data.pack import TokenBatch, pack_samples, pad_samples
from qurl_megatron.data.responses import Responses, Summary
from qurl_megatron.observe.metrics import Max, Mean, Metric, Timer, merge
from qurl_megatron.training.correction import attach_correction, rejected_responses
from qurl_megatron.training.credit import attach_advantages
from qurl_megatron.training.examples import advantages_of, kept_of
from qurl_megatron.training.finite import NotFinite, check_gradient
from qurl_megatron.training.mismatch import mismatch
from qurl_megatron.training.rollout_file import Proximal, gather_proximal
from qurl_megatron.training.sharded_loss import PolicyLoss, Scorer
from qurl_megatron.training.value_loss import ValueLoss, attach_values

Minibatch = list[TokenBatch]  # this data-parallel rank's microbatches of one optimizer update


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
        samples: of one step, with at least this data-parallel rank's share (``shares``) held.
        critic: updated on the same minibatches, each time before the policy.
        scored: on the leading rank, gets the proximal log-probs before any update, where
            ``train.save_rollouts`` keeps them.

    Returns:
        This rank's metrics, to be merged over ranks, and the advantages of those kept responses
        that it tells of (``training.examples``).

    Raises:
        NotFinite: a gradient is not finite; on every rank, and the weights are lost.
    """
    ranks, algo = policy.ranks, config.algo
    score = Scorer(policy, config.rollout.temperature)
    minibatches = lay_out(ranks, samples, config, step=step)
    flat = [batch for minibatch in minibatches for batch in minibatch]
    with timer.phase("score"):
        flat = attach_scores(
            policy, flat, score, with_reference=algo.kl_coef > 0, bypass=algo.bypass
        )
        if critic:
            flat = attach_values(critic, flat)
        flat, weight_scale, rejections = attach_correction(ranks, flat, algo, config.correction)
        if ranks.last_stage and config.correction.rejects and not config.correction.count_rejected:
            rejected = rejected_responses(ranks, flat, len(samples))
            flat = averaged_without(rejected, flat, samples.summary, config, step=step)
        flat, worth = attach_advantages(ranks, flat, samples.summary, config)
    if config.train.save_rollouts:
        proximal = {} if algo.bypass else gather_proximal(ranks, flat)
        if scored:
            scored(proximal)
    seen: list[dict[str, Metric]] = []
    advantages: dict[int, float] = {}
    if ranks.last_stage and ranks.counted:
        advantages = advantages_of(flat, kept_of(samples.summary, config.observe.samples))
        seen += [rejections, worth, layout_metrics(flat, samples.summary)]
        measured = [] if algo.bypass else flat
        seen += [
            mismatch(b.proximal, b.behaviour, b.owners, len(b.lengths), cap=algo.cap)
            for b in measured
        ]
    batches = iter(flat)
    minibatches = [[next(batches) for _ in minibatch] for minibatch in minibatches]
    with timer.phase("train"):
        loss = PolicyLoss(score, algo, config.correction, weight_scale=weight_scale)
        for _ in range(algo.epochs):
            for minibatch in minibatches:
                if critic:
                    fit = ValueLoss(ranks.context, clip=config.critic.clip)
                    seen += _update(critic, minibatch, fit)
                if critic is None or step > config.critic.ahead_steps:
                    seen += _update(policy, minibatch, loss)
    merged = merge(seen)
    # Shares of a loss add up within an update; updates are averaged.
    updates = algo.epochs * algo.minibatches
    for name in {"policy/loss", "critic/loss"} & merged.keys():
        loss_share = merged[name]
        assert isinstance(loss_share, Mean)
        merged[name] = Mean(loss_share.total, updates / ranks.data.size)
    return merged, advantages


def shares(ranks: Ranks, summary: Summary, config: RunConfig, *, step: int) -> list[list[int]]:
    """The responses whose tokens each data-parallel rank needs, the same on every rank."""
    dealt = _dealt(ranks, summary, config, step)
    return [
        [i for update in dealt for microbatch in update[rank] for i in microbatch]
        for rank in range(ranks.data.size)
    ]


def lay_out(ranks: Ranks, samples: Responses, config: RunConfig, *, step: int) -> list[Minibatch]:
    """This data-parallel rank's microbatches, on its device.

    All have one shape, unless ``train.max_tokens`` gives each its own.
    """
    summary, train = samples.summary, config.train
    chunks, multiple = _multiples(ranks)
    weights = _weights(counted_tokens(summary, config), config, step)
    longest = max(summary.totals)

    def laid_out(microbatch: list[int]) -> TokenBatch:
        parts = [weights[i] for i in microbatch]
        if train.packed:
            return pack_samples(
                samples, parts, sequence_multiple=chunks, multiple=multiple, indices=microbatch
            )
        length = max(summary.totals[i] for i in microbatch) if train.max_tokens else longest
        return pad_samples(samples, parts, length=round_up(length, multiple), indices=microbatch)

    return [
        [laid_out(microbatch).to(ranks.device) for microbatch in minibatch[ranks.data.rank]]
        for minibatch in _dealt(ranks, summary, config, step)
    ]


def averaged_without(
    rejected: Sequence[int],
    batches: Sequence[TokenBatch],
    summary: Summary,
    config: RunConfig,
    *,
    step: int,
) -> list[TokenBatch]:
    """Return the microbatches, with each minibatch averaged over the responses not rejected."""
    counted = counted_tokens(summary, config)
    for i in rejected:
        counted[i] = 0
    weights = _weights(counted, config, step)
    return [
        replace(
            batch,
            weights=batch.weights.new_tensor([weights[i] for i in batch.indices])[batch.owners],
        )
        for batch in batches
    ]


def _weights(counted: Sequence[int], config: RunConfig, step: int) -> dict[int, float]:
    """Weight of a token of each response in the loss of its minibatch, wherever it lies."""
    weights: dict[int, float] = {}
    for minibatch in _minibatches(len(counted), config, step):
        its_weights = token_weights(
            [counted[i] for i in minibatch],
            config.algo.aggregation,
            constant=config.rollout.max_new_tokens,
        )
        weights |= zip(minibatch, its_weights.tolist(), strict=True)
    return weights


def _minibatches(count: int, config: RunConfig, step: int) -> list[list[int]]:
    """The responses of each minibatch of a step."""
    # One seed per run and step; the factor keeps neighbouring runs from sharing their shuffles.
    seed = (config.train.seed * 1_000_003 + step) % 2**63
    group = config.rollout.samples_per_prompt if config.algo.deal == "groups" else 1
    return shuffled(count, config.algo.minibatches, seed, group)


def _dealt(
    ranks: Ranks, summary: Summary, config: RunConfig, step: int
) -> list[list[list[list[int]]]]:
    """``[minibatch][data rank][microbatch][response]``"""
    train, (chunks, multiple) = config.train, _multiples(ranks)
    return deal(
        _minibatches(len(summary), config, step),
        [round_up(n, chunks if train.packed else multiple) for n in summary.totals],
        ranks.data.size,
        train.micro_batch,
        budget=train.max_tokens and max(multiple, train.max_tokens // multiple * multiple),
        packed=train.packed,
    )


def _multiples(ranks: Ranks) -> tuple[int, int]:
    """Return the multiples of lengths: of a sequence in a packed row, and of a row."""
    # Context parallelism cuts every sequence into so many chunks, and sequence parallelism then
    # cuts each context rank's part.
    chunks = 1 if ranks.context.size == 1 else 2 * ranks.context.size
    return chunks, chunks * ranks.tensor.size


def layout_metrics(batches: Sequence[TokenBatch], summary: Summary) -> dict[str, Metric]:
    """How much of the step's microbatches is padding, and how many of them the busiest rank has."""
    positions = sum(batch.input_ids.numel() for batch in batches)
    tokens = sum(summary.totals[i] for batch in batches for i in batch.indices)
    return {
        "train/padding_fraction": Mean(positions - tokens, positions),
        "train/passes": Max(len(batches)),
    }


def attach_scores(
    policy: Policy,
    batches: list[TokenBatch],
    score: Scorer,
    *,
    with_reference: bool,
    bypass: bool = False,
) -> list[TokenBatch]:
    """The same microbatches with proximal (and reference) log-probs of their response tokens, [N].

    Only the last pipeline stage computes them, and only it reads them.

    Args:
        bypass: the behaviour policy stands for the proximal one, which nothing reads.
    """
    if bypass:
        proximal = [batch.behaviour for batch in batches]
    else:
        proximal = policy.score(batches, lambda logits, batch: score(logits, batch)[0])
    reference = []
    if with_reference:
        with policy.reference():
            reference = policy.score(batches, lambda logits, batch: score(logits, batch)[0])
    if proximal:
        batches = [replace(b, proximal=p) for b, p in zip(batches, proximal, strict=True)]
    if reference:
        batches = [replace(b, reference=r) for b, r in zip(batches, reference, strict=True)]
    return batches


def _update(model: Trained, minibatch: Minibatch, loss: Loss) -> list[dict[str, Metric]]:
    """One optimizer update; metrics of every microbatch where they count, and of the update."""
    seen = model.accumulate(minibatch, loss)
    try:
        measured = model.apply()
    except RuntimeError as error:  # of torch's Adam, on every rank
        if "without overflow" not in str(error):
            raise
        raise NotFinite("an update by this learning rate does not fit into FP32") from error
    check_gradient(model, next(v for k, v in measured.items() if k.endswith("/grad_norm")))
    update = _optimizer_metrics(measured)
    return [*seen, update] if model.ranks.counted else [update]


def counted_tokens(summary: Summary, config: RunConfig) -> list[int]:
    """Tokens of each response that the loss averages over, those that the policy wrote; 0 leaves a
    response out.

    Left out are responses that were cut off, where they are masked, and groups that dynamic
    sampling filled the batch up with: penalties, bonuses and baselines of the whole batch would
    teach something even where all answers are equally right.
    """
    algo, size = config.algo, config.rollout.samples_per_prompt
    counted_R = summary.written_R.clone()
    if algo.dynamic_sampling:
        rewards_PG = summary.rewards_R.view(-1, size)
        useful_P = (rewards_PG != rewards_PG[:, :1]).any(1)
        counted_R[~useful_P.repeat_interleave(size)] = 0
    if algo.mask_truncated:
        counted_R[summary.truncated_R] = 0
    return counted_R.tolist()


def _optimizer_metrics(measured: dict[str, float]) -> dict[str, Metric]:
    return {
        name: Max(value) if name.endswith("/lr") else Mean(value, 1.0)
        for name, value in measured.items()
    }
