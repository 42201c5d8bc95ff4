"""Models that hold parameters as SGLang does, class names and attributes included, in plain torch.

What SGLang itself does with them is checked in ``tests/sglang``.
"""

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn

from qurl_megatron.checkpoints.ops import hf_shapes
from qurl_megatron.engines.sglang.loader import SGLangWeights
from qurl_megatron.schemes import BLOCK, SCHEMES, scale_grid
from qurl_megatron.tensors.arch import Experts
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.tensors.table import is_quantized
from tests.support.archs import BASE

HIDDEN, HEADS, KV_HEADS, HEAD, MLP, VOCAB, LAYERS = 16, 4, 2, 4, 24, 70, 2
EXPERTS, EXPERT = 4, 8
SQUARES = dict(HIDDEN=256, HEAD=128, MLP=512, EXPERT=256)
"""The sizes above for weights in squares."""


class UnquantizedLinearMethod: ...


class W8A8Int8LinearMethod: ...


class UnquantizedEmbeddingMethod: ...


class UnquantizedFusedMoEMethod: ...


class W8A8Int8MoEMethod: ...


class CompressedTensorsLinearMethod: ...


class CompressedTensorsW8A8Fp8: ...


class Fp8LinearMethod:
    """In squares; sizes must be whole numbers of them (``SQUARES``)."""

    def __init__(self) -> None:
        squares = [BLOCK, BLOCK]
        self.quant_config = SimpleNamespace(
            weight_block_size=squares, is_checkpoint_fp8_serialized=True
        )


class Fp8MoEMethod(Fp8LinearMethod): ...


METHODS = {
    UnquantizedLinearMethod: (UnquantizedFusedMoEMethod, torch.float32),
    W8A8Int8LinearMethod: (W8A8Int8MoEMethod, torch.int8),
    CompressedTensorsLinearMethod: (None, torch.int8),
    Fp8LinearMethod: (Fp8MoEMethod, torch.float8_e4m3fn),
}
"""By the method of linear layers that of experts, and the type of weights."""


class _Linear(nn.Module):
    def __init__(self, rows: int, columns: int, engine: SimpleNamespace, bias: bool) -> None:
        super().__init__()
        self.tp_group = SimpleNamespace(rank_in_group=engine.rank, world_size=engine.tp)
        self.quant_method, self.scheme = engine.method(), engine.scheme
        _, kind = METHODS[engine.method]
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=kind), requires_grad=False)
        if isinstance(self.quant_method, Fp8LinearMethod):
            scale = torch.zeros(scale_grid((rows, columns), BLOCK))
            self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
        elif kind is torch.int8:
            self.weight_scale = nn.Parameter(torch.zeros(rows, 1), requires_grad=False)
            self.weight = nn.Parameter(self.weight.data.t(), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(rows), requires_grad=False) if bias else None


class QKVParallelLinear(_Linear):
    def __init__(self, engine: SimpleNamespace) -> None:
        self_heads, self_kv = HEADS // engine.tp, max(1, KV_HEADS // engine.tp)
        rows = (self_heads + 2 * self_kv) * HEAD
        super().__init__(rows, HIDDEN, engine, bias=True)
        self.input_size, self.output_size_per_partition = HIDDEN, rows
        self.head_size = self.v_head_size = HEAD
        self.num_heads, self.num_kv_heads = self_heads, self_kv
        self.total_num_heads, self.total_num_kv_heads = HEADS, KV_HEADS
        self.num_kv_head_replicas = max(1, engine.tp // KV_HEADS)


class MergedColumnParallelLinear(_Linear):
    def __init__(self, engine: SimpleNamespace) -> None:
        rows = 2 * MLP // engine.tp
        super().__init__(rows, HIDDEN, engine, bias=False)
        self.input_size, self.output_size_per_partition = HIDDEN, rows
        self.output_sizes = [MLP, MLP]


class RowParallelLinear(_Linear):
    def __init__(self, columns: int, engine: SimpleNamespace) -> None:
        super().__init__(HIDDEN, columns // engine.tp, engine, bias=False)
        self.output_size, self.input_size_per_partition = HIDDEN, columns // engine.tp


class ReplicatedLinear(_Linear):
    def __init__(self, rows: int, engine: SimpleNamespace) -> None:
        super().__init__(rows, HIDDEN, SimpleNamespace(**vars(engine) | {"tp": 1}), bias=False)


class FusedMoE(nn.Module):
    def __init__(self, engine: SimpleNamespace) -> None:
        super().__init__()
        self.moe_ep_size, self.moe_tp_size = engine.ep, engine.tp // engine.ep
        self.moe_ep_rank, self.moe_tp_rank = divmod(engine.rank, self.moe_tp_size)
        self.num_local_experts = EXPERTS // engine.ep
        method, dtype = METHODS[engine.method]
        self.quant_method = method()
        self.runner_backend = SimpleNamespace(value="triton")
        inner = EXPERT // self.moe_tp_size
        for kind, rows, columns in (("w13", 2 * inner, HIDDEN), ("w2", HIDDEN, inner)):
            shape = (self.num_local_experts, rows, columns)
            weight = torch.zeros(shape, dtype=dtype)
            setattr(self, f"{kind}_weight", nn.Parameter(weight, requires_grad=False))
            if method is Fp8MoEMethod:
                scale = torch.zeros(len(weight), *scale_grid(shape[1:], BLOCK))
                setattr(self, f"{kind}_weight_scale_inv", nn.Parameter(scale, requires_grad=False))
            elif method is W8A8Int8MoEMethod:
                scale = torch.zeros(*shape[:2], 1)
                setattr(self, f"{kind}_weight_scale", nn.Parameter(scale, requires_grad=False))


class DeepEPMoE(FusedMoE): ...


class RadixAttention(nn.Module):
    """With the scales of a cache, as all of "fp8" have them."""

    def __init__(self) -> None:
        super().__init__()
        for kind in ("k_scale", "v_scale"):
            setattr(self, kind, nn.Parameter(torch.ones(()), requires_grad=False))
            setattr(self, f"{kind}_float", 1.0)


class VocabParallelEmbedding(nn.Module):
    def __init__(self, engine: SimpleNamespace) -> None:
        super().__init__()
        each = -(-VOCAB // (64 * engine.tp)) * 64
        start, stop = (min(VOCAB, each * (engine.rank + last)) for last in (0, 1))
        self.quant_method, self.org_vocab_size = UnquantizedEmbeddingMethod(), VOCAB
        self.shard_indices = SimpleNamespace(
            org_vocab_start_index=start,
            org_vocab_end_index=stop,
            added_vocab_start_index=VOCAB,
            added_vocab_end_index=VOCAB,
        )
        self.weight = nn.Parameter(torch.zeros(each, HIDDEN), requires_grad=False)


class ParallelLMHead(VocabParallelEmbedding): ...


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size), requires_grad=False)


class _Layer(nn.Module):
    def __init__(self, engine: SimpleNamespace) -> None:
        super().__init__()
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.qkv_proj = QKVParallelLinear(engine)
        if engine.method is Fp8LinearMethod:
            self.self_attn.attn = RadixAttention()
        self.self_attn.o_proj = RowParallelLinear(HEADS * HEAD, engine)
        if engine.ep:
            unquantized = SimpleNamespace(**vars(engine) | {"method": UnquantizedLinearMethod})
            self.mlp.gate, self.mlp.experts = (
                ReplicatedLinear(EXPERTS, unquantized),
                FusedMoE(engine),
            )
        else:
            self.mlp.gate_up_proj = MergedColumnParallelLinear(engine)
            self.mlp.down_proj = RowParallelLinear(MLP, engine)
        self.input_layernorm = RMSNorm(HIDDEN)
        self.post_attention_layernorm = RMSNorm(HIDDEN)


class Qwen2ForCausalLM(nn.Module):
    """One rank's model: attention projects 16 to 16, so o_proj is square at TP1.

    With ``ep``, over how many ranks they are split, it has experts.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        tp: int = 1,
        ep: int = 0,
        method: type = W8A8Int8LinearMethod,
        scheme: object = None,
        tied: bool = False,
    ) -> None:
        super().__init__()
        engine = SimpleNamespace(rank=rank, tp=tp, ep=ep, method=method, scheme=scheme)
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(engine)
        self.model.layers = nn.ModuleList(_Layer(engine) for _ in range(LAYERS))
        self.model.norm = RMSNorm(HIDDEN)
        self.lm_head = ParallelLMHead(engine)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def targets(model: nn.Module) -> dict[str, Shard]:
    return SGLangWeights(model).targets()


def whole_tensors(
    *, scheme: str = "int8", tied: bool = False, experts: bool = False
) -> dict[str, torch.Tensor]:
    """What a checkpoint of it holds, every value different from its neighbours."""
    sizes = dict(hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD, intermediate=MLP)
    arch = replace(BASE, num_layers=LAYERS, vocab=VOCAB, tied=tied, qkv_bias=True, **sizes)
    if experts:
        routed = Experts(count=EXPERTS, top_k=2, intermediate=EXPERT, norm_topk_prob=True)
        arch = replace(arch, experts=routed)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in hf_shapes(arch).items():
        tensors[name] = torch.randn(shape, generator=generator)
        if scheme != "none" and is_quantized(name):
            rules = SCHEMES[scheme]
            codes = torch.randint(-127, 128, shape, generator=generator)
            tensors[name] = codes.to(rules.dtype)
            scale = torch.randn(scale_grid(shape, rules.block), generator=generator)
            tensors[name + rules.scale] = scale.abs() + 0.01
    return tensors
