"""Transformer Engine that is there, broken or of no use; what is set before CUDA starts."""

import ctypes
import os
import sys
import sysconfig
from types import SimpleNamespace

import pytest
import torch

from qurl_megatron.config import ParallelConfig, env, load
from qurl_megatron.engines.embedded.endpoints import load_engine
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.training.start import run_rank
from tests.support.slurm_runs import QUICK


@pytest.fixture
def transformer_engine(tmp_path, monkeypatch):
    """Installs a package of that name, whose torch part has the text that a test gives."""
    env.transformer_engine_error.cache_clear()
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)

    def install(text: str) -> None:
        package = tmp_path / "transformer_engine"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "pytorch.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    yield install
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]
    env.transformer_engine_error.cache_clear()


def test_a_whole_one_is_used_where_there_is_a_gpu(transformer_engine, monkeypatch):
    transformer_engine("")
    assert env.use_transformer_engine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not env.use_transformer_engine()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise OSError('libcudart.so.12: cannot open\\nmore')", "OSError: libcudart.so.12"),
        ("import torch.no_such_module", "ModuleNotFoundError: No module named 'torch.no_such"),
        ("raise AssertionError", "AssertionError"),
    ],
)
def test_a_broken_one_is_refused_in_one_sentence(text, told, transformer_engine):
    transformer_engine(text)
    with pytest.raises(ConfigError, match=f"importing it fails .{told}") as caught:
        env.use_transformer_engine()
    assert "\n" not in str(caught.value) and "uninstall it" in str(caught.value)
    (line,) = [line for line in env.describe().splitlines() if "transformer-engine " in line]
    assert f"cannot be imported ({told}" in line


def test_without_a_gpu_megatron_does_not_find_what_needs_one(transformer_engine, monkeypatch):
    transformer_engine("")
    env.keep_out_without_gpu()
    import transformer_engine.pytorch

    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    env.keep_out_without_gpu()
    with pytest.raises(ImportError):
        import transformer_engine.pytorch


def test_collectives_beside_products_want_one_hardware_queue(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    env.prepare_cuda(ParallelConfig(data=8))
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in env.os.environ
    env.prepare_cuda(ParallelConfig(tensor=2))
    assert env.os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    env.prepare_cuda(ParallelConfig(context=2))
    assert env.os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_transformer_engine_gets_the_libraries_of_the_wheels(
    transformer_engine, tmp_path, monkeypatch
):
    wheels, loaded, environment = tmp_path / "nvidia", [], {"CUDA_HOME": "/usr/local/cuda"}
    parts = ("cudnn/lib/libcudnn.so.9", "cudnn/lib/libcudnn_graph.so.9", "cu13/lib/libnvrtc.so.13")
    for part in parts:
        (wheels / part).parent.mkdir(parents=True, exist_ok=True)
        (wheels / part).touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: loaded.append((path, mode)))
    monkeypatch.setattr(os, "environ", environment)
    transformer_engine("")
    env.take_libraries_of_wheels()
    own = {"CUDNN_HOME": f"{wheels}/cudnn", "NVRTC_HOME": f"{wheels}/cu13"}
    assert environment == {"CUDA_HOME": "/usr/local/cuda"} | own
    assert sorted(loaded) == [(f"{wheels}/{part}", ctypes.RTLD_GLOBAL) for part in parts[:2]]
    loaded.clear()
    environment["CUDNN_HOME"] = "/none"  # the user's own stays
    env.take_libraries_of_wheels()
    assert environment["CUDNN_HOME"] == "/none" and not loaded


def library(cuda: int | None):
    """Stands in for ctypes.CDLL: NVIDIA's driver of this CUDA, or none."""

    def load(name: str) -> SimpleNamespace:
        if cuda is None:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(cuDriverGetVersion=lambda at: setattr(at._obj, "value", cuda))

    return load


@pytest.mark.parametrize(
    ("files", "cuda", "sentence"),
    [
        ((), None, None),
        ((), 13000, None),  # a driver without a GPU, as to import libraries that want one
        ((), 12040, "driver is of CUDA 12.4, and torch of 13.0: CUDA 13 needs 580 or newer, or"),
        (("sys/module/nvidia/version", "dev/nvidia0"), 12040, "driver 550.54 is of CUDA 12.4, and"),
        (("dev/nvidia7",), None, "driver has no libcuda.so.1 here: start a container with it"),
        (("sys/module/nvidia/version",), 13000, "driver 550.54 has no GPU for this process: ask"),
    ],
)
def test_gpus_that_torch_does_not_see_are_refused_unless_the_cpu_was_asked_for(
    files, cuda, sentence, tmp_path, monkeypatch
):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("550.54\n")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ctypes, "CDLL", library(cuda))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for _ in range(2):
        said = env.unseen_gpus(tmp_path)
        assert said is sentence or said.startswith(f"torch sees no GPU: NVIDIA's {sentence}")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert env.unseen_gpus(tmp_path) is None


def test_a_rank_or_an_engine_does_not_compute_on_the_cpu_beside_gpus_that_it_cannot_use(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", library(12040))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="CUDA 13 needs 580 or newer"):
        env.refuse_environment()
    with pytest.raises(ConfigError, match="CUDA 13 needs 580 or newer"):
        load_engine(tmp_path, scheme="none", dtype="bfloat16", cache_gb=1.0)
    assert "device: torch sees no GPU: NVIDIA's driver" in env.describe()


@pytest.mark.parametrize("name", ["NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"])
def test_a_choice_of_attention_that_megatron_would_fail_at_ends_a_rank(name, monkeypatch, capsys):
    monkeypatch.setenv(name, "1")  # as Megatron leaves it
    env.refuse_environment()
    monkeypatch.setenv(name, "0")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # which a rank would set
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as left:
        run_rank(load(QUICK, []))
    assert left.value.code == 2
    assert f"qurl: {name}=0 forbids Megatron a kernel; unset it\n" in capsys.readouterr().err
