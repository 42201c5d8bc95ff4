"""The kinds of engine: abilities and needs, a row of facts each.

The package asks for one of these facts, and hardly ever for the kind by its name. A new kind
is a row here, its name in ``rollout.backend``, and a folder with its ``start`` module. Imports
neither torch nor any engine: recipes are checked by these rows.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    name: str
    """Value of ``rollout.backend``."""

    says: str | None
    """``engine`` in its ``/server_info``; None: it says nothing there."""

    start: str
    """Module whose ``launches`` says how engines of this machine are started."""

    serve: str
    """Command by which a person starts one."""

    starts_empty: bool
    """Started by a run, it has no weights before the first version."""

    repeats: bool
    """Computes a response bit for bit alike, whatever shares its batch. So it gets its whole share
    of the prompts at once and queues them by itself, and a run repeats."""

    shares_prefixes: bool
    """Caches prompts for later requests; after an update, the cache must not be used."""

    takes_gpus: bool
    """Splits its layers over ``rollout.engine_tensor`` GPUs, and can lend them to the trainer."""

    arithmetic: Literal["exact", "sglang"]
    """How it rounds a token's activations on a GPU (``quant.activations``)."""

    fuses: bool
    """Has the scales of q, k and v, and of gate and up, in one tensor, as those of one weight."""

    few_bits: bool
    """Simulates codes of fewer than 8 bits."""

    wide_output: bool
    """Can compute logits in FP32 where the model is BF16."""

    quantizes: bool
    """Quantizes while it loads, a run's Megatron checkpoint as well as a Hugging Face folder."""

    exact_pause: str
    """Option among ``rollout.engine_args`` without which the token that overlaps with a pause in
    place comes from other weights than it says; empty: it cannot pause in place."""

    start_timeout_s: float
    """Silence of a log after which one that starts has failed, where the recipe gives none."""

    health_timeout_s: float
    """Silence after which one has hung, where the recipe gives none."""


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
            health_timeout_s=300.0,  # it answers none while it compiles a kernel
        ),
    )
}

UNKNOWN = ENGINE_KINDS["sglang"]
"""Taken for an adopted engine until it answers: the patient one."""


def kind_of(says: object) -> EngineKind:
    """Return the kind of an engine that reports ``says`` of itself; SGLang reports nothing."""
    return next((kind for kind in ENGINE_KINDS.values() if kind.says == says), UNKNOWN)
