"""Decode speed of the embedded engine: tokens per second by number format and batch size.

The model is random, the prompts are short, and only decode steps count: prefill is over before the
clock starts. All schemes of a batch size take turns. The limit is the larger of two times of a
step: that of reading the weights and the keys and values once, at the rate at which this machine
reads, and that of its products at the rate of its fastest ones. The prediction is that of
``qurl plan``, before the first repeat, from the same rates and the shares of them that it expects
of an engine. With
``--transformers`` the float formats take turns with transformers' ``generate``, too.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from qurl_megatron.bench.peer import checkout, peer
from qurl_megatron.bench.random_model import config_of
from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.repeats import Repeats, interleaved, progress
from qurl_megatron.engines.embedded import native
from qurl_megatron.engines.embedded.cache import ROUND, bytes_per_token
from qurl_megatron.engines.embedded.decoder import DTYPES, Decoder
from qurl_megatron.engines.embedded.engine import Engine, Sequence
from qurl_megatron.errors import ConfigError
from qurl_megatron.planning.constants import Constants, constants_of
from qurl_megatron.planning.machine import of_limits
from qurl_megatron.planning.machine_limits import limits
from qurl_megatron.planning.rollout_time import COMPUTE, decode_rank, decode_step, engine_rank
from qurl_megatron.tensors.arch import Arch, read_arch

PEER = "transformers "
DTYPE = {"bf16": "bfloat16", "fp32": "float32"}
PROMPT = 32
WARM_UP = 1  # spans of steps: caches and the allocator

ALL_OF_IT = Constants(
    attention=1.0, decode_gemm=1.0, decode_hbm=1.0, decode_layer=0.0, decode_step=0.0
)
"""What software attains where nothing is lost."""


def run(options: argparse.Namespace) -> list[Case]:
    if options.transformers:
        checkout("benchmarks/peers/through_transformers.py", ", or leave out --transformers")
    if options.threads:
        torch.set_num_threads(options.threads)
    config = config_of(options.model)
    arch = read_arch(config)
    device = torch.device(options.device)
    found = []
    decoders = {scheme: random_decoder(arch, scheme, device) for scheme in options.schemes}
    refusals = {scheme: native.refusal(decoder) for scheme, decoder in decoders.items()}
    context = PROMPT + _new_tokens(options.steps, options.repeats) / 2  # mean over all repeats
    foretold = {
        (scheme, batch): bounds(
            arch, scheme, batch, context, options.device, one_call=not refusals[scheme]
        )
        for scheme in options.schemes
        for batch in options.batch
    }
    for batch in options.batch:
        own_spans = {
            scheme: DecodeSpan(decoder, batch, options.steps, options.repeats)
            for scheme, decoder in decoders.items()
        }
        spans: dict[str, Callable[[], None]] = {**own_spans}
        if options.transformers:
            spans |= {
                PEER + scheme: _generating(config, scheme, device, batch, options.steps)
                for scheme in options.schemes
                if scheme in DTYPE
            }
        measured = interleaved(spans, repeats=options.repeats, warm_up=WARM_UP)
        for name, mine in measured.items():
            own = foretold[name.removeprefix(PEER), batch]
            case = _case(name, mine, own, batch, context, options)
            if name in decoders:
                case.notes["decode step"] = own_spans[name].engine.decode_step
            progress(f"{case.name}: {case.figures[0].median:.0f} tokens/s")
            found.append(case)
    return found


def _case(
    name: str,
    mine: Repeats[None],
    foretold: tuple[float, str, float],
    batch: int,
    context: float,
    options: argparse.Namespace,
) -> Case:
    """What a candidate reached at one batch size.

    Args:
        foretold: the ``bounds`` of its scheme.
        context: tokens of a response, on average.
    """
    scheme = name.removeprefix(PEER)
    limit, limit_of, predicted = foretold
    figure = Figure(
        name="decode",
        unit="tokens/s",
        better="higher",
        repeats=[batch * options.steps / seconds for seconds in mine.seconds],
        limit=limit,
        limit_of=limit_of,
        predicted=predicted if name == scheme else None,
    )
    keys = {
        "model": options.model,
        "scheme": scheme,
        "batch": batch,
        "steps": options.steps,
        "threads": torch.get_num_threads(),
        "device": options.device,
        "context": context,
    }
    if name != scheme:
        keys["peer"] = PEER.strip()
    return Case(
        name=f"{name}, batch {batch}",
        keys=keys,
        figures=[figure],
        yardsticks=mine.yardsticks,
        reasons=mine.reasons,
    )


def _new_tokens(steps: int, repeats: int) -> int:
    return steps * (repeats + WARM_UP) + 1


def _prompts(batch: int, vocab: int) -> list[list[int]]:
    return [[(7 * i + j) % vocab for j in range(PROMPT)] for i in range(batch)]


def _generating(
    config: dict[str, Any], scheme: str, device: torch.device, batch: int, steps: int
) -> Callable[[], None]:
    """The same prompts and lengths by transformers."""
    prompts = _prompts(batch, config["vocab_size"])
    return peer("through_transformers").Generating(
        config, DTYPES[DTYPE[scheme]], device, prompts, steps
    )


class DecodeSpan:
    """Calls decode some steps each, of the same responses, which grow meanwhile."""

    def __init__(self, decoder: Decoder, batch: int, steps: int, repeats: int) -> None:
        new = _new_tokens(steps, repeats)
        # All rows from first to last: what waits for room would decode when others have ended.
        tokens = batch * (PROMPT + new + ROUND)
        cache_gb = tokens * bytes_per_token(decoder.arch, decoder.dtype) / 2**30
        self.engine = Engine(decoder, cache_gb, max_rows=batch)
        self._batch, self._steps = batch, steps
        prompts = enumerate(_prompts(batch, decoder.arch.vocab))
        self.engine.add([Sequence(str(i), prompt, new, seed=i) for i, prompt in prompts])
        while self.engine.waiting:
            self.engine.step()

    def __call__(self) -> None:
        """
        Raises:
            ConfigError: a response has ended already, so that steps give fewer tokens.
        """
        left = len(self.engine.running)
        if left != self._batch:
            raise ConfigError(
                f"bench decode: only {left} of the {self._batch} responses of --batch "
                f"{self._batch} are left: the random model's logits are not finite; take another "
                "--model, or leave its scheme out of --schemes"
            )
        for _ in range(self._steps):
            self.engine.step()


def bounds(
    arch: Arch, scheme: str, batch: int, context: float, device: str, *, one_call: bool
) -> tuple[float, str, float]:
    """Tokens/s at most, what sets this limit, and tokens/s that ``qurl plan``'s formula expects.

    Args:
        one_call: the step is a native one.
    """
    wide = scheme if scheme in DTYPE else ("fp32" if device == "cpu" else "bf16")
    kind = "none" if scheme in DTYPE else scheme
    machine = of_limits(limits(device), wide)
    if device == "cpu":
        native_for = frozenset({kind} if one_call else ())
        machine = replace(machine, cores=torch.get_num_threads(), native=native_for)
    itemsize = 4 if wide == "fp32" else 2
    least = decode_step(decode_rank(arch, kind, 1, itemsize), machine, ALL_OF_IT, batch, context)
    rank = engine_rank(arch, kind, 1, itemsize, machine)
    expected = decode_step(rank, machine, constants_of(machine, kind), batch, context)
    units = scheme == "int8" or f"{scheme}_gflop_s" in limits(device)
    products = f"{(scheme if units else wide).upper()} products"
    return (
        batch / sum(least.values()),
        products if least[COMPUTE] else "bytes read",
        batch / sum(expected.values()),
    )


@torch.inference_mode()
def random_decoder(arch: Arch, scheme: str, device: torch.device) -> Decoder:
    """A decoder whose values do not matter, but are small enough to stay finite."""
    torch.manual_seed(0)
    kind = "none" if scheme in DTYPE else scheme
    beside = "float32" if device.type == "cpu" else "bfloat16"  # quantized products
    decoder = Decoder(arch, kind, DTYPES[DTYPE.get(scheme, beside)], device)
    for name, slot in decoder.slots.items():
        if slot.dtypes == (torch.int8,):
            slot.target.random_(-127, 128)
        elif name.endswith("_scale"):
            slot.target.fill_(1e-4)
        elif name.endswith("norm.weight"):
            slot.target.fill_(1.0)
        else:
            slot.target.copy_(torch.randn(slot.target.shape, device=device) * 0.02)
    decoder.pack()
    return decoder
