"""Installed packages with their effects, and environment variables that must be set early."""

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import sys
import sysconfig
import types
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.config.sections import ParallelConfig
from qurl_megatron.kit.errors import ConfigError

FUSED = ("transformer_engine", "apex", "amp_C")
"""Packages that Megatron prefers to torch's own kernels; none runs on a CPU."""
BOARD = "torch.utils.tensorboard"
DECORATOR = "megatron.core.jit"
"""Where Megatron has ``torch.compile`` from, under a name of its own."""

OF_WHEELS = {
    "CUDNN_HOME": "cudnn/lib/libcudnn.so.9",
    "NVRTC_HOME": "cu13/lib/libnvrtc.so.13",
    "CURAND_HOME": "cu13/lib/libcurand.so.10",
    "NVTE_CUDA_INCLUDE_DIR": "cu13/include/cuda_runtime.h",
}
"""Where Transformer Engine looks first for a library, and the wheels' file of it."""

# Raised by compiled packages that were built for another torch, CUDA or driver.
_BROKEN = (ImportError, OSError, RuntimeError, AttributeError, AssertionError, NameError, TypeError)


@dataclass(frozen=True)
class Package:
    name: str  # as pip knows it
    module: str
    present: str  # its effect when installed
    absent: str  # the consequence of its absence


PACKAGES = (
    Package("torch", "torch", "tensors, collectives", "nothing runs"),
    Package("megatron-core", "megatron.core", "models and their layout", "no qurl train"),
    Package("transformer-engine", "transformer_engine", "fused layers on GPUs", "Megatron's own"),
    Package("apex", "apex", "fused Adam on GPUs", "torch's (PyPI's apex is something else)"),
    Package(
        "triton", "triton", "quantizing and log-probs in one pass on GPUs", "in several passes"
    ),
    Package("nvidia-modelopt", "modelopt", "qurl quantize --backend modelopt", "our quantizers"),
    Package("sglang", "sglang", "SGLang engines", "embedded ones, and servers in rollout.urls"),
    Package("wandb", "wandb", "observe.wandb_project", "metrics.jsonl and TensorBoard alone"),
)


def version(package: Package) -> str | None:
    """Return the installed version; None if there is none, or for PyPI's unrelated apex."""
    if importlib.util.find_spec(package.module.split(".")[0]) is None:
        return None
    if package.name == "apex" and importlib.util.find_spec("apex.normalization") is None:
        return None
    try:
        return importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def prepare_cuda(parallel: ParallelConfig) -> None:
    """Set variables that CUDA reads once, before it starts, unless the user has set them.

    With one hardware queue, kernels start in the order of their launches: Megatron relies on it to
    overlap a collective of tensor or context parallelism with the next product. GPUs from Blackwell
    on do not need it.
    """
    if parallel.tensor > 1 or parallel.context > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def take_libraries_of_wheels() -> None:
    """Have Transformer Engine use the libraries that torch uses; call before it is imported.

    It prefers cuDNN, NVRTC and cuRAND of CUDA_HOME or /usr/local/cuda, whatever their release, to
    pip's wheels, and does not load the parts of a cuDNN at CUDNN_HOME: this does.
    """
    import torch

    wheels = Path(sysconfig.get_path("purelib"), "nvidia")
    if not torch.cuda.is_available() or not importlib.util.find_spec("transformer_engine"):
        return
    for name, file in OF_WHEELS.items():
        if (wheels / file).exists():
            os.environ.setdefault(name, str((wheels / file).parents[1]))
    for part in Path(os.environ.get("CUDNN_HOME", "/none")).glob("lib/libcudnn*.so.9"):
        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)


def refuse_environment() -> None:
    """Raise ``ConfigError`` for ``unseen_gpus`` and for kernels that Megatron would assert."""
    if reason := unseen_gpus():
        raise ConfigError(reason)
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        if os.environ.get(name, "1") != "1":
            raise ConfigError(f"{name}={os.environ[name]} forbids Megatron a kernel; unset it")


def unseen_gpus(root: Path = Path("/")) -> str | None:
    """Return why torch sees no GPU although NVIDIA's driver or devices are here.

    None where CUDA_VISIBLE_DEVICES asks for the CPU ("NoDevFiles" is Slurm's), and where torch was
    built without CUDA.
    """
    import torch

    built, shown = torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    if torch.cuda.is_available() or not built or shown in ("", "-1", "NoDevFiles"):
        return None
    version = ctypes.c_int()
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    release = root / "sys/module/nvidia/version"
    driver = f"NVIDIA's driver {release.read_text().strip() if release.exists() else ''}".rstrip()
    major, minor = version.value // 1000, version.value % 1000 // 10
    if 0 < major < int(built.partition(".")[0]):
        reason = f"is of CUDA {major}.{minor}, and torch of {built}: CUDA 13 needs 580 or newer"
    elif not release.exists() and not any(root.glob("dev/nvidia[0-9]*")):
        return None
    elif not major:
        reason = "has no libcuda.so.1 here: start a container with it (apptainer --nv)"
    else:
        reason = "has no GPU for this process: ask the batch system for some"
    return f"torch sees no GPU: {driver} {reason}, or set CUDA_VISIBLE_DEVICES= to use the CPU"


def keep_out_without_gpu() -> None:
    """Without a GPU, hide ``FUSED`` from imports, and have Megatron compile nothing.

    Megatron uses whatever it can import: a fused optimizer would allocate on "cuda" all the same,
    and fused kernels, which no CPU runs, would import torch's compiler: 1.5 s and 70 MB. Call
    before Megatron is imported; ``qurl_megatron.actor`` does.
    """
    import torch

    if torch.cuda.is_available():
        return
    for name in FUSED:
        # None, as the import system has it, makes an import of the name fail.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    as_it_is = types.ModuleType(DECORATOR)
    vars(as_it_is)["jit_fuser"] = lambda function: function
    sys.modules.setdefault(DECORATOR, as_it_is)
    # Megatron has torch look for CUDA's compiler, which may be there although no GPU is.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    compiled, torch.compile = torch.compile, as_it_is.jit_fuser  # 0.19 has a router compiled
    # Its timers bring TensorBoard, 0.2 s, and do without where there is none.
    sys.modules.setdefault(BOARD, None)  # type: ignore[arg-type]
    try:
        importlib.import_module("megatron.core")
    finally:
        torch.compile = compiled
        if sys.modules[BOARD] is None:
            del sys.modules[BOARD]


def use_transformer_engine() -> bool:
    """Return whether CUDA and Transformer Engine are both there; raise ``ConfigError`` if the
    package is installed and cannot be imported."""
    import torch

    if getattr(sys.modules.get("transformer_engine"), "runs_without_cuda", False):
        return True  # the tests' stand-in
    if not torch.cuda.is_available() or not importlib.util.find_spec("transformer_engine"):
        return False
    if error := transformer_engine_error():
        raise ConfigError(
            f"transformer-engine is installed, and importing it fails ({error}); install the build "
            "for this torch and CUDA, or uninstall it to train with Megatron's own layers"
        )
    return True


@functools.cache
def transformer_engine_error() -> str:
    """Return why an installed Transformer Engine cannot be imported, in one line; "" if it can."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except _BROKEN as error:
        return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    return ""


def describe() -> str:
    """Return one line per fact about this machine and per package."""
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        device = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, collectives over NCCL"
    else:
        device = unseen_gpus() or "no CUDA device: CPU with gloo (actor/cpu.py is active)"
    lines = [
        f"python {platform.python_version()}, {os.cpu_count()} cores",
        f"device: {device}",
        f"int8 on this CPU: {torch.backends.cpu.get_cpu_capability()}, torch.backends.mkldnn "
        f"{'available' if torch.backends.mkldnn.is_available() else 'missing'}",
        "",
    ]
    for package in PACKAGES:
        installed = version(package)
        effect = package.present if installed else f"without it: {package.absent}"
        # It is built for one torch and one CUDA, and Megatron only looks for its name.
        tried = installed and package.name == "transformer-engine"
        if tried and (error := transformer_engine_error()):
            effect = f"cannot be imported ({error}); qurl train refuses it where there is a GPU"
        lines.append(f"{package.name:20} {installed or 'not found':16} {effect}")
    return "\n".join(lines)
