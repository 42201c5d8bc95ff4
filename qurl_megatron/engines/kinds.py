"""The kinds of engine: a row of abilities and needs for each.

The package asks for these facts, and hardly ever for a kind by name. A new kind is a row here, its
name in ``rollout.backend``, and a folder with its ``start`` module. This module imports neither
torch nor any engine, since recipes are checked against its rows.
"""

from dataclasses import dataclass
from typing import Literal

LOADER = "qurl_megatron.engines.sglang.loader.load"
"""``load_format`` of our updates: the function that SGLang imports and calls with each message."""


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    name: str
    """Value of ``rollout.backend``."""

    says: str | None
    """``engine`` in its ``/server_info``; None: the field is missing."""

    start: str
    """Module whose ``launches`` returns how to start this machine's engines."""

    serve: str
    """Command with which a person starts one."""

    starts_empty: bool
    """An engine that a run starts has no weights before the first version."""

    repeats: bool
    """Computes the same bits for a request whenever it is asked. So it gets its whole share of the
    prompts in one request and queues them by itself, and a run repeats."""

    shares_prefixes: bool
    """Caches prompts for later requests; an update makes that cache invalid."""

    takes_gpus: bool
    """Splits its layers over ``rollout.engine_tensor`` GPUs, and can lend them to the trainer."""

    arithmetic: Literal["exact", "sglang"]
    """How it rounds a token's activations on a GPU (``quant.activations``)."""

    fuses: bool
    """Keeps the scales of q, k and v, and of gate and up, as those of one weight."""

    few_bits: bool
    """Simulates codes of fewer than 8 bits."""

    wide_output: bool
    """Can compute logits in FP32 where the model is BF16."""

    quantizes: bool
    """Quantizes while it loads, from a Megatron checkpoint or a Hugging Face folder."""

    exact_pause: str
    """Option among ``rollout.engine_args`` without which the token that overlaps with a pause in
    place names the wrong weights; empty: it cannot pause in place."""

    start_timeout_s: float
    """Default of ``rollout.start_timeout_s``: silence of the log after which a start has failed."""

    health_timeout_s: float
    """Default of ``rollout.health_timeout_s``: silence after which an engine counts as hung."""


ENGINE_KINDS = {
    kind.name: kind
    for kind in (
        EngineKind(
            name="embedded",
            says="qurl-embedded",
            start="qurl_megatron.engines.embedded",
            serve="qurl serve",
            starts_empty=False,
            repeats=True,
            shares_prefixes=False,
            takes_gpus=False,
            arithmetic="exact",
            fuses=False,
            few_bits=True,
            wide_output=False,
            quantizes=True,
            exact_pause="",
            start_timeout_s=300.0,
            health_timeout_s=60.0,
        ),
        EngineKind(
            name="sglang",
            says=None,
            start="qurl_megatron.engines.sglang.starting_sglang",
            serve="python -P -m qurl_megatron.engines.sglang.server",
            starts_empty=True,
            repeats=False,
            shares_prefixes=True,
            takes_gpus=True,
            arithmetic="sglang",
            fuses=True,
            few_bits=False,
            wide_output=True,
            quantizes=False,
            exact_pause="--disable-overlap-schedule",
            start_timeout_s=900.0,  # it may compile kernels and capture graphs first
            health_timeout_s=300.0,  # it answers no check while it compiles a kernel
        ),
    )
}

UNKNOWN = ENGINE_KINDS["sglang"]
"""The kind assumed for an adopted engine until it answers: the one with the longest limits."""


def kind_of(says: object) -> EngineKind:
    """Return the kind of an engine that reports ``says``; SGLang reports None."""
    return next((kind for kind in ENGINE_KINDS.values() if kind.says == says), UNKNOWN)
