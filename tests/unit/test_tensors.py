"""What each tensor is, and parts of tensors: what two of them share, and its values."""

import re
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import Experts
from qurl_megatron.tensors.slice import Shard, Slice
from qurl_megatron.tensors.table import hf_tensor, uaq_role
from tests.support.archs import BASE

WHOLE = Slice.whole((3, 4))


def boxes(length: int) -> list[range]:
    return [range(a, b) for a, b in product(range(length + 1), repeat=2) if a <= b]


def test_an_overlap_is_the_elements_that_both_have():
    parts = [
        Slice((rows.start, columns.start), (len(rows), len(columns)))
        for rows, columns in product(boxes(3), boxes(4))
    ]
    indices = torch.arange(12).view(3, 4)
    elements = {part: set(part.narrow(indices, WHOLE).flatten().tolist()) for part in parts}
    for one, other in product(parts, repeat=2):
        shared, expected = one.overlap(other), elements[one] & elements[other]
        assert (shared is not None) == bool(expected)
        if shared:
            assert elements[shared] == expected
            held = shared.narrow(one.narrow(indices, WHOLE), one)
            assert set(held.flatten().tolist()) == expected and shared.elements == len(expected)


@pytest.mark.parametrize("start,size", [(0, 4), (0, 2), (8, 4), (6, 4)])
def test_no_view_is_taken_of_what_is_not_held(start, size):
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        Slice((start,), (size,)).narrow(torch.arange(4), Slice((4,), (4,)))


def test_a_shard_is_cut_in_the_coordinates_of_the_whole():
    whole = torch.arange(24).view(6, 4)
    rows = Shard("w", whole[2:5], (6, 4), 0, 2)
    assert rows.part == Slice.along((6, 4), 0, 2, 5)
    cut = rows.cut(Slice.along((6, 4), 0, 4, 6))
    assert (cut.start, cut.value.tolist()) == (4, [[16, 17, 18, 19]])
    assert rows.cut(Slice.along((6, 4), 0, 0, 2)) is None
    assert cut.value.data_ptr() == whole[4].data_ptr()  # a view
    columns = Shard("w", whole[:, 1:3], (6, 4), 1, 1)
    assert columns.cut(Slice.along((6, 4), 1, 2, 3)).value.tolist() == whole[:, 2:3].tolist()
    norm = Shard.whole("n", whole[0])
    again = norm.cut(Slice.whole((4,)))
    assert again.value.data_ptr() == whole.data_ptr() and (again.dim, again.start) == (None, 0)


ARCH = replace(
    BASE,
    family="qwen3_moe",
    num_layers=2,
    vocab=131,
    qk_norm=True,
    experts=Experts(count=3, top_k=2, intermediate=16, norm_topk_prob=True, shared=12),
)


@pytest.mark.parametrize(
    "name,shape,split,roles",
    [
        ("model.embed_tokens.weight", (131, 24), 0, "vocabulary"),
        ("model.layers.1.input_layernorm.weight", (24,), None, "norm"),
        ("model.layers.1.self_attn.q_proj.weight", (32, 24), 0, "quantized reader"),
        ("model.layers.1.self_attn.k_proj.weight", (8, 24), 0, "quantized reader"),
        ("model.layers.1.self_attn.k_proj.weight_scale", (8, 1), 0, ""),
        ("model.layers.1.self_attn.k_proj.weight_scale_inv", (1, 1), 0, ""),
        ("model.layers.1.self_attn.o_proj.weight_scale_inv", (1, 1), 1, ""),
        ("model.layers.1.self_attn.v_proj.bias", (8,), 0, ""),
        ("model.layers.1.self_attn.o_proj.weight", (24, 32), 1, "quantized"),
        ("model.layers.1.self_attn.o_proj.weight_scale", (24, 1), None, ""),
        ("model.layers.1.self_attn.k_norm.weight", (4,), None, ""),
        ("model.layers.1.mlp.gate.weight", (3, 24), None, "reader"),
        ("model.layers.1.mlp.experts.2.up_proj.weight", (16, 24), 0, "quantized reader"),
        ("model.layers.1.mlp.experts.12.down_proj.weight", (24, 16), 1, "quantized"),
        ("model.layers.1.mlp.shared_expert.up_proj.weight", (12, 24), 0, "quantized reader"),
        ("model.layers.1.mlp.shared_expert.down_proj.weight", (24, 12), 1, "quantized"),
        ("model.layers.1.mlp.shared_expert_gate.weight", (1, 24), None, "reader"),
        ("model.layers.1.mlp.down_proj.weight", (24, 64), 1, "quantized"),
        ("model.norm.weight", (24,), None, ""),
        ("lm_head.weight", (131, 24), 0, "vocabulary"),
    ],
)
def test_a_row_says_what_a_tensor_is(name, shape, split, roles):
    found = hf_tensor(ARCH, name)
    assert (found.shape, found.split_dim) == (shape, split)
    has = {"quantized": found.quantized, "vocabulary": found.vocabulary}
    has |= {role: uaq_role(name) == role for role in ("norm", "reader")}
    assert {role for role, true in has.items() if true} == set(roles.split())


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.self_attn.q_proj.weight",
        "model.layers.0.1.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.up_proj.weight",
        "model.layers.0.self_attn.q_proj.banana",
        "model.layers.N.self_attn.q_proj.weight",
        "lm_head.0.weight",
        "lm_head",
    ],
)
def test_a_tensor_without_a_row_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} is not one whose split"):
        hf_tensor(ARCH, name)


@pytest.mark.parametrize("owner", ["gate", "experts.0.up_proj", "experts.0.down_proj"])
def test_experts_are_refused_in_a_model_without(owner):
    with pytest.raises(ConfigError, match=rf"{re.escape(owner)}\.weight is not one whose split"):
        hf_tensor(replace(ARCH, experts=None), f"model.layers.0.mlp.{owner}.weight")


LOADER = ["engines.sglang.loader", "wire.files", "wire.group", "wire.shared_memory"]


@pytest.mark.parametrize(
    "modules,heavy",
    [
        (["tensors.arch", "tensors.slice", "tensors.table"], {"torch"}),
        (LOADER, {"megatron", "transformers"}),
        (["checkpoints.backends"], {"modelopt", "transformer_engine"}),
    ],
    ids=["tensors", "the loader of engines", "other quantizers"],
)
def test_heavy_packages_are_imported_by_those_who_need_them(modules, heavy):
    looks = "".join(f"import qurl_megatron.{module}\n" for module in modules)
    looks += f"import sys; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", looks], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
