"""Seconds that engines take for a step's responses.

A decode step gives every running response a token. It reads the engine's weights once and the
running responses' keys and values (Williams et al. 2009's roofline, one memory), multiplies, and
adds up over the engine's ranks twice a layer:

    step = max(weights / HBM, 2 x parameters x running / FLOPs)
           + cache / HBM + all-reduces + launches

Responses that end make room for those that wait, or the batch shrinks: so a rollout lasts as many
steps as its longest chain of responses, and the steps of its tail cost nearly as much as full ones.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from qurl_megatron.checkpoints.ops import hf_shapes
from qurl_megatron.plan import memory
from qurl_megatron.plan.constants import Constants, Gpu
from qurl_megatron.plan.workload import Workload, in_turn
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.tensors.table import is_quantized

LONGEST = "the longest response"
ROOM, REQUESTS = "room for keys and values", "rollout.requests_per_engine"
WEIGHTS, COMPUTE, CACHE = "weights' bytes", "compute", "keys' and values' bytes"
REDUCE, LAUNCH, PREFILL = "all-reduces", "launches and sampling", "prefill"


@dataclass(frozen=True, kw_only=True)
class DecodeRank:
    """Work of one engine rank per step: bytes and floating-point operations."""

    weights: float  # bytes read
    quantized: float  # operations per response in products at ``scheme``
    plain: float  # the same in BF16: the output layer
    token: int  # bytes of keys and values of a token of context
    attention: float  # operations per token of context
    layers: int
    hidden: int
    tensor: int
    scheme: str


@cache
def decode_rank(arch: Arch, scheme: str, tensor: int, itemsize: int = 2) -> DecodeRank:
    """Return a rank of an engine of ``tensor``; unquantized numbers have ``itemsize`` bytes."""
    embedding = arch.vocab * arch.hidden
    weight_bytes = memory.engine_weights(arch, scheme, tensor, itemsize)
    linear = linear_parameters(arch)
    return DecodeRank(
        # Of the embedding a step reads a row per response; where it is tied, it is the output too.
        weights=weight_bytes - (0 if arch.tied else itemsize * embedding / tensor),
        quantized=2 * linear / tensor,
        plain=2 * embedding / tensor,
        token=memory.cached_token(arch, tensor, itemsize),
        attention=4 * arch.num_layers * arch.heads * arch.head_dim / tensor,
        layers=arch.num_layers,
        hidden=arch.hidden,
        tensor=tensor,
        scheme=scheme,
    )


@cache
def linear_parameters(arch: Arch) -> int:
    """Numbers in the layers' linear weights that a token meets: of experts, the chosen ones."""
    total = 0.0
    for name, shape in hf_shapes(arch).items():
        if is_quantized(name):
            met = arch.routed.top_k / arch.routed.count if ".experts." in name else 1
            total += shape[0] * shape[1] * met
    return round(total)


def decode_step(
    rank: DecodeRank, gpu: Gpu, constants: Constants, running: float, context: float
) -> dict[str, float]:
    """Return the seconds of one step by cause.

    Args:
        running: responses in the batch.
        context: tokens before the new one, mean over them.
    """
    hbm = gpu.hbm * constants.decode_hbm
    read = rank.weights / hbm
    multiply = running * (
        rank.quantized / (gpu.flops[rank.scheme] * constants.decode_gemm)
        + rank.plain / (gpu.flops["none"] * constants.decode_gemm)
    )
    tokens = running * context
    cache = max(
        tokens * rank.token / hbm,
        tokens * rank.attention / (gpu.flops["none"] * constants.attention),
    )
    reduce = 0.0
    if rank.tensor > 1:
        sent = 2 * (rank.tensor - 1) / rank.tensor * running * rank.hidden * 2  # BF16
        one_reduce = constants.decode_latency + sent / (gpu.nvlink * constants.collective)
        reduce = 2 * rank.layers * one_reduce
    return {
        # The weights are read while they are multiplied: the longer of the two counts.
        WEIGHTS: read if read >= multiply else 0.0,
        COMPUTE: multiply if multiply > read else 0.0,
        CACHE: cache,
        REDUCE: reduce,
        LAUNCH: rank.layers * constants.decode_layer + constants.decode_step,
    }


def schedule(lengths: Sequence[int], slots: int) -> Iterator[tuple[int, int, float]]:
    """How the batch of an engine with ``slots`` goes on: (steps, running, mean tokens they have).

    Responses begin in the order given, the next one where one has ended.
    """
    waiting = iter(lengths)
    now, starts_sum = 0, 0
    ends: list[tuple[int, int]] = []  # and when it began

    def fill() -> None:
        nonlocal starts_sum
        while len(ends) < slots and (length := next(waiting, None)) is not None:
            heapq.heappush(ends, (now + length, now))
            starts_sum += now

    fill()
    while ends:
        steps, running = ends[0][0] - now, len(ends)
        yield steps, running, now + steps / 2 - starts_sum / running
        now = ends[0][0]
        while ends and ends[0][0] == now:
            starts_sum -= heapq.heappop(ends)[1]
        fill()


@dataclass(frozen=True)
class RolloutTime:
    seconds: float
    parts: dict[str, float]  # that add up to it
    slots: int  # responses that an engine can hold at once
    limit: str


def rollout_time(
    rank: DecodeRank,
    gpu: Gpu,
    constants: Constants,
    work: Workload,
    *,
    engines: int,
    room: int,
    requests: int,
) -> RolloutTime:
    """Seconds until the busiest of ``engines`` has answered its share.

    Args:
        room: tokens in an engine's cache.
        requests: ``rollout.requests_per_engine``.
    """
    slots = slots_of(work, -(-work.responses // engines), room, requests)
    return _rollout_time(rank, gpu, constants, work, engines, slots, requests)


@cache
def _rollout_time(
    rank: DecodeRank,
    gpu: Gpu,
    constants: Constants,
    work: Workload,
    engines: int,
    slots: int,
    requests: int,
) -> RolloutTime:
    share = -(-work.responses // engines)

    def decode(lengths: Sequence[int], slots: int) -> dict[str, float]:
        parts: dict[str, float] = {}
        for steps, running, tokens in schedule(lengths, slots):
            step = decode_step(rank, gpu, constants, running, work.prompt + tokens)
            for name, seconds in step.items():
                parts[name] = parts.get(name, 0.0) + steps * seconds
        return parts

    lengths = in_turn(work.lengths(share))
    parts = decode(lengths, slots)
    parts[PREFILL] = _prefill(rank, gpu, constants, work, engines, share)
    seconds = sum(parts.values())
    even = [max(1, round(work.mean))] * share
    limit = max(parts, key=lambda name: parts[name])
    if sum(decode(even, slots).values()) < constants.tail * seconds:
        limit = LONGEST
    elif slots < share and sum(decode(lengths, share).values()) < constants.no_room * seconds:
        limit = REQUESTS if slots == requests else ROOM
    return RolloutTime(seconds, parts, slots, limit)


def slots_of(work: Workload, share: int, room: int, most: int) -> int:
    """Responses that an engine runs at once.

    Its cache must hold running responses at their average length over their lives, E[L^2] / 2 E[L]
    besides the prompt; SGLang takes the youngest back where chance wants more.

    Args:
        share: responses that it answers in a step.
        room: tokens in its cache.
        most: ``rollout.requests_per_engine``.
    """
    lengths = work.lengths(share)
    age = sum(x * x for x in lengths) / (2 * sum(lengths))
    return max(1, min(share, most, int(room / (work.prompt + age))))


def _prefill(rank, gpu, constants, work: Workload, engines: int, share: int) -> float:
    """Each prompt once on every engine that answers it; its other responses find it cached."""
    spread = work.prompts * (1 - (1 - 1 / engines) ** work.samples)
    tokens = min(share, spread) * work.prompt
    return tokens * rank.quantized / (gpu.flops[rank.scheme] * constants.prefill)
