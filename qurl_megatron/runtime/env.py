"""What is installed, and what each thing changes: the text of ``qurl show --env``."""

import importlib.metadata
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    name: str  # as pip knows it
    module: str
    found: str  # what it changes where it is there
    absent: str  # what happens without it


PACKAGES = (
    Package("torch", "torch", "tensors, collectives", "nothing runs"),
    Package(
        "megatron-core",
        "megatron.core",
        "model, parallelism, schedules, optimizer",
        "qurl train cannot run",
    ),
    Package(
        "transformer-engine",
        "transformer_engine",
        "layers with fused norm + linear kernels on GPUs",
        "Megatron's local layers; pip install 'qurl-megatron[gpu]' on a machine with CUDA",
    ),
    Package(
        "apex",
        "apex",
        "fused Adam and multi-tensor kernels",
        "torch's own kernels; build it from NVIDIA's source (PyPI's package is something else)",
    ),
    Package(
        "nvidia-modelopt",
        "modelopt",
        "checkpoints_tools/quantize.py --backend modelopt",
        "the quantizers of this package alone",
    ),
    Package(
        "sglang",
        "sglang",
        "rollout fleet on GPUs, reached through rollout.urls",
        "the embedded engine; servers elsewhere can still be named in rollout.urls",
    ),
    Package("wandb", "wandb", "nothing yet", "metrics.jsonl and TensorBoard only"),
)


def version(package: Package) -> str | None:
    """Installed version, or None, as for a module without its own distribution (PyPI's apex)."""
    if importlib.util.find_spec(package.module.split(".")[0]) is None:
        return None
    if package.name == "apex" and importlib.util.find_spec("apex.normalization") is None:
        return None
    try:
        return importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def use_transformer_engine() -> bool:
    """True where the Transformer Engine layer spec is used: CUDA and the package are both there."""
    import torch

    if getattr(sys.modules.get("transformer_engine"), "runs_without_cuda", False):
        return True  # the tests' stand-in
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def describe() -> str:
    """One line per fact about this machine and per package."""
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        device = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, collectives over NCCL"
    else:
        device = "no CUDA device: CPU with collectives over gloo (runtime/cpu.py is active)"
    lines = [
        f"python {platform.python_version()}, {os.cpu_count()} cores",
        f"device: {device}",
        f"int8 on this CPU: {torch.backends.cpu.get_cpu_capability()}, torch.backends.mkldnn "
        f"{'available' if torch.backends.mkldnn.is_available() else 'missing'}",
        "",
    ]
    for package in PACKAGES:
        found = version(package)
        lines.append(
            f"{package.name:20} {found or 'not found':16} "
            f"{package.found if found else 'without it: ' + package.absent}"
        )
    return "\n".join(lines)
