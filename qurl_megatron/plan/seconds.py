"""Seconds of a step's phases by one roofline: bytes over bandwidths, operations over FLOP/s.

Response lengths are assumed exponential, cut off at ``rollout.max_new_tokens``: P(length > x) =
exp(-x / s) below it, with s such that the mean is right. n responses have the n quantiles, so that
a plan does not depend on a draw, and the longest one reaches the limit.

docs/planning.md has the formulas: of a decode step (a roofline, Williams et al. 2009), a trainer's
pass (Korthikanti et al. 2022, arXiv:2205.05198) and a pipeline's bubble (Narayanan et al. 2021,
arXiv:2104.04473).
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cache

from qurl_megatron.checkpoints.ops import hf_shapes, parameter_count
from qurl_megatron.config import ParallelConfig, RunConfig, TrainConfig
from qurl_megatron.plan import memory
from qurl_megatron.plan.constants import Constants, Gpu
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.tensors.table import is_expert, is_quantized

LONGEST = "the longest response"
ROOM, REQUESTS = "room for keys and values", "rollout.requests_per_engine"
WEIGHTS, COMPUTE, CACHE = "weights' bytes", "compute", "keys' and values' bytes"
SENDS, LAUNCH, PREFILL = "sends between ranks", "launches", "prefill"
BUBBLE = "the pipeline's bubble"

BF16 = 2  # bytes

# Bytes of memory that plain torch operators read and write on a GPU while a version is published.
QUANTIZE_TRAFFIC = 29  # per FP32 weight: read twice for amax; then divide, round, cast
CODE_TRAFFIC = 33  # per byte of codes: a checksum of fourteen operators on words of 8 bytes; a copy

_parameters = cache(parameter_count)


@dataclass(frozen=True)
class Phase:
    """Seconds of a phase by cause."""

    parts: dict[str, float]
    limit: str

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step's responses. Lengths in tokens."""

    prompts: int
    samples: int  # per prompt
    prompt: float  # mean length
    mean: float  # length of a response
    longest: int  # length that a response may have
    minibatches: int
    epochs: int

    @property
    def responses(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """Prompts and responses that train."""
        return self.responses * (self.prompt + self.mean)

    def lengths(self, count: int) -> list[int]:
        """Return the lengths of ``count`` responses, shortest first."""
        scale, lengths = decay(self.mean, self.longest), []
        for i in range(count - 1):
            # -log1p(-u) is the exponential distribution's quantile; u is the middle of part i.
            length = round(-scale * math.log1p(-(i + 0.5) / count))
            lengths.append(min(self.longest, max(1, length)))
        return [*lengths, self.longest]


@cache
def decay(mean: float, longest: int) -> float:
    """Solve mean = s (1 - exp(-longest / s)) for s."""
    from scipy.optimize import brentq  # takes half a second, and every command imports this module

    def too_long(scale: float) -> float:
        return -scale * math.expm1(-longest / scale) - mean

    return brentq(too_long, mean, 1e6 * longest)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """GPUs of one kind, and the share of their data sheet that software reaches."""

    gpu: Gpu
    constants: Constants
    node: int  # GPUs of a machine

    def compute(self, operations: float, scheme: str = "none") -> float:
        share = self.constants.flops * (self.constants.codes if scheme != "none" else 1)
        return operations / (self.gpu.flops[scheme] * share)

    def read(self, size: float) -> float:
        return size / (self.gpu.hbm * self.constants.hbm)

    def send(self, size: float, extent: int) -> float:
        """Return the seconds of a rank among ranks that span ``extent`` GPUs."""
        bandwidth = self.gpu.nvlink if extent <= self.node else self.gpu.network
        return size / (bandwidth * self.constants.collective)

    def exchange(self, size: float, ranks: int) -> float:
        """Return a rank's seconds to send ``size`` bytes in equal parts to ``ranks``, with itself.

        They are neighbours; parts within a machine travel while the others cross the network.
        """
        near = min(ranks, self.node)
        within = self.send((near - 1) / ranks * size, near)
        return max(within, self.send((ranks - near) / ranks * size, ranks))


@cache
def linear_parameters(arch: Arch) -> float:
    """Count the layers' linear weights that a token meets: of experts, the chosen ones."""
    total = expert_parameters(arch)
    for name, shape in hf_shapes(arch).items():
        if is_quantized(name) and not is_expert(name):
            total += shape[0] * shape[1]
    return total


def expert_parameters(arch: Arch) -> float:
    """Count the weights of experts of all layers that a token meets."""
    if arch.experts is None:
        return 0.0
    met = arch.num_layers * arch.experts.top_k
    return float(met * 3 * arch.hidden * arch.experts.intermediate)


@dataclass(frozen=True)
class Engine:
    arch: Arch
    scheme: str
    tensor: int  # GPUs


def decode_step(roof: Roofline, engine: Engine, running: float, context: float) -> dict[str, float]:
    """Return the seconds of one decode step by cause, of ``running`` responses with a mean
    ``context`` of tokens."""
    arch, tensor = engine.arch, engine.tensor
    embedding = arch.vocab * arch.hidden / tensor
    weights: float = memory.engine_weights(arch, engine.scheme, tensor, BF16)
    if not arch.tied:  # a step reads one row of the embedding per response
        weights -= BF16 * embedding
    if arch.experts:  # a step reads the experts that any response has chosen, all equally likely
        idle = (1 - arch.experts.top_k / arch.experts.count) ** running
        weights -= idle * memory.engine_experts(arch, engine.scheme, tensor, BF16)
    read = roof.read(weights)
    multiply = roof.compute(2 * running * linear_parameters(arch) / tensor, engine.scheme)
    multiply += roof.compute(2 * running * embedding)
    tokens = running * context
    attention = 4 * arch.num_layers * arch.heads * arch.head_dim / tensor
    cached = roof.read(tokens * memory.cached_token(arch, tensor, BF16))
    sums = 0.0
    if tensor > 1:
        sent = 2 * (tensor - 1) / tensor * running * arch.hidden * BF16
        sums = 2 * arch.num_layers * (roof.constants.latency + roof.send(sent, tensor))
    layer = roof.constants.decode_layer
    if engine.scheme != "none":
        layer += roof.constants.activation_codes
    if arch.experts:
        layer += roof.constants.decode_experts
    return {
        # The weights are read while they are multiplied: the longer of the two counts.
        WEIGHTS: read * (read >= multiply),
        COMPUTE: multiply * (multiply > read),
        CACHE: max(cached, roof.compute(tokens * attention)),
        SENDS: sums,
        LAUNCH: arch.num_layers * layer + roof.constants.decode_step,
    }


@cache
def rollout_time(
    roof: Roofline, engine: Engine, work: Workload, *, engines: int, room: int, requests: int
) -> Phase:
    """Return the time until the busiest of ``engines`` has answered its share.

    Its cache must hold running responses at their average length over their lives, E[L^2] / 2 E[L]
    besides the prompt; SGLang takes the youngest back where chance wants more.

    Args:
        room: tokens in an engine's cache.
        requests: ``rollout.requests_per_engine``.
    """
    share = math.ceil(work.responses / engines)
    lengths = work.lengths(share)
    age = sum(length * length for length in lengths) / (2 * sum(lengths))
    slots = max(1, min(share, requests, int(room / (work.prompt + age))))

    def decode(steps: float, running: int, generated: float) -> dict[str, float]:
        step = decode_step(roof, engine, running, work.prompt + generated)
        return {cause: steps * seconds for cause, seconds in step.items()}

    parts = decode((share - slots) * work.mean / slots, slots, age)
    before = 0
    for ended, length in enumerate(work.lengths(slots)):
        shrunk = decode(length - before, slots - ended, (before + length) / 2)
        parts = {cause: parts[cause] + shrunk[cause] for cause in parts}
        before = length
    # Each prompt once on every engine that answers it; its other responses find it cached.
    prompts = min(share, work.prompts * (1 - (1 - 1 / engines) ** work.samples))
    operations = 2 * linear_parameters(engine.arch) / engine.tensor * prompts * work.prompt
    parts[PREFILL] = roof.compute(operations, engine.scheme)

    limit = max(parts, key=lambda cause: parts[cause])
    even = sum(decode(share * work.mean / slots, slots, work.mean / 2).values())
    at_once = sum(decode(work.mean, share, work.mean / 2).values())
    if even < roof.constants.tail * sum(parts.values()):
        limit = LONGEST
    elif slots < share and at_once < roof.constants.no_room * even:
        limit = REQUESTS if slots == requests else ROOM
    return Phase(parts, limit)


@dataclass(frozen=True)
class Hand:
    """Work of the fullest data rank in one update."""

    passes: int
    tokens: float  # of all passes, padding included
    squares: float  # sum of the squared lengths


@cache
def deal_out(work: Workload, data: int, train: TrainConfig) -> Hand:
    """Return the work of a data rank: an even share, but at least the longest response."""
    budget, rows = train.max_tokens, train.micro_batch
    count = work.responses // work.minibatches
    lengths = [work.prompt + length for length in work.lengths(count)]
    if not budget:
        # Rows are padded to the longest of a pass: in the mean, this quantile.
        lengths = [lengths[count * rows // (rows + 1)]] * count
    tokens = max(sum(lengths) / data, lengths[-1])
    squares = max(sum(length * length for length in lengths) / data, lengths[-1] ** 2)
    passes = math.ceil(tokens / budget) if budget else count // data // rows
    return Hand(passes, tokens, squares)


def forward(
    roof: Roofline, arch: Arch, parallel: ParallelConfig, hand: Hand, *, head: bool = True
) -> dict[str, float]:
    """Return the seconds of the fullest stage for all forward passes of an update, with an output
    layer (``head``) or a critic's single row."""
    t, c, e = parallel.tensor, parallel.context, parallel.expert
    layers = arch.num_layers // parallel.pipeline
    weights = linear_parameters(arch) / parallel.pipeline
    if e > 1:  # all wait for the fullest rank
        weights += (roof.constants.crowded - 1) * expert_parameters(arch) / parallel.pipeline
    if head:  # of the last stage
        weights += arch.vocab * arch.hidden
    attention = roof.compute(2 * layers * arch.heads * arch.head_dim * hand.squares / (t * c))
    compute = roof.compute(2 * weights * hand.tokens / (t * c)) + attention
    sums = 2 * (t - 1) / t * hand.tokens / c * arch.hidden * BF16
    keys = (c - 1) / c * hand.tokens * 2 * arch.kv_heads * arch.head_dim / t * BF16
    # Each block of keys travels while attention to the one before is computed.
    exchange = max(0.0, layers * roof.send(keys, t * c) - attention)
    sends = 2 * layers * roof.send(sums, t) + exchange
    launch = roof.constants.layer_launch
    if arch.experts:
        launch += arch.experts.count // e * roof.constants.expert_launch
        if e > 1:  # in place of one of the sums
            copies = hand.tokens / (t * c) * arch.experts.top_k
            size = roof.constants.crowded * copies * arch.hidden * BF16
            sends += layers * (2 * roof.exchange(size, e) - roof.send(sums, t))
    launches = hand.passes * layers * launch
    return {
        COMPUTE: compute,
        SENDS: sends,
        # A GPU waits for its host where the kernels are shorter than their launches.
        LAUNCH: max(0.0, launches - compute - sends),
        BUBBLE: max(launches, compute + sends) * (parallel.pipeline - 1) / hand.passes,
    }


def training_time(
    roof: Roofline,
    archs: list[Arch],
    parallel: ParallelConfig,
    work: Workload,
    hand: Hand,
    *,
    recompute: bool,
    reference: bool,
    all_scored: bool,
) -> Phase:
    """Return the seconds of scoring and of the updates.

    Args:
        archs: the policy's, and the critic's where there is one.
        reference: its log-probs are wanted as well.
        all_scored: False where the first update scores its own minibatch.
    """
    parts: dict[str, float] = defaultdict(float)
    for index, arch in enumerate(archs):
        scores = 1.0
        if index == 0:
            scores += reference - (not all_scored) / work.minibatches
        for cause, seconds in forward(roof, arch, parallel, hand, head=index == 0).items():
            backward = 1 if cause in (SENDS, LAUNCH) else 2
            passes = scores + work.epochs * (1 + backward + recompute)
            parts[cause] += work.minibatches * passes * seconds
    return Phase(dict(parts), max(parts, key=lambda cause: parts[cause]))


def publish_time(roof: Roofline, config: RunConfig, arch: Arch) -> float:
    """Return the seconds of one publication by the recipe's transport.

    A training rank quantizes its share of the weights and puts the codes; an engine rank checks and
    copies its own meanwhile, bucket behind bucket. Files go through the disk that all machines
    share; memory goes over NVLink, a relay over that and the network, and a group over the network
    from engine to engine, whatever their number. ``python -m benchmarks.publish`` and
    ``publish_fleet`` measure it.
    """
    parallel, rollout, constants = config.parallel, config.rollout, roof.constants
    version = memory.engine_weights(arch, config.quant.scheme, 1, config.model.itemsize)
    # Replicas take turns, bucket by bucket; experts have fewer, which hold fewer.
    quantized = version / parallel.world_size
    received = version / rollout.engine_tensor
    weights = _parameters(arch) / parallel.world_size
    making = roof.read(weights * QUANTIZE_TRAFFIC + quantized * CODE_TRAFFIC)
    loading = roof.read(received * CODE_TRAFFIC)
    match config.transport:
        case "files":
            making = max(making, version / constants.disk)
            loading = max(loading, rollout.engines * version / constants.disk)
        case "memory":
            loading += roof.send(received, 1)
        case "relay":
            # Each GPU takes its peers' parts from other machines before engines see the bucket.
            machines = math.ceil(parallel.world_size / roof.node)
            if machines > 1:
                making += roof.send((machines - 1) * quantized, roof.node + 1)
            loading += roof.send(received, 1)
        case _:
            loading += roof.send(max(quantized, received), roof.node + 1)
    return constants.publish_over * max(making, loading)
