"""Versions and settings at each end of a transport, compared before a byte is sent.

Trainer and engines come from two environments, each with its own torch and NCCL. Most differences
are harmless; those that are not end in a crash or a hang far from their cause, so they are refused
here, in a sentence.
"""

import os
from collections.abc import Mapping

import torch

from qurl_megatron.wire.message import FORMAT, SAME_PACKAGE

NCCL_SETTINGS = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
"""How NCCL allocates and multicasts. SGLang sets both to 0 where they are not set; NCCL's own
default is on. In one communicator they must agree."""


_PROTOCOL = {"protocol": f"their messages are incompatible; {SAME_PACKAGE}"}
_NCCL = {
    "nccl": "NCCL only connects equal versions; install one NCCL (nvidia-nccl) in both "
    "environments, or set sync.transport=files"
}
for _name in NCCL_SETTINGS:
    _NCCL[_name] = (
        "all ends of a communicator need the same value; start both with the same "
        f"{_name}, or set sync.transport=files"
    )
NEEDS = {"gloo": _PROTOCOL, "memory": _PROTOCOL, "nccl": _PROTOCOL | _NCCL}
"""By carrier of the bytes: what has to be the same at both ends, and why, with the fix. Files need
nothing: every message names its format."""


def own_facts() -> dict[str, str]:
    """Return this process's facts."""
    nccl = "none"
    if torch.distributed.is_nccl_available() and torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "protocol": FORMAT,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "none",
        "nccl": nccl,
        **{name: os.environ.get(name, "unset") for name in NCCL_SETTINGS},
    }


def disagreement(kind: str, trainer: Mapping[str, str], engine: Mapping[str, str]) -> str | None:
    """Return why two ends cannot be joined, in a sentence; None if they can.

    Args:
        kind: a key of ``NEEDS``.
    """
    for name, reason in NEEDS[kind].items():
        ours, theirs = trainer.get(name, "unknown"), engine.get(name, "unknown")
        if ours != theirs:
            return (
                f"the trainer has {name} {ours} (torch {trainer.get('torch')}), the engine "
                f"{name} {theirs} (torch {engine.get('torch')}), and {reason}"
            )
    return None


def settle_nccl() -> None:
    """Give this process SGLang's NCCL settings unless it has its own, before it uses NCCL.

    Engines started here inherit them.
    """
    for name in NCCL_SETTINGS:
        os.environ.setdefault(name, "0")
