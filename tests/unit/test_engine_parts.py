"""The parts of tensors that engine ranks keep, and the buckets they travel in."""

from dataclasses import replace

import pytest
import torch

from qurl_megatron.checkpoints.ops import hf_shapes
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.publish.shards import engine_part
from qurl_megatron.schemes import SCALES
from qurl_megatron.tensors.arch import Experts
from qurl_megatron.tensors.slice import Slice, buckets
from qurl_megatron.tensors.table import hf_tensor, is_quantized
from tests.support.archs import BASE

ARCHS = {
    "2 kv heads, biases": replace(BASE, qkv_bias=True),
    "1 kv head, tied": replace(BASE, kv_heads=1, tied=True),
    "8 kv heads, qk-norm, odd vocabulary": replace(BASE, kv_heads=8, qk_norm=True, vocab=131),
    "vocabulary smaller than its padding": replace(BASE, kv_heads=8, vocab=61),
    "square o_proj": replace(BASE, kv_heads=8, hidden=32),
    "whole squares": replace(BASE, head_dim=128, intermediate=1024, hidden=192, vocab=64),
    "experts": replace(
        BASE,
        num_layers=2,
        kv_heads=8,
        experts=Experts(count=3, top_k=2, intermediate=16, norm_topk_prob=True),
    ),
}


@pytest.mark.parametrize("engine_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_an_engine_rank_gets_what_sglang_would_have_loaded_from_whole_tensors(arch, engine_tp):
    """Against SGLang's loaders, written down by hand: narrow per head, pad the vocabulary."""
    names = list(hf_shapes(arch))
    ends = SCALES if arch is ARCHS["whole squares"] else SCALES[:1]
    scales = [name + end for name in names if is_quantized(name) for end in ends]
    for name in names + scales:
        shape = hf_tensor(arch, name).shape
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        for rank in range(engine_tp):
            need = engine_part(hf_tensor(arch, name), shape, engine_tp, rank)
            actual = need.narrow(whole, Slice.whole(shape))
            assert torch.equal(actual, as_sglang_loads(arch, name, whole, engine_tp, rank)), name


def as_sglang_loads(arch, name, whole, tp, rank):
    owner, kind = name.split(".")[-2:]
    if owner in ("embed_tokens", "lm_head"):  # vocab_parallel_embedding.py
        padded = -(-arch.vocab // 64) * 64
        return torch.cat([whole, whole.new_full((padded - arch.vocab, arch.hidden), -1)]).chunk(tp)[
            rank
        ][: max(0, arch.vocab - rank * padded // tp)]
    if owner in ("k_proj", "v_proj"):  # QKVParallelLinear
        heads = whole.unflatten(0, (arch.kv_heads, -1))
        replicas = max(1, tp // arch.kv_heads)
        ours = heads.repeat_interleave(replicas, dim=0).chunk(tp)[rank]
        return ours.flatten(0, 1)
    if owner in ("q_proj", "gate_proj", "up_proj"):  # ColumnParallelLinear
        return whole.chunk(tp)[rank]
    if owner in ("o_proj", "down_proj") and kind != "weight_scale":  # RowParallelLinear
        return whole.chunk(tp, dim=1)[rank]
    return whole


def test_a_vocabulary_is_padded_to_64_rows_before_sglang_splits_it():
    output = hf_tensor(BASE, "lm_head.weight")
    parts = [engine_part(output, (131, 24), 4, rank) for rank in range(4)]
    rows = [(part.starts[0], part.sizes[0]) for part in parts]
    assert rows == [(0, 48), (48, 48), (96, 35), (131, 0)]
    # 192 rows are no multiple of 5: SGLang goes on to 320.
    assert engine_part(output, (131, 24), 5, 1) == Slice((64, 0), (64, 24))


@pytest.mark.parametrize(
    "name,shape,tp,message",
    [
        ("model.layers.0.self_attn.q_proj.weight", (32, 24), 3, "num_attention_heads=8"),
        ("model.layers.0.mlp.down_proj.weight", (24, 64), 128, "intermediate_size=64"),
        ("model.layers.0.self_attn.k_proj.weight", (8, 24), 3, "num_key_value_heads"),
        ("model.layers.0.self_attn.q_proj.weight", (24, 32), 2, r"\[24, 32\]"),
        ("model.layers.0.self_attn.k_proj.weight", (24, 8), 4, r"\[24, 8\]"),
        ("model.layers.0.mlp.gate_up_proj.weight", (128, 24), 2, "gate_up_proj"),
    ],
)
def test_what_does_not_divide_or_is_unknown_is_refused_by_name(name, shape, tp, message):
    with pytest.raises(ConfigError, match=message) as error:
        engine_part(hf_tensor(BASE, name), shape, tp, 0)
    assert name in str(error.value)


@pytest.mark.parametrize(
    "kind,tp,lines",
    [
        ("self_attn.q_proj", 2, r"rows \[0, 192\) of 384"),
        ("self_attn.k_proj", 2, r"rows \[0, 48\) of 96"),
        ("self_attn.k_proj", 4, r"rows \[0, 48\) of 96"),  # a head each
        ("mlp.down_proj", 2, r"columns \[0, 64\) of 128"),
    ],
)
def test_a_part_that_cuts_a_square_is_refused_by_name(kind, tp, lines):
    arch = replace(BASE, head_dim=48, intermediate=128)
    scale = hf_tensor(arch, f"model.layers.3.{kind}.weight_scale_inv")
    assert engine_part(scale, scale.shape, 1, 0) == Slice.whole(scale.shape)
    with pytest.raises(ConfigError, match=rf"layers.3.{kind}.weight: {lines} .*use a smaller"):
        engine_part(scale, scale.shape, tp, 0)


def test_buckets_are_runs_of_items_within_the_limit():
    assert buckets(range(6), [3, 3, 3, 9, 1, 1], 6) == [[0, 1], [2], [3], [4, 5]]
    assert buckets([], [], 6) == []
    generator = torch.Generator().manual_seed(0)
    for limit in (1, 10, 40, 1000):
        sizes = torch.randint(0, 50, (60,), generator=generator).tolist()
        found = buckets(range(60), sizes, limit)
        assert [i for run in found for i in run] == list(range(60))
        assert all(sum(sizes[i] for i in run) <= limit or len(run) == 1 for run in found)
        for one, other in zip(found, found[1:], strict=False):
            assert sum(sizes[i] for i in one) + sizes[other[0]] > limit  # none could be joined
