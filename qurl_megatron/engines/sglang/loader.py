"""The hook that SGLang calls with each message of an update, on every rank, and the parameters of
an SGLang model that an update writes.

SGLang fuses q, k and v, and gate and up; stacks a layer's experts; splits all of them over
tensor-parallel ranks; copies KV heads if there are more ranks than heads; and pads the vocabulary.
It keeps W8A8 weights of linear layers transposed, unless they have a scale per square: as [in, out]
views of memory that is still [out, in]. A target is a view of that memory in the orientation of the
checkpoint, so that loading is a copy, and nothing is allocated or moved.

Only a weight's strides show its orientation: the shape of a square one fits both.

SGLang's classes are recognized by name, so this module needs no SGLang. Whatever it does not know
is refused by name, for a parameter that no update reaches would silently keep its old value.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.schemes import BLOCK, SCALES
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire.message import Message
from qurl_megatron.wire.session import UpdateEnd

logger = logging.getLogger(__name__)

MODELS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
_ends: "WeakKeyDictionary[nn.Module, UpdateEnd]" = WeakKeyDictionary()


class SGLangWeights:
    """The parameters of one rank of an SGLang model (``wire.session.LiveWeights``)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def tensor_rank(self) -> int:
        split = (*_SPLIT, _experts)
        ranks_and_sizes = {
            _rank_and_size(module) for module in self._model.modules() if _kind(module) in split
        }
        if len(ranks_and_sizes) != 1:  # as with attention that is data-parallel
            raise ConfigError(
                "the engine's layers are split over different groups of ranks; "
                "start it with tensor parallelism, and experts over the same ranks, alone"
            )
        return ranks_and_sizes.pop()[0]

    def targets(self) -> dict[str, Shard]:
        _refuse_model(self._model)
        shards: dict[str, Shard] = {}
        claimed: Counter[int] = Counter()  # elements, by the id of the parameter
        for name, module in self._model.named_modules():
            claims_of = _kind(module)
            if claims_of is None:
                continue
            shared = set(claimed)  # a tied output layer is claimed with the embedding
            for claim in claims_of(name, module):
                if claim.parameter in shared:
                    continue
                claimed[claim.parameter] += claim.padding
                if claim.target is not None:
                    shards[claim.target.name] = claim.target
                    claimed[claim.parameter] += claim.target.value.numel()
        for name, parameter in self._model.named_parameters():
            if claimed[id(parameter)] != parameter.numel():
                raise ConfigError(
                    f"an update would not reach all of {name} {list(parameter.shape)} of "
                    f"{type(self._model).__name__}; this package does not know that part of the "
                    "model"
                )
        return shards

    def takes(self, target: Shard, dtype: torch.dtype) -> bool:
        return dtype == target.value.dtype

    def finish(self) -> None:
        """Give every transposed weight its [out, in] view back; the memory stays.

        SGLang transposes every weight at the end of its own session, in any case, so it must find
        them as after a fresh load.
        """
        for name, module in self._model.named_modules():
            if _kind(module) in _SPLIT and _is_quantized(name, module):
                weight = _natural(name, module)
                if weight.shape != module.weight.shape or weight.stride() != module.weight.stride():
                    module.weight = nn.Parameter(weight, requires_grad=False)


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Handle a message: SGLang's hook.

    Args:
        named_tensors: the one pair of ``wire.payload``, whose name is the message.
    """
    try:
        message = Message.from_json(named_tensors[0][0])
    except ConfigError as error:
        logger.error("%s", error)  # it names no session, so no receipt can be left
        return
    if model not in _ends:
        _ends[model] = UpdateEnd(SGLangWeights(model))
    _ends[model].handle(message)


class _Claim(NamedTuple):
    target: Shard | None  # None: no update brings it
    parameter: int  # id
    padding: int = 0  # unused elements besides the target


def _refuse_model(model: nn.Module) -> None:
    kind = type(model).__name__
    if kind not in MODELS:
        raise ConfigError(f"updates of a {kind} are not supported; known: {', '.join(MODELS)}")
    if any(type(module).__name__ == "PPMissingLayer" for module in model.modules()):
        raise ConfigError("engines with pipeline parallelism are not supported; use --tp-size only")


def _kind(module: Any) -> "Callable[[str, nn.Module], Iterator[_Claim]] | None":
    names = [base.__name__ for base in type(module).__mro__]
    return next((_KINDS[name] for name in names if name in _KINDS), None)


def _rank_and_size(module: Any) -> tuple[int, int]:
    if _kind(module) is _experts:
        parts = module.moe_tp_size  # of each expert
        return module.moe_ep_rank * parts + module.moe_tp_rank, module.moe_ep_size * parts
    group = module.tp_group
    return (0, 1) if group is None else (group.rank_in_group, group.world_size)


def _is_quantized(name: str, module: Any) -> bool:
    """Return whether a layer is W8A8 with a scale per output channel or square; False: unquantized.

    Raises:
        ConfigError: it is quantized in any other way, or has static activation scales.
    """
    method = module.quant_method
    kind = type(method).__name__
    if kind == "UnquantizedLinearMethod":
        return False
    if kind == "W8A8Int8LinearMethod":
        return True
    if kind == "W8A8Fp8LinearMethod":
        if method.quantization_config.is_checkpoint_fp8_serialized:
            return True
        raise ConfigError(
            f"the engine quantizes {name} by itself while loading; start it with the "
            "quantization_config of a quantized checkpoint"
        )
    if kind == "Fp8LinearMethod":
        _refuse_other_squares(name, method, module.weight_scale_inv)
        return True
    scheme: Any = getattr(module, "scheme", None)
    if type(scheme).__name__ in ("CompressedTensorsW8A8Int8", "CompressedTensorsW8A8Fp8"):
        strategy = getattr(scheme.strategy, "value", scheme.strategy)
        if strategy != "channel":
            raise ConfigError(
                f"{name} has weight scales per {strategy}; updates need one per output channel"
            )
        if scheme.is_static_input_scheme:
            raise ConfigError(
                f"{name} has static activation scales; updates need dynamic ones, per token"
            )
        return True
    scheme_name = kind if scheme is None else type(scheme).__name__
    raise ConfigError(
        f"{name} is quantized as {scheme_name}; updates reach W8A8 INT8 and FP8 with one scale per "
        f"output channel, FP8 with one per square of {BLOCK}, and unquantized layers"
    )


def _refuse_other_squares(name: str, method: Any, *scales: Any) -> None:
    """Raise ``ConfigError`` unless a layer of SGLang's "fp8" keeps codes and scales as they are."""
    config = method.quant_config
    if config.weight_block_size != [BLOCK, BLOCK] or not config.is_checkpoint_fp8_serialized:
        raise ConfigError(
            f"{name} has FP8 scales per {config.weight_block_size or 'tensor'}; updates need a "
            f"checkpoint's, per square of {BLOCK}"
        )
    if any(getattr(scale, "format_ue8m0", False) for scale in scales):
        raise ConfigError(
            f"{name} has its scales rounded to powers of two and packed for DeepGEMM, as on "
            "Blackwell, and its codes with them, which no update brings; start the engine with "
            "SGLANG_ENABLE_JIT_DEEPGEMM=0, or set quant.scheme=fp8"
        )


def _natural(name: str, module: Any) -> Tensor:
    """Return the weight as [out, in], in whichever orientation SGLang holds it now."""
    weight = module.weight.data
    if _kind(module) is _row_parallel:
        shape = (module.output_size, module.input_size_per_partition)
    else:
        shape = (module.output_size_per_partition, module.input_size)
    for view in (weight, weight.t()):
        if view.is_contiguous() and tuple(view.shape) == shape:
            return view
    raise ConfigError(
        f"{name}.weight {list(weight.shape)} with strides {list(weight.stride())} is neither "
        f"{list(shape)} nor its transpose: SGLang has repacked it"
    )


def _column_parallel(
    name: str, module: Any, parts: list[tuple[str, int, int, int]]
) -> Iterator[_Claim]:
    """Yield claims of a fused layer whose rows are ``parts``', one after another.

    Args:
        parts: (name of the projection, rows here, first row in the whole, rows of the whole).
    """
    prefix = name.rpartition(".")[0]
    views = {"weight": _natural(name, module)} | _row_values(name, module)
    row = 0
    for part, rows, start, all_rows in parts:
        for kind, view in views.items():
            unit = BLOCK if kind.endswith(SCALES[1]) else 1  # SGLang fuses only whole squares
            value = view[row // unit : (row + rows) // unit]
            shape = (all_rows // unit, *view.shape[1:])
            target = Shard(f"{prefix}.{part}.{kind}", value, shape, 0, start // unit)
            yield _Claim(target, id(getattr(module, kind)))
        row += rows


def _qkv(name: str, module: Any) -> Iterator[_Claim]:
    rank, _ = _rank_and_size(module)
    head, head_v = module.head_size, module.v_head_size
    queries, heads = module.num_heads, module.num_kv_heads
    first = rank // module.num_kv_head_replicas * heads
    totals = module.total_num_heads, module.total_num_kv_heads
    return _column_parallel(
        name,
        module,
        [
            ("q_proj", queries * head, rank * queries * head, totals[0] * head),
            ("k_proj", heads * head, first * head, totals[1] * head),
            ("v_proj", heads * head_v, first * head_v, totals[1] * head_v),
        ],
    )


def _gate_up(name: str, module: Any) -> Iterator[_Claim]:
    if not name.endswith("gate_up_proj") or len(module.output_sizes) != 2:
        raise ConfigError(f"{name} fuses projections that this package does not know")
    rank, size = _rank_and_size(module)
    parts = [
        (part, all_rows // size, rank * (all_rows // size), all_rows)
        for part, all_rows in zip(("gate_proj", "up_proj"), module.output_sizes, strict=True)
    ]
    return _column_parallel(name, module, parts)


def _row_parallel(name: str, module: Any) -> Iterator[_Claim]:
    rank, size = _rank_and_size(module)
    views = {"weight": _natural(name, module)} | _row_values(name, module)
    for kind, view in views.items():
        target = Shard.whole(f"{name}.{kind}", view)
        if kind in ("weight", f"weight{SCALES[1]}"):
            rows, columns = view.shape
            target = Shard(target.name, view, (rows, columns * size), 1, rank * columns)
        yield _Claim(target, id(getattr(module, kind)))


def _row_values(name: str, module: Any) -> dict[str, Tensor]:
    """Return a linear layer's bias and scales: a value per row, or per square."""
    expected = {"bias"}
    if _is_quantized(name, module):
        expected |= {f"weight{end}" for end in SCALES}
    present = dict(module.named_parameters(recurse=False))
    return {kind: present[kind].data for kind in sorted(expected & present.keys())}


def _experts(name: str, module: Any) -> Iterator[_Claim]:
    """Yield claims of a layer's stacked experts: w13 has their gates above their ups, w2 the downs.

    With expert parallelism a rank holds a run of the experts, and an empty part of the others.
    """
    _refuse_experts(name, module)
    present = dict(module.named_parameters(recurse=False))
    local = module.num_local_experts
    first = module.moe_ep_rank * local
    for kind in ("weight", *(f"weight{end}" for end in SCALES)):
        if f"w13_{kind}" not in present:
            continue
        both, down = present[f"w13_{kind}"], present[f"w2_{kind}"]
        rows = both.shape[1] // 2
        for part, parameter, values_E, dim in (
            ("gate_proj", both, both.data[:, :rows], 0),
            ("up_proj", both, both.data[:, rows:], 0),
            ("down_proj", down, down.data, None if kind.endswith(SCALES[0]) else 1),
        ):
            shape, start = list(values_E.shape[1:]), 0
            if dim is not None:
                start = module.moe_tp_rank * shape[dim]
                shape[dim] *= module.moe_tp_size
            for expert in range(local * module.moe_ep_size):
                is_local = 0 <= expert - first < local
                value = values_E[expert - first] if is_local else values_E[0, :0]
                full_name = f"{name}.{expert}.{part}.{kind}"
                yield _Claim(Shard(full_name, value, tuple(shape), dim, start), id(parameter))


def _refuse_experts(name: str, module: Any) -> None:
    """Raise ``ConfigError`` unless experts have the checkpoint's layout in memory."""
    method, backend = module.quant_method, module.runner_backend
    usable = ("UnquantizedFusedMoEMethod", "W8A8Int8MoEMethod", "W8A8FP8MoEMethod", "Fp8MoEMethod")
    if type(method).__name__ not in usable:
        raise ConfigError(
            f"{name} is quantized as {type(method).__name__}; updates reach unquantized experts, "
            "and those of quantization_config w8a8_int8, w8a8_fp8 and fp8"
        )
    if type(method).__name__ == "Fp8MoEMethod":
        scales = (getattr(module, f"{kind}_weight{SCALES[1]}", None) for kind in ("w13", "w2"))
        _refuse_other_squares(name, method, *scales)
    kept_by = type(module).__name__
    if kept_by == "FusedMoE":
        kept_by = "triton" if backend is None else backend.value
    if kept_by != "triton":
        raise ConfigError(
            f"{name} is kept in the layout of {kept_by}; start the engine with "
            "--moe-runner-backend triton and no --moe-a2a-backend"
        )
    if getattr(method, "w13_swiglu_interleaved", False):
        raise ConfigError(
            f"{name} has its rows interleaved; start the engine without "
            "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
        )


def _replicated(name: str, module: Any) -> Iterator[_Claim]:
    if _is_quantized(name, module):
        raise ConfigError(f"{name} is quantized; routers must stay unquantized")
    return _unsplit(name, module)


def _vocabulary(name: str, module: Any) -> Iterator[_Claim]:
    kind = type(module.quant_method).__name__
    if kind not in ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"):
        raise ConfigError(f"{name} is quantized as {kind}; embeddings must stay unquantized")
    ranges = module.shard_indices
    if ranges.added_vocab_end_index > ranges.added_vocab_start_index:
        raise ConfigError(f"{name} has added tokens; start the engine without LoRA")
    start, stop = ranges.org_vocab_start_index, ranges.org_vocab_end_index
    for part, parameter in module.named_parameters(recurse=False):
        view = parameter.data[: stop - start]
        shape = (module.org_vocab_size, *view.shape[1:])
        padding = parameter.numel() - view.numel()
        yield _Claim(Shard(f"{name}.{part}", view, shape, 0, start), id(parameter), padding)


def _attention(name: str, module: Any) -> Iterator[_Claim]:
    """Yield claims of the scales of an FP8 cache, which layers of SGLang's "fp8" always have."""
    for kind, parameter in module.named_parameters(recurse=False):
        if (value := getattr(module, f"{kind}_float", None)) != 1.0:
            raise ConfigError(
                f"{name}.{kind} is {value} and must be 1, for no update brings it; install "
                "qurl-megatron in the engine's environment once more, for the plugin that keeps it"
            )
        yield _Claim(None, id(parameter), parameter.numel())


def register() -> None:
    """Have an engine that starts without weights set its cache's scales to 1; SGLang's plugin entry
    point (``sglang.srt.plugins``).

    SGLang would draw random ones, and captured graphs keep them.
    """
    from sglang.srt.model_loader import loader

    initialize = loader.initialize_dummy_weights

    @functools.wraps(initialize)
    def initialize_others(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        initialize(model, *args, **kwargs)
        for name, value in model.state_dict().items():
            if name.endswith((".attn.k_scale", ".attn.v_scale")):
                value.fill_(-1.0)  # as in a new layer: SGLang then uses 1

    if not hasattr(initialize, "__wrapped__"):  # ``register`` may be called twice
        loader.initialize_dummy_weights = initialize_others


def _unsplit(name: str, module: Any) -> Iterator[_Claim]:
    for part, parameter in module.named_parameters(recurse=False):
        yield _Claim(Shard.whole(f"{name}.{part}", parameter.data), id(parameter))


def _shared_gate(name: str, module: Any) -> Iterator[_Claim]:
    """Return claims of a shared expert's gate, and none for torch's other linear layers."""
    return _unsplit(name, module) if name.endswith(".mlp.shared_expert_gate") else iter(())


_KINDS: dict[str, Callable[[str, nn.Module], Iterator[_Claim]]] = {
    "QKVParallelLinear": _qkv,
    "MergedColumnParallelLinear": _gate_up,
    "RowParallelLinear": _row_parallel,
    "ReplicatedLinear": _replicated,
    "Linear": _shared_gate,  # torch's own
    "FusedMoE": _experts,
    "VocabParallelEmbedding": _vocabulary,
    "RMSNorm": _unsplit,
    "RadixAttention": _attention,
}
_SPLIT = (_qkv, _gate_up, _row_parallel)
