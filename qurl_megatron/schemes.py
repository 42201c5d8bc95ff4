"""The number formats of rollouts, one row each; whatever depends on a format reads its row.

torch is imported where a row's ``dtype`` is asked for, so that commands and plans stay light.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 128
"""Edge of the squares of "fp8_block"."""

SCALES = ("_scale", "_scale_inv")
"""Ends of the names of scales, behind the weight's: one per row; one per square, as DeepSeek named
it. Either is a factor."""


@dataclass(frozen=True)
class Scheme:
    """A number format, how far one scale reaches, and who computes with it.

    Weights and activations have it alike: ``value = round(x / scale)``, ``scale = amax / largest``.
    """

    stored: str = ""  # torch's name for the codes' dtype; empty: weights stay as trained
    largest: float = 0.0  # the code that amax is mapped to
    block: int | None = None  # edge of the squares that share a weight scale; None: a scale per row
    scale: str = SCALES[0]  # end of the names of its scales
    simulated: bool = False  # by the embedded engine alone

    @property
    def dtype(self) -> "torch.dtype":
        import torch

        dtype = getattr(torch, self.stored)
        assert isinstance(dtype, torch.dtype)
        return dtype


# Simulated schemes have fewer bits with INT8's storage and products: a coarser grid. No hardware
# computes like that and no checkpoint is exported in them; the embedded engine does, so that a
# small model meets the quantization noise that a large one meets at 8 bits.
SCHEMES: dict[str, Scheme] = {
    "none": Scheme(),
    "int8": Scheme("int8", 127.0),
    "fp8": Scheme("float8_e4m3fn", 448.0),
    "fp8_block": Scheme("float8_e4m3fn", 448.0, block=BLOCK, scale=SCALES[1]),
    "int6": Scheme("int8", 31.0, simulated=True),
    "int5": Scheme("int8", 15.0, simulated=True),
    "int4": Scheme("int8", 7.0, simulated=True),
}

ROLLOUT = tuple(SCHEMES)
"""Values of ``quant.scheme``."""

SERVED = tuple(name for name in ROLLOUT if not SCHEMES[name].simulated)
"""Schemes that SGLang serves, too."""

EXPORTED = tuple(name for name, row in SCHEMES.items() if row.stored and not row.simulated)
"""Formats of quantized checkpoints."""

INTEGER = {name: row.largest for name, row in SCHEMES.items() if row.stored == "int8"}
"""The largest code of each scheme whose products are INT8's."""


def title(name: str) -> str:
    """Return a scheme's name as people write it."""
    return "BF16" if name == "none" else name.upper().replace("_", " ")


def scale_grid(shape: Sequence[int], block: int | None) -> tuple[int, int]:
    """Return how many scales a weight of this shape has, down and across."""
    rows, columns = shape
    if block is None:
        return rows, 1
    return -(-rows // block), -(-columns // block)


def simulation(name: str) -> str:
    """Describe a simulated scheme in a sentence; empty for others."""
    row = SCHEMES[name]
    if not row.simulated:
        return ""
    return (
        f"quant.scheme={name} is simulated: codes from {-row.largest:g} to {row.largest:g} are "
        f"kept and multiplied as INT8 by the embedded engine; no engine computes in "
        f"{name.upper()}, and nothing is smaller or faster for it"
    )
