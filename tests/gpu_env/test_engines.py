"""SGLang's layers as its CUDA path makes them, on CPU tensors, and its kernels for an H100.

No kernel is run. Torch says that it sees an H100; a driver that knows none lets libraries load.
"""

import ctypes
import os
import pkgutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from qurl_megatron.engines.sglang.compiling import fault, use_cuda_of_pip
from qurl_megatron.engines.sglang.loader import SGLangWeights
from qurl_megatron.engines.sglang.starting_sglang import quantization_config
from qurl_megatron.schemes import SCHEMES, scale_grid
from qurl_megatron.tensors.slice import Slice

BF16, HEAD = torch.bfloat16, 128
SIZE = 4 * HEAD  # of most weights in both directions, so that shapes do not tell them apart
FORMATS = {"none": BF16, "int8": torch.int8}
FORMATS |= dict.fromkeys(("fp8", "fp8_block"), torch.float8_e4m3fn)
FUSED = {f"{part}_proj": ("qkv_proj", part) for part in "qkv"}
FUSED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
ROWS = dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), SIZE)
ROWS |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), SIZE // 2)
ROWS |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), SIZE)


@pytest.fixture(scope="session", autouse=True)
def kernels(tmp_path_factory):
    """Have SGLang find an H100, and a node's driver and compiler; the folder for its kernels."""
    driver, kernels = (tmp_path_factory.mktemp(name) for name in ("driver", "kernels"))
    source, library = Path(__file__).with_name("driver.c"), driver / "libcuda.so"
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *options, "-o", library, source], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    gpu = dict(major=9, minor=0, name="H100", multi_processor_count=132, total_memory=80 << 30)
    answers = dict(is_available=True, device_count=1, current_device=0, get_device_name="H100")
    answers |= dict(get_device_capability=(9, 0), get_device_properties=SimpleNamespace(**gpu))
    answers = {name: lambda *_, it=answer: it for name, answer in answers.items()}
    folders = dict.fromkeys(("SGLANG_JIT_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"), str(kernels))
    environment = mock.patch.dict(os.environ, folders, LIBRARY_PATH=str(driver))
    with environment, mock.patch.multiple(torch.cuda, **answers):
        os.environ.pop("CUDA_HOME", None)
        use_cuda_of_pip()
        yield kernels


class Qwen2ForCausalLM(nn.Module):
    """A layer's linear layers by SGLang, on one rank; the loader knows models by their names."""

    def __init__(self, scheme: str, tp: int, rank: int) -> None:
        from sglang.srt.layers import linear

        super().__init__()
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        common = dict(quant_config=quantization(scheme), params_dtype=BF16)
        group = SimpleNamespace(rank_in_group=rank, world_size=tp)
        qkv, gate_up, row = (
            getattr(linear, f"{kind}ParallelLinear") for kind in ("QKV", "MergedColumn", "Row")
        )
        with mock.patch.object(linear, "_resolve_linear_group", return_value=group):
            self.self_attn.qkv_proj = qkv(SIZE, HEAD, 4, 2, bias=True, **common)
            self.self_attn.o_proj = row(SIZE, SIZE, bias=False, **common)
            self.mlp.gate_up_proj = gate_up(SIZE, [SIZE, SIZE], bias=False, **common)
            self.mlp.down_proj = row(SIZE, SIZE, bias=False, **common)

    def linear_layers(self) -> list[nn.Module]:
        return [*self.self_attn.children(), *self.mlp.children()]

    def load(self, checkpoint: dict[str, Tensor]) -> "Qwen2ForCausalLM":
        """Load as SGLang does when it starts."""
        for name, value in checkpoint.items():
            block, part, kind = name.split(".")
            layer, *shard = FUSED.get(part, (part,))
            parameter = self.get_parameter(f"{block}.{layer}.{kind}")
            parameter.weight_loader(parameter, value, *shard)
        return self.process()

    def process(self) -> "Qwen2ForCausalLM":
        for layer in self.linear_layers():
            layer.quant_method.process_weights_after_loading(layer)
        return self


def quantization(scheme: str):
    from sglang.srt.layers.quantization import get_quantization_config

    config = quantization_config(scheme)
    kind = None if scheme == "none" else get_quantization_config(config["quant_method"])
    return kind and kind.from_config(config)


def random_checkpoint(scheme: str, seed: int) -> dict[str, Tensor]:
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, rows in ROWS.items():
        values = torch.randn(rows, SIZE, generator=generator) * 40
        tensors[f"{name}.weight"] = values.to(FORMATS[scheme])
        if scheme != "none":
            rules = SCHEMES[scheme]
            scale = torch.rand(scale_grid((rows, SIZE), rules.block), generator=generator)
            tensors[f"{name}.weight{rules.scale}"] = scale
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            tensors[f"{name}.bias"] = values[:, 0].to(BF16)
    return tensors


def parameter_places(model: nn.Module) -> dict[str, tuple]:
    return {n: (p.data_ptr(), p.shape, p.stride()) for n, p in model.named_parameters()}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("scheme", FORMATS)
def test_an_update_in_place_leaves_what_sglang_would_have_loaded(scheme, tp):
    old, new = random_checkpoint(scheme, 0), random_checkpoint(scheme, 1)
    for rank in range(tp):
        model = Qwen2ForCausalLM(scheme, tp, rank).load(old)
        fresh = Qwen2ForCausalLM(scheme, tp, rank).load(new)
        weights, places = SGLangWeights(model), parameter_places(model)
        targets = weights.targets()
        assert targets.keys() == new.keys()
        for name, target in targets.items():
            target.value.copy_(target.part.narrow(new[name], Slice.whole(target.shape)))
        weights.finish()
        model.process()
        assert parameter_places(model) == places
        for name, parameter in fresh.named_parameters():
            assert torch.equal(model.get_parameter(name).float(), parameter.float()), name
        if scheme in ("int8", "fp8"):  # CUTLASS reads columns that lie together
            assert all(layer.weight.stride(0) == 1 for layer in model.linear_layers())


def test_a_job_finds_that_kernels_can_be_made():
    assert fault(torch.version.cuda) is None


OPS = "sglang.kernels.ops"
KERNELS = [
    (f"{OPS}.activation.activation:activation_module", BF16),
    (f"{OPS}.layernorm.norm:_jit_fused_add_rmsnorm_module", BF16, False),
    (f"{OPS}.layernorm.norm:_jit_qknorm_module", HEAD, BF16),
    (f"{OPS}.attention.rope:_jit_fused_rope_module", True, HEAD, BF16, BF16),
    (f"{OPS}.kvcache.kvcache:_jit_kvcache_module", 1024, 1024, 0),
    (f"{OPS}.quantization.per_token_quant_fp8:_jit_per_token_quant_fp8_module", BF16),
    ("flashinfer.sampling:get_sampling_module",),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place, arguments", [(place, rest) for place, *rest in KERNELS])
def test_a_kernel_that_is_made_at_its_first_use_compiles_links_and_loads(place, arguments, kernels):
    before = set(kernels.rglob("*90a*/**/*.so"))
    assert pkgutil.resolve_name(place)(*arguments)
    assert set(kernels.rglob("*90a*/**/*.so")) > before
