"""Memory that one rank of a run, and one rank of an engine, need.

Permanent memory is known, not estimated: tests hold it to models that are built, from which it
differs by the padding of Megatron's buffers, some thousand numbers. Activations are tensors that a
backward pass will read again, estimated by the accounting of Korthikanti et al. 2022
(arXiv:2205.05198), section 4. None of it needs torch.

Shapes: T = tokens of one pass on one rank, h = hidden size, f = size between the two MLP
projections, t = tensor-parallel size. All sizes are bytes.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from qurl_megatron.checkpoints.ops import Op, layer_ops, stage_ops
from qurl_megatron.config import ParallelConfig
from qurl_megatron.schemes import SCHEMES, scale_grid
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.tensors.table import HfTensor, is_expert

GIB = 1 << 30

DRIVER = round(0.9 * GIB)
"""Memory of an 80 GB H100 that programs cannot use: torch finds 79.1 GiB."""

CONTEXT = round(0.6 * GIB)
"""One process on one GPU: its CUDA context and the kernels it has loaded, 0.5 to 0.7 GiB."""

NCCL = GIB
"""Buffers of a process' communicators: tens of MiB a peer and channel, in several groups."""

ENGINE_RUNTIME = 6 * GIB
"""An engine's CUDA graphs, workspaces and activations: 4 to 6 GiB, which it keeps while it lends
its weights' and cache's memory. (SGLang's own rule for a GPU of this size leaves 10 for them.)"""

SCRATCH = 64 << 20
"""Each of two buffers in which a GPU works out log-probs: ``algo.log_probs.SCRATCH_BYTES``, which a
test holds equal to it, for that module is torch's."""

CROWDED = 1.5
"""Copies of tokens at the fullest of the ranks that experts are dealt to, times an even share; an
estimate of a bad layer and pass. Nothing balances experts while a policy learns, and no token is
dropped."""

GAPS = 0.05
"""Share of a trainer's memory that lies unused between its allocations."""

CODE = 1
"""Bytes of a quantized weight; each output channel has a float32 scale besides."""


@dataclass(frozen=True)
class Held:
    """Memory of a rank for one model that it trains."""

    parameters: int  # their number, not bytes
    largest: int  # numbers in the largest of them
    weights: int
    gradients: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments

    @property
    def loading(self) -> int:
        """The most extra bytes while the rank resumes; engines start after it.

        Weights that another rank read arrive beside its own. Transformer Engine's Adam takes its
        moments over into new memory. Masters and moments are read into place.
        """
        return self.weights + self.moments

    @property
    def host(self) -> dict[str, int]:
        """Host memory by phase: the FP32 weights while they load; for a checkpoint one tensor at a
        time, with the bytes it is read from or written as."""
        return {"start": 4 * self.parameters, "save": 2 * 4 * self.largest}


@cache
def held_from_shapes(
    arch: Arch, parallel: ParallelConfig, stage: int, *, itemsize: int, critic: bool = False
) -> Held:
    """Return the memory that a rank of a pipeline stage would hold.

    Masters and moments are divided over the ranks that hold the same weights: experts dealt to
    ranks have fewer copies than the rest.

    Args:
        itemsize: bytes of a weight; weights of 4 bytes are their own masters.
        critic: a head of one value takes the output layer's place.
    """
    shared, experts = _layer_sizes(arch, parallel.tensor, parallel.expert, parallel.expert_tensor)
    outer = _outer_sizes(arch, parallel.tensor, parallel.pipeline, stage, critic=critic)
    layers = arch.num_layers // parallel.pipeline
    common, dealt = layers * sum(shared) + sum(outer), layers * sum(experts)
    numbers = common + dealt
    owned = -(-common // (parallel.data * parallel.context)) + -(-dealt // parallel.expert_copies)
    return Held(
        parameters=numbers,
        largest=max(shared + experts + outer),
        weights=itemsize * numbers,
        gradients=4 * numbers,
        masters=4 * owned * (itemsize != 4),
        moments=2 * 4 * owned,
    )


@cache
def _layer_sizes(
    arch: Arch, tensor: int, expert: int, expert_tensor: int
) -> tuple[list[int], list[int]]:
    """Return the sizes of a rank's parameters of a layer: outside of experts, and in experts."""
    shared, experts = [], []
    for op in layer_ops(arch, 0, fused_norms=False):
        if is_expert(op.hf[0].name):
            experts.append(_numbers(op, expert_tensor))
        else:
            shared.append(_numbers(op, tensor))
    return shared, experts[: len(experts) // expert]


def _outer_sizes(arch: Arch, tensor: int, pipeline: int, stage: int, *, critic: bool) -> list[int]:
    """Return the sizes of a stage's parameters outside of its layers."""
    first, last = stage == 0, stage == pipeline - 1
    ops = stage_ops(arch, range(0), first=first, last=last and not critic)
    sizes = [_numbers(op, tensor) for op in ops]
    if critic and last:
        sizes += [arch.hidden, arch.hidden, 1]  # norm; weight and bias of the head
    return sizes


def _numbers(op: Op, ranks: int) -> int:
    """Return the size of a parameter on one of the ranks that it is split over."""
    numbers = 0
    for part in op.hf:
        shape = part.shape
        if part.vocabulary:
            shape = (round_up(shape[0], ranks), *shape[1:])
        numbers += math.prod(shape) // _ranks_of(part, ranks)
    return numbers


def largest_matrix(arch: Arch, parallel: ParallelConfig) -> int:
    """Return the size of the largest matrix that a rank holds of a layer."""
    shared, experts = _layer_sizes(arch, parallel.tensor, parallel.expert, parallel.expert_tensor)
    return max(shared + experts)


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _ranks_of(part: HfTensor, tensor: int) -> int:
    """Return how many tensor ranks a tensor is split over."""
    return 1 if part.split_dim is None else tensor


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass over T tokens, as one rank sees it."""

    tokens: int  # T: of the rank's own part where sequences are split over a context group
    tensor: int
    itemsize: int  # of an activation
    transposed: bool  # several rows: Megatron copies [s, b, v] logits to [b, s, v]
    fp32_output: bool = False  # logits in FP32, of a model in BF16
    expert: int = 1  # ranks that a layer's experts are dealt to


def layer_activations(arch: Arch, passed: Pass) -> int:
    """Return the bytes that one layer keeps for its backward pass, without recomputation.

    The terms of Korthikanti et al., Table 2, for this package's layers: no dropout, no T x T
    attention matrix (fused kernels keep one float32 per token and head), fewer keys than queries, a
    gated MLP whose activation is recomputed from its input. Without fused kernels it is about twice
    as much.
    """
    T, t = passed.tokens, passed.tensor
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    # The inputs of both norms, of q/k/v, and of the MLP: split by their positions.
    unsplit = 4 * arch.hidden
    # q, k, v as the kernel reads them, and its output, which is also o_proj's input.
    split: float = 2 * queries + 2 * keys
    if arch.qk_norm:
        split += queries + keys
    gathered, routed = 0.0, 0
    if arch.experts is None:
        split += 3 * arch.intermediate  # gate and up; their product
    else:
        routed = 2 * arch.experts.count  # the router's logits and probabilities
        if arch.experts.shared:  # its gate and up, their product, and its output before the gate
            split += 3 * arch.experts.shared + arch.hidden
        inner = 3 * arch.experts.intermediate
        if passed.expert == 1:
            # Every tensor rank has all tokens' copies for their experts, and a slice of each one.
            gathered, split = arch.experts.top_k * arch.hidden, split + arch.experts.top_k * inner
        else:
            split += CROWDED * arch.experts.top_k * (arch.hidden + inner)
    numbers = unsplit / t + gathered + split / t
    return round(T * (passed.itemsize * numbers + 4 * (arch.heads + routed) / t))


def dispatched(arch: Arch, passed: Pass) -> int:
    """Return the bytes of tokens on their way to experts or back, which no backward pass reads.

    Dealt experts: the copies that a rank sends, and those that it gets, before they are sorted by
    expert. Else: the experts' outputs, before they are added up.
    """
    if arch.experts is None:
        return 0
    copies = passed.tokens * arch.experts.top_k
    if passed.expert > 1:
        copies = round((1 + CROWDED) * copies / passed.tensor)
    return copies * arch.hidden * passed.itemsize


def stage_activations(arch: Arch, layers: int, passed: Pass, *, recompute: bool) -> int:
    """Return the bytes that layers keep of one pass: with recomputation, each one's input alone."""
    if not recompute:
        return layers * layer_activations(arch, passed)
    return layers * passed.tokens * passed.itemsize * arch.hidden // passed.tensor


def logits(arch: Arch, passed: Pass) -> int:
    """Return the bytes of one pass's logits on the last stage, with their copies and buffers.

    Their gradient is written over them. Several rows of a pass cost a second copy. Logits in FP32
    keep the hidden states that they were made from, and a BF16 copy of their gradient is made when
    a second copy of them is gone.
    """
    numbers = passed.tokens * -(-arch.vocab // passed.tensor)
    copies, sources = 1 + passed.transposed, 0
    size = copies * passed.itemsize * numbers
    if passed.fp32_output:
        size, sources = max(copies * 4, 4 + 2) * numbers, 2 * arch.hidden * passed.tokens
    return size + sources + min(2 * SCRATCH, 2 * 4 * numbers)


@cache
def engine_weights(arch: Arch, scheme: str, tensor: int, itemsize: int) -> int:
    """Return one engine rank's weights: codes and scales of linear layers, the rest as it is.

    Ranks that share a key/value head each have it.
    """
    outer = stage_ops(arch, range(0), first=True, last=True)
    layer = layer_ops(arch, 0, fused_norms=False)
    sizes = [_engine_bytes(ops, scheme, tensor, itemsize) for ops in (outer, layer)]
    return round(sizes[0] + arch.num_layers * sizes[1])


@cache
def engine_experts(arch: Arch, scheme: str, tensor: int, itemsize: int) -> int:
    """Return the bytes of experts among ``engine_weights``."""
    experts = [op for op in layer_ops(arch, 0, fused_norms=False) if is_expert(op.hf[0].name)]
    return round(arch.num_layers * _engine_bytes(experts, scheme, tensor, itemsize))


def _engine_bytes(ops: Iterable[Op], scheme: str, tensor: int, itemsize: int) -> float:
    total = 0.0
    for part in itertools.chain.from_iterable(op.hf for op in ops):
        size = math.prod(part.shape)
        shared = _ranks_of(part, tensor)
        if part.units is not None and part.units.repeats:
            shared = min(tensor, part.units.count)
        if part.quantized and SCHEMES[scheme].stored:
            total += size * CODE / shared
            rules = SCHEMES[scheme]
            scales = math.prod(scale_grid(part.shape, rules.block))
            total += 4 * (scales / shared if rules.block else _share(scales, part, shared))
        else:
            total += size * itemsize / shared
    return total


def _share(channels: int, part: HfTensor, ranks: int) -> float:
    """Return the output channels on one of the ranks that split a tensor."""
    return channels / ranks if part.split_dim == 0 else channels


@cache
def aligned(arch: Arch, layers: int, parallel: ParallelConfig, itemsize: int) -> tuple[int, int]:
    """Return the extra bytes of a rank whose layers compute with the engines' codes: of codes and
    scales, and of the largest weight, whose codes a product casts to the model's format."""
    codes, largest = 0, 0
    for op in layer_ops(arch, 0, fused_norms=False):
        expert = is_expert(op.hf[0].name)
        split = parallel.expert_tensor if expert else parallel.tensor
        parts = [part for part in op.hf if part.quantized]
        numbers = sum(math.prod(part.shape) // split for part in parts)
        channels = sum(int(_share(part.shape[0], part, split)) for part in parts)
        codes += (numbers + 4 * channels) // (parallel.expert if expert else 1)
        largest = max(largest, numbers * itemsize)
    return layers * codes, largest


def cached_token(arch: Arch, tensor: int, itemsize: int) -> int:
    """Return the bytes of one token's keys and values on one engine rank."""
    heads = max(1, arch.kv_heads // tensor)
    return 2 * arch.num_layers * heads * arch.head_dim * itemsize


def publishing(largest: int, bucket: int, *, slots: int) -> int:
    """Return the extra bytes that a rank needs while it publishes.

    For one parameter of ``largest`` numbers at most: the FP32 value, its Hugging Face tensors, and
    two more of them while it is quantized. For the result: a bucket, and the transport's slots.
    """
    filled = max(bucket, 2 * largest)  # replicas do not divide a parameter
    return 4 * 4 * largest + (1 + slots) * filled


def engine_free(gpu: int, at_rest: int | None) -> int:
    """Return the free bytes when an engine rank starts; ``at_rest`` are a trainer's on its GPU."""
    free = gpu - DRIVER - CONTEXT - NCCL
    if at_rest is not None:
        free -= CONTEXT + NCCL + round((1 + GAPS) * at_rest)
    return max(0, free)


def phases(
    at_rest: int,
    step: int,
    publishing: int,
    loading: int,
    *,
    engine: int | None = None,
    mapped_by: int = 0,
) -> dict[str, dict[str, int]]:
    """Return the memory in use on a trainer's GPU, by phase and by name.

    Args:
        at_rest: memory of the trainer between steps.
        step: its peak within a step, ``at_rest`` included.
        publishing, loading: memory for these besides ``at_rest``.
        engine: weights and cache of the engine rank on the same GPU; None: there is none.
        mapped_by: engine ranks of other GPUs that map the trainer's slots on this one.
    """
    common = {"driver": DRIVER, "trainer's context": CONTEXT, "trainer's NCCL": NCCL}
    asleep = {"other engines' contexts": mapped_by * CONTEXT} if mapped_by else {}
    awake = asleep
    if engine is not None:
        own_bytes = {
            "engine's context": CONTEXT,
            "engine's NCCL": NCCL,
            "engine's graphs, workspaces": ENGINE_RUNTIME,
        }
        asleep = own_bytes | asleep
        awake = asleep | {"engine's weights, cache": engine}

    def phase(passing: int, engines: dict[str, int]) -> dict[str, int]:
        gaps = round(GAPS * (at_rest + passing))
        rows = {"trainer at rest": at_rest, "what the phase takes": passing, "gaps": gaps}
        return {**common, **rows, **engines}

    published = phase(publishing, awake)
    # Writing takes nothing, but the allocator still has the memory of the publication.
    return {
        "resume": phase(loading, {}),
        "train": phase(step - at_rest, asleep),
        "publish": published,
        "save": published,
    }
