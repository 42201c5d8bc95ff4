"""Versions and settings at each end of a transport, compared before a byte is sent.

Trainer and engines come from two environments, each with its own torch and NCCL. Most differences
are harmless; those that are not end in a crash or a hang far from their cause, so they are refused
here, in a sentence.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

import qurl_megatron
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.wire.message import FORMAT

NCCL_SETTINGS = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
"""How NCCL allocates and multicasts. SGLang sets both to 0 where they are not set; NCCL's own
default is on. In one communicator they must agree."""


@dataclass(frozen=True)
class Need:
    """A fact that has to be the same at both ends."""

    name: str
    why: str
    fix: str


_SAME_PACKAGE = Need(
    "protocol",
    "their messages are incompatible",
    "install the same version of qurl-megatron in both environments",
)
NEEDS: dict[str, tuple[Need, ...]] = {
    "gloo": (_SAME_PACKAGE,),
    "memory": (_SAME_PACKAGE,),
    "nccl": (
        _SAME_PACKAGE,
        Need(
            "nccl",
            "NCCL only connects equal versions",
            "install one NCCL (nvidia-nccl) in both environments, or set sync.transport=files",
        ),
        *(
            Need(
                name,
                "all ends of a communicator need the same value",
                f"start both with the same {name}, or set sync.transport=files",
            )
            for name in NCCL_SETTINGS
        ),
    ),
}
"""By what carries the bytes. Files need nothing: every message names its format."""


def own_facts() -> dict[str, str]:
    """Of this process."""
    nccl = torch.distributed.is_nccl_available() and torch.cuda.is_available()
    return {
        "package": qurl_megatron.__version__,
        "protocol": FORMAT,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else "none",
        **{name: os.environ.get(name, "unset") for name in NCCL_SETTINGS},
    }


def disagreement(kind: str, trainer: Mapping[str, str], engine: Mapping[str, str]) -> str | None:
    """Why two ends cannot be joined, in a sentence; None: they can.

    Args:
        kind: of ``NEEDS``.
    """
    for need in NEEDS[kind]:
        theirs, ours = trainer.get(need.name, "unknown"), engine.get(need.name, "unknown")
        if theirs != ours:
            return (
                f"the trainer has {need.name} {theirs} (torch {trainer.get('torch')}), the engine "
                f"{need.name} {ours} (torch {engine.get('torch')}), and {need.why}; {need.fix}"
            )
    return None


def settle_nccl() -> None:
    """Give this process SGLang's values where it has none: before its first use of NCCL.

    Engines started here inherit them.
    """
    for name in NCCL_SETTINGS:
        os.environ.setdefault(name, "0")


def check(kind: str, trainer: Mapping[str, str]) -> None:
    """For an engine that knows what the trainer is made of.

    Raises:
        ConfigError: the two cannot be joined.
    """
    if reason := disagreement(kind, trainer, own_facts()):
        raise ConfigError(reason)
