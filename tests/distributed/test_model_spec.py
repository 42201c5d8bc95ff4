"""The decoder's spec is completed whether Megatron-Core gives specs or builders."""

from functools import partial

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from qurl_megatron.actor import spec
from qurl_megatron.actor.aligned import Align, AlignedColumn, AlignedRow


def as_builder(given):
    """What newer versions of Megatron-Core have in the place of a spec, or have given already."""
    if isinstance(given, partial):
        return given
    return partial(given.module, submodules=given.submodules)


@pytest.mark.parametrize("builders", [(), ("experts",), ("experts", "mlp")], ids=str)
@pytest.mark.parametrize("experts", [None, 2])
@pytest.mark.parametrize("align", [None, Align("int8")], ids=["none", "weights"])
def test_specs_and_builders_are_both_completed(experts, align, builders, monkeypatch):
    local = spec.get_gpt_layer_local_spec

    def given(**named):
        layer = local(**named)
        mlp = layer.submodules.mlp
        if experts and "experts" in builders:
            parts = spec._submodules(mlp)
            parts.experts = as_builder(parts.experts)
        if "mlp" in builders:
            layer.submodules.mlp = as_builder(mlp)
        return layer

    monkeypatch.setattr(spec, "get_gpt_layer_local_spec", given)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=experts,
        add_bias_linear=False,
        params_dtype=torch.float32,
    )
    (layer,) = spec.decoder_spec(config, qk_norm=False, align=align).layer_specs
    parts = spec._submodules(layer.submodules.mlp)
    if experts:
        assert parts.router is spec.Router
        parts = spec._submodules(parts.experts)
    classes = [getattr(part, "module", None) for part in (parts.linear_fc1, parts.linear_fc2)]
    assert (classes == [AlignedColumn, AlignedRow]) == (align is not None)
