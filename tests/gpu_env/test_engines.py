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
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.slice import Slice

HIDDEN, HEADS, KV_HEADS, HEAD, MLP = 512, 4, 2, 128, 512  # whole blocks of 128 at TP 4
BF16 = torch.bfloat16
CODES = {"none": BF16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
ROWS_AND_COLUMNS = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
FUSED = {
    **{f"{part}_proj": ("qkv_proj", part) for part in "qkv"},
    **{part: ("gate_up_proj", number) for number, part in enumerate(("gate_proj", "up_proj"))},
}


@pytest.fixture(scope="session", autouse=True)
def h100(tmp_path_factory):
    """Have SGLang find an H100, and a node's driver and compiler."""
    driver, kernels = (tmp_path_factory.mktemp(name) for name in ("driver", "kernels"))
    source, library = Path(__file__).with_name("driver.c"), driver / "libcuda.so"
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *options, "-o", library, source], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    gpu = SimpleNamespace(
        major=9, minor=0, name="NVIDIA H100", multi_processor_count=132, total_memory=80 << 30
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": gpu.name,
        "get_device_properties": gpu,
    }
    folders = {"SGLANG_JIT_CACHE_DIR": str(kernels), "FLASHINFER_WORKSPACE_BASE": str(kernels)}
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ, folders):
        os.environ["LIBRARY_PATH"] = str(driver)
        os.environ.pop("CUDA_HOME", None)
        use_cuda_of_pip()
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
        yield kernels


class Qwen2ForCausalLM(nn.Module):
    """One layer of SGLang's linear layers, on one rank; the loader knows models by their names."""

    def __init__(self, scheme: str, tp: int, rank: int) -> None:
        from sglang.srt.layers import linear

        super().__init__()
        common = dict(quant_config=quantization(scheme), params_dtype=torch.bfloat16)
        group = SimpleNamespace(rank_in_group=rank, world_size=tp)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        with mock.patch.object(linear, "_resolve_linear_group", return_value=group):
            self.self_attn.qkv_proj = linear.QKVParallelLinear(
                HIDDEN, HEAD, HEADS, KV_HEADS, bias=True, **common
            )
            self.self_attn.o_proj = linear.RowParallelLinear(
                HEADS * HEAD, HIDDEN, bias=False, **common
            )
            self.mlp.gate_up_proj = linear.MergedColumnParallelLinear(
                HIDDEN, [MLP, MLP], bias=False, **common
            )
            self.mlp.down_proj = linear.RowParallelLinear(MLP, HIDDEN, bias=False, **common)

    def linear_layers(self) -> list[nn.Module]:
        return [*self.self_attn.children(), *self.mlp.children()]

    def load(self, checkpoint: dict[str, Tensor]) -> "Qwen2ForCausalLM":
        """Load as SGLang does when it starts."""
        for name, value in checkpoint.items():
            block, part, kind = name.split(".")
            layer, *shard = FUSED.get(part, (part,))
            parameter = getattr(getattr(getattr(self, block), layer), kind)
            parameter.weight_loader(parameter, value, *shard)
        return self.process()

    def process(self) -> "Qwen2ForCausalLM":
        for layer in self.linear_layers():
            layer.quant_method.process_weights_after_loading(layer)
        return self

    def places(self) -> dict[str, tuple]:
        return {n: (p.data_ptr(), p.shape, p.stride()) for n, p in self.named_parameters()}


def quantization(scheme: str):
    from sglang.srt.layers.quantization import fp8, w8a8_fp8, w8a8_int8

    if scheme == "int8":
        return w8a8_int8.W8A8Int8Config({"quant_method": "w8a8_int8"})
    if scheme == "fp8":
        return w8a8_fp8.W8A8Fp8Config(is_checkpoint_fp8_serialized=True)
    if scheme == "fp8_block":
        return fp8.Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128])
    return None


def random_checkpoint(scheme: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in ROWS_AND_COLUMNS.items():
        values = torch.randn(shape, generator=generator) * 40
        tensors[f"{name}.weight"] = values.to(CODES[scheme])
        if scheme != "none":
            tensors[f"{name}.weight_scale"] = torch.rand(shape[0], 1, generator=generator)
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            tensors[f"{name}.bias"] = values[:, 0].bfloat16()
    return tensors


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("scheme", CODES)
def test_an_update_in_place_leaves_what_sglang_would_have_loaded(scheme, tp):
    old, new = random_checkpoint(scheme, 0), random_checkpoint(scheme, 1)
    for rank in range(tp):
        model = Qwen2ForCausalLM(scheme, tp, rank).load(old)
        expected = dict(Qwen2ForCausalLM(scheme, tp, rank).load(new).named_parameters())
        places, weights = model.places(), SGLangWeights(model)
        targets = weights.targets()
        assert targets.keys() == new.keys()
        for name, target in targets.items():
            target.value.copy_(target.part.narrow(new[name], Slice.whole(target.shape)))
        weights.finish()
        model.process()
        assert model.places() == places
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.float(), expected[name].float()), name
        if scheme != "none":  # CUTLASS reads columns that lie together
            assert all(layer.weight.stride(0) == 1 for layer in model.linear_layers())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_block_fp8_is_refused_by_name(tp):
    model = Qwen2ForCausalLM("fp8_block", tp, 0)
    with pytest.raises(ConfigError, match="quantized as Fp8LinearMethod"):
        SGLangWeights(model).targets()


OPS = "sglang.kernels.ops"
KERNELS = {
    "activation": (f"{OPS}.activation.activation:activation_module", BF16),
    "norm": (f"{OPS}.layernorm.norm:_jit_fused_add_rmsnorm_module", BF16, False),
    "norm of heads": (f"{OPS}.layernorm.norm:_jit_qknorm_module", HEAD, BF16),
    "rotation": (f"{OPS}.attention.rope:_jit_fused_rope_module", True, HEAD, BF16, BF16),
    "KV store": (f"{OPS}.kvcache.kvcache:_jit_kvcache_module", 1024, 1024, 0),
    "FP8": (f"{OPS}.quantization.per_token_quant_fp8:_jit_per_token_quant_fp8_module", BF16),
    "sampling": ("flashinfer.sampling:get_sampling_module",),
}


def test_a_job_finds_that_kernels_can_be_made():
    assert fault(torch.version.cuda) is None


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_is_made_at_its_first_use_compiles_links_and_loads(kernel, h100):
    place, *arguments = KERNELS[kernel]
    before = set(h100.rglob("*90a*/**/*.so"))
    assert pkgutil.resolve_name(place)(*arguments)
    assert set(h100.rglob("*90a*/**/*.so")) > before
