"""Decode speed of the embedded engine: tokens per second by number format and batch size.

The model is random, the prompts are short, and only decode steps count: prefill is over before the
clock starts. All schemes of a batch size take turns. The limit is the larger of two times of a
step: that of reading the weights and the keys and values once, at the rate at which this machine
reads, and that of its products at the rate of its fastest ones. The prediction is that of
``qurl plan``, before the first repeat, from the same rates and the shares of them that it expects
of an engine.
"""

import argparse
from dataclasses import replace

import torch

from qurl_megatron.bench.random_model import config_of
from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.repeats import interleaved, progress
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

DTYPE = {"bf16": "bfloat16", "fp32": "float32"}
PROMPT = 32
WARM_UP = 1  # spans of steps: caches and the allocator

ALL_OF_IT = Constants(
    attention=1.0, decode_gemm=1.0, decode_hbm=1.0, decode_layer=0.0, decode_step=0.0
)
"""What software attains where nothing is lost."""


def run(options: argparse.Namespace) -> list[Case]:
    """A case per scheme and batch size."""
    if options.threads:
        torch.set_num_threads(options.threads)
    arch = read_arch(config_of(options.model))
    device = torch.device(options.device)
    decoders = {scheme: random_decoder(arch, scheme, device) for scheme in options.schemes}
    context = PROMPT + _new_tokens(options.steps, options.repeats) / 2  # mean over all repeats
    foretold = {
        (scheme, batch): bounds(
            arch, scheme, batch, context, options.device, one_call=not native.refusal(decoder)
        )
        for scheme, decoder in decoders.items()
        for batch in options.batch
    }
    cases = []
    for batch in options.batch:
        spans = {
            scheme: DecodeSpan(decoder, batch, options.steps, options.repeats)
            for scheme, decoder in decoders.items()
        }
        measured = interleaved(spans, repeats=options.repeats, warm_up=WARM_UP)
        for scheme, repeats in measured.items():
            limit, limit_of, predicted = foretold[scheme, batch]
            figure = Figure(
                name="decode",
                unit="tokens/s",
                better="higher",
                repeats=[batch * options.steps / seconds for seconds in repeats.seconds],
                limit=limit,
                limit_of=limit_of,
                predicted=predicted,
            )
            case = Case(
                name=f"{scheme}, batch {batch}",
                keys={
                    "model": options.model,
                    "scheme": scheme,
                    "batch": batch,
                    "steps": options.steps,
                    "threads": torch.get_num_threads(),
                    "device": options.device,
                    "context": context,
                },
                figures=[figure],
                yardsticks=repeats.yardsticks,
                reasons=repeats.reasons,
                notes={"decode step": spans[scheme].engine.decode_step},
            )
            progress(f"{case.name}: {figure.median:.0f} tokens/s")
            cases.append(case)
    return cases


def _new_tokens(steps: int, repeats: int) -> int:
    return steps * (repeats + WARM_UP) + 1


def _prompts(batch: int, vocab: int) -> list[list[int]]:
    return [[(7 * i + j) % vocab for j in range(PROMPT)] for i in range(batch)]


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
