"""Transformer Engine that is there, broken or of no use; what is set before CUDA starts."""

import sys

import pytest
import torch

from qurl_megatron.config import ParallelConfig, env
from qurl_megatron.kit.errors import ConfigError


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
        (
            "raise OSError('libcudart.so.12: cannot open\\nmore')",
            "OSError: libcudart.so.12",
        ),
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
