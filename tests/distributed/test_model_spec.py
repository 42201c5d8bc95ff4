"""The decoder's spec is completed whether Megatron-Core gives specs or builders."""

from functools import partial

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from qurl_megatron.actor import spec
from qurl_megatron.actor.aligned import Align, AlignedColumn, AlignedRow


@pytest.mark.parametrize("builder", [False, True], ids=["a spec", "a builder"])
@pytest.mark.parametrize("align", [None, Align("int8")], ids=["none", "weights"])
def test_specs_and_builders_are_both_completed(align, builder, monkeypatch):
    local = spec.get_gpt_layer_local_spec

    def given(**named):
        layer = local(**named)
        mlp = layer.submodules.mlp
        if builder and not isinstance(mlp, partial):  # as newer versions of Megatron-Core have it
            layer.submodules.mlp = partial(mlp.module, submodules=mlp.submodules)
        return layer

    monkeypatch.setattr(spec, "get_gpt_layer_local_spec", given)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        add_bias_linear=False,
        params_dtype=torch.float32,
    )
    (layer,) = spec.decoder_spec(config, qk_norm=False, align=align).layer_specs
    parts = spec._submodules(layer.submodules.mlp)
    classes = [getattr(part, "module", None) for part in (parts.linear_fc1, parts.linear_fc2)]
    assert (classes == [AlignedColumn, AlignedRow]) == (align is not None)
