from types import SimpleNamespace

import pytest
import torch

from qurl_megatron.engines.sglang import cpu_layers
from qurl_megatron.quant import dequantize, quantize, quantize_tokens


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("lead", [(5,), (2, 3)])
def test_a_layer_equals_the_product_of_dequantized_values(scheme, lead):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*lead, 32, generator=generator)
    weight = quantize(torch.randn(24, 32, generator=generator), scheme)
    bias = torch.randn(24, generator=generator)
    layer = SimpleNamespace(weight=weight.values.t(), weight_scale=weight.scale)

    codes, scale = quantize_tokens(x.view(-1, 32), scheme)
    expected = (codes.float() * scale) @ dequantize(weight).float().t() + bias
    actual = cpu_layers._apply(None, layer, x, bias)
    assert actual.shape == (*lead, 24)
    torch.testing.assert_close(actual.view(-1, 24), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("scheme", ["none", "int8", "fp8"])
def test_experts_are_the_weighted_sum_of_the_chosen_ones_that_are_here(scheme):
    generator = torch.Generator().manual_seed(0)
    layer, dense = SimpleNamespace(), {}
    for kind, rows, columns in (("w13_weight", 24, 16), ("w2_weight", 16, 12)):
        weights = [torch.randn(rows, columns, generator=generator) for _ in range(3)]
        if scheme != "none":
            codes = [quantize(weight, scheme) for weight in weights]
            weights = [dequantize(each).float() for each in codes]
            setattr(layer, kind, torch.stack([each.values for each in codes]))
            setattr(layer, f"{kind}_scale", torch.stack([each.scale for each in codes]))
        else:
            setattr(layer, kind, torch.stack(weights))
        dense[kind] = weights

    def product(x, weight):
        if scheme != "none":
            codes, scale = quantize_tokens(x, scheme)
            x = codes.float() * scale
        return x @ weight.t()

    x = torch.randn(5, 16, generator=generator)
    experts = torch.tensor([[0, 2], [1, -1], [2, 0], [-1, -1], [1, 2]])  # -1: of another rank
    weights = torch.rand(5, 2, generator=generator)
    expected = torch.zeros(5, 16)
    for token, choice in (experts >= 0).nonzero().tolist():
        expert = experts[token, choice]
        gate, up = product(x[token : token + 1], dense["w13_weight"][expert]).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        expected[token] += weights[token, choice] * product(inner, dense["w2_weight"][expert])[0]
    actual = cpu_layers._experts(layer, x, weights, experts)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_a_scale_per_tensor_is_refused():
    layer = SimpleNamespace(
        weight=torch.zeros(32, 24, dtype=torch.int8), weight_scale=torch.ones(1)
    )
    with pytest.raises(NotImplementedError):
        cpu_layers._apply(None, layer, torch.ones(1, 32))


def test_nothing_happens_unless_sglang_is_asked_to_run_without_a_gpu(monkeypatch):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    assert not cpu_layers.wanted()
    cpu_layers.install()
    cpu_layers.register()  # would import SGLang, which is not here
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not cpu_layers.wanted()


def test_the_stub_fails_when_it_is_called_not_when_it_is_imported():
    stub = cpu_layers._Stub("sgl_kernel")
    assert stub.silu_and_mul is not None
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.silu_and_mul needs a GPU"):
        stub.silu_and_mul(1)
    assert not hasattr(stub, "__path__")


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch for CUDA lacks none")
def test_torchvision_finds_its_operators():
    for _ in range(2):
        cpu_layers._define_operators()
    assert str(torch.ops.torchvision.nms.default) == "torchvision.nms.default"
