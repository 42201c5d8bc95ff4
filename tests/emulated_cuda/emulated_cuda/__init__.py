"""Make ``torch``, built for CPUs, behave as if N GPUs were there: slow, and numerically right.

    PYTHONPATH=tests/emulated_cuda EMULATED_CUDA_DEVICES=2 python ...

``on_import`` waits for ``import torch``: the shared library is loaded before it, because torch
looks its CUDA hooks up once, and ``torch.cuda`` is completed after it. See the README beside.
"""

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

from emulated_cuda.build import library


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None:
            return None
        if not library().exists():
            raise ImportError(
                "EMULATED_CUDA_DEVICES is set, and the emulated CUDA device is not built for this"
                f" torch and these sources: run {Path(__file__).parent / 'build.py'}"
            )
        spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner):
        self.inner = inner

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        folder = Path(module.__spec__.origin).parent / "lib"
        for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
        module.__spec__.loader = self.inner
        module.__loader__ = self.inner
        self.inner.exec_module(module)
        _install()


def on_import() -> None:
    """Call before torch is imported; ``sitecustomize`` does."""
    if "torch" in sys.modules:
        raise ImportError("emulated_cuda must come before torch")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # there is no Triton to compile for
    os.environ.setdefault("QURL_TRITON", "0")  # and no GPU that its kernels would run on


def _install() -> None:
    import torch

    from emulated_cuda import distributed, runtime, sharing, streams

    lib = native()
    assert lib.hooks_are_ours(), "torch looked its CUDA hooks up before they were there"
    for part in (runtime, streams, sharing):
        part.install(lib)
    if torch.distributed.is_available():
        distributed.install(lib)


def synchronizations() -> dict[str, int]:
    """How often the host waited for the device in this process, by operator."""
    return native().synchronizations()


def reset_synchronizations() -> None:
    native().reset_synchronizations()


def native():
    """The extension module; torch is imported by now."""
    name = "emulated_cuda._emulated_cuda"
    if name not in sys.modules:
        path = str(library())
        loader = importlib.machinery.ExtensionFileLoader("_emulated_cuda", path)
        spec = importlib.machinery.ModuleSpec("_emulated_cuda", loader, origin=path)
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]
