"""Seconds that the trainer takes for a step's responses: scoring them, then the updates.

    forward   = 2 x parameters x T + 2 x layers x heads x head size x sum of L^2
    backward  = twice the products, 2.5 times the attention; with recomputation one more forward

operations over the T tokens of a pass (sequences of length L; half of their L x L products are
masked), divided over tensor and context ranks, at the share of FLOP/s that products attain; as in
Korthikanti et al. 2022 (arXiv:2205.05198). Tensor ranks add up twice a layer and direction; a
pipeline of p stages fills and drains, (p - 1) / m of m passes (Narayanan et al. 2021,
arXiv:2104.04473); data ranks add their gradients up once an update.
"""

from dataclasses import dataclass
from functools import cache

from qurl_megatron.config import ParallelConfig
from qurl_megatron.data.dealing import into_microbatches, over_ranks
from qurl_megatron.plan.constants import Constants, Gpu
from qurl_megatron.plan.rollout_time import linear_parameters
from qurl_megatron.plan.workload import Workload, in_turn
from qurl_megatron.tensors.arch import Arch

PRODUCTS, ATTENTION, LAUNCH = "compute", "attention", "launches"
TENSOR, CONTEXT, SENDS = "tensor ranks' sums", "context ranks' exchange", "sends between stages"
BUBBLE, UNEVEN = "the pipeline's bubble", "data ranks of uneven length"
GRADIENTS, OPTIMIZER = "the gradients' sum", "the optimizer"


@dataclass(frozen=True)
class Hand:
    """Work of the fullest data rank in one update."""

    passes: int
    tokens: int  # of all passes, padding included
    squares: int  # sum of the squared lengths
    even: float  # tokens, if all data ranks had the same


@cache
def deal_out(work: Workload, data: int, budget: int, micro_batch: int, packed: bool) -> Hand:
    """The passes of one update, dealt as the trainer deals them.

    Args:
        budget, micro_batch, packed: ``train.max_tokens``, ``.micro_batch`` and ``.packed``.
    """
    count = work.responses // work.minibatches
    lengths = [round(work.prompt) + length for length in in_turn(work.lengths(count))]
    hands = over_ranks(range(count), lengths, data, evenly=budget > 0)
    loads = [sum(lengths[i] for i in hand) for hand in hands]
    fullest = hands[loads.index(max(loads))]
    dealt = into_microbatches(fullest, lengths, micro_batch, budget=budget, packed=packed)
    passes = [[lengths[i] for i in together] for together in dealt]
    if not packed:  # all rows of a pass are as long as its longest
        passes = [[max(together)] * len(together) for together in passes]
    laid_out = [length for together in passes for length in together]
    squares = sum(length * length for length in laid_out)
    return Hand(len(passes), sum(laid_out), squares, sum(lengths) / data)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A layout of the trainer, and its model."""

    arch: Arch
    parallel: ParallelConfig
    node: int  # GPUs of a machine
    recompute: bool
    distributed: bool  # optimizer
    overlap: bool  # of the gradients' sum with the backward pass
    parameters: int  # of the fullest stage on one rank
    head: bool = True  # an output layer; a critic's has one row
    itemsize: int = 2

    def link(self, gpu: Gpu, constants: Constants, extent: int, neighbours: int = 1) -> float:
        """Bytes/s of a rank among ranks that span ``extent`` GPUs, ``neighbours`` on a machine."""
        fast = gpu.nvlink * constants.collective
        if extent <= self.node:
            return fast
        # A ring leaves a machine once; its members there share their networks for that.
        return min(fast, gpu.network * constants.collective * max(1, neighbours))


Parts = dict[str, float]


def forward(trainer: Trainer, gpu: Gpu, constants: Constants, hand: Hand) -> Parts:
    """Seconds of the fullest stage for all passes of an update, forward."""
    arch, parallel = trainer.arch, trainer.parallel
    t, c = parallel.tensor, parallel.context
    layers = arch.num_layers // parallel.pipeline
    peak = gpu.flops["none"]
    # The last stage has the output layer besides.
    weights = linear_parameters(arch) / parallel.pipeline
    if trainer.head:
        weights += arch.vocab * arch.hidden
    products = 2 * weights * hand.tokens / (t * c) / (peak * constants.gemm)
    width = arch.heads * arch.head_dim
    attention = 2 * layers * width * hand.squares / (t * c) / (peak * constants.attention)
    local = hand.tokens / c
    sums = 0.0
    if t > 1:
        sent = 2 * (t - 1) / t * local * arch.hidden * trainer.itemsize
        link = trainer.link(gpu, constants, t)
        sums = 2 * layers * (sent / link + hand.passes * constants.training_latency)
    exchange = 0.0
    if c > 1:
        keys = 2 * arch.kv_heads * arch.head_dim / t * trainer.itemsize
        sent = layers * (c - 1) * local * keys
        # Each block of keys travels while attention to the one before is computed.
        exchange = max(0.0, sent / trainer.link(gpu, constants, t * c) - attention)
    sends = 0.0
    if parallel.pipeline > 1:
        split = t if parallel.sequence else 1
        sends = 2 * local * arch.hidden * trainer.itemsize / split
        sends /= trainer.link(gpu, constants, parallel.world_size)
    kernels = products + attention + sums + exchange + sends
    launches = hand.passes * layers * constants.layer_launch
    return {
        PRODUCTS: products,
        ATTENTION: attention,
        TENSOR: sums,
        CONTEXT: exchange,
        SENDS: sends,
        # A GPU waits for its host where the kernels are shorter than their launches.
        LAUNCH: max(0.0, launches - kernels),
    }


def update(trainer: Trainer, gpu: Gpu, constants: Constants, hand: Hand) -> Parts:
    """Return the seconds of one update by cause."""
    ahead = forward(trainer, gpu, constants, hand)
    backward_passes = {PRODUCTS: 2.0, ATTENTION: constants.attention_backward}
    parts = {}
    for name, seconds in ahead.items():
        passes = 1 + backward_passes.get(name, 1.0)
        if trainer.recompute and name != SENDS:
            passes += 1
        parts[name] = seconds * passes
    backward = sum(parts.values()) - sum(ahead.values())
    parallel = trainer.parallel
    parts = _in_pipeline(parts, parallel.pipeline, hand)
    parameters, copies = trainer.parameters, parallel.data * parallel.context
    owned = float(parameters)
    if trainer.distributed:
        owned /= copies
    if copies > 1:
        spread = parallel.tensor * copies
        link = trainer.link(gpu, constants, spread, trainer.node // parallel.tensor)
        moved = (copies - 1) / copies * parameters
        add, gather = moved * 4 * 2 / link, 0.0
        if trainer.distributed:
            add, gather = moved * 4 / link, moved * trainer.itemsize / link
        if trainer.overlap:  # only the last pass of an update sends while it computes
            add = max(0.0, add - backward / hand.passes)
        parts[GRADIENTS] = add + gather
    parts[OPTIMIZER] = owned * constants.optimizer_bytes / (gpu.hbm * constants.decode_hbm)
    return parts


@dataclass(frozen=True)
class TrainingTime:
    score: float
    train: float
    parts: Parts  # of both; they add up to it
    limit: str

    @property
    def seconds(self) -> float:
        return self.score + self.train


@cache
def training_time(
    policy: Trainer,
    critic: Trainer | None,
    gpu: Gpu,
    constants: Constants,
    work: Workload,
    hand: Hand,
    *,
    reference: bool,
) -> TrainingTime:
    """Seconds of a step's scores and updates.

    Args:
        critic: of the policy's layout; None where there is none.
        reference: its log-probs are wanted as well.
    """
    updates = work.minibatches
    trainers = [policy] + ([critic] if critic else [])
    score = train = 0.0
    parts: Parts = {}
    for trainer in trainers:
        ahead = forward(trainer, gpu, constants, hand)
        times = updates * (2 if reference and trainer is policy else 1)
        scored = _times(_in_pipeline(ahead, trainer.parallel.pipeline, hand, updates), times)
        updated = _times(update(trainer, gpu, constants, hand), updates * work.epochs)
        score += sum(scored.values())
        train += sum(updated.values())
        for name, seconds in (*scored.items(), *updated.items()):
            parts[name] = parts.get(name, 0.0) + seconds
    return TrainingTime(score, train, parts, limit=max(parts, key=lambda name: parts[name]))


def _in_pipeline(parts: Parts, stages: int, hand: Hand, updates: int = 1) -> Parts:
    """Add the fill and drain of the pipeline, and uneven data ranks, to ``parts``.

    Args:
        updates: whose passes follow on each other without a drain.
    """
    total = sum(parts.values())
    even = min(1.0, hand.even / hand.tokens)
    return {
        **{name: seconds * even for name, seconds in parts.items()},
        UNEVEN: total * (1 - even),
        BUBBLE: total * (stages - 1) / (hand.passes * updates),
    }


def _times(parts: Parts, factor: float) -> Parts:
    return {name: factor * seconds for name, seconds in parts.items()}
