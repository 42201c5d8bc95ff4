"""What is asked of an engine, and when.

A prompt has ``samples`` responses, as in a group of GRPO, each a request of its own with its own
length. Prompts are random ids behind a serial number, in which each prompt of a benchmark differs
from all others: whatever an engine has cached of an earlier repeat, it is not this prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from qurl_megatron.errors import ConfigError

PROMPTS = 1_000_000  # that one benchmark can tell apart


@dataclass(frozen=True)
class Ask:
    """One request."""

    group: int
    sample: int  # of the group
    prompt: tuple[int, ...]
    tokens: int  # the response has, neither more nor fewer
    due: float | None = None  # seconds after the load began; None: as soon as there is room


@dataclass(frozen=True)
class Clients:
    """How many requests are under way, or how often one arrives; neither: all come at once."""

    at_once: int | None = None
    rate: float | None = None  # arrivals per second, at random (Poisson)

    @property
    def text(self) -> str:
        """As ``read`` takes it."""
        if self.at_once is not None:
            return f"concurrency:{self.at_once}"
        return "closed" if self.rate is None else f"poisson:{self.rate:g}"

    @staticmethod
    def read(text: str) -> "Clients":
        """Of ``closed``, ``concurrency:8`` or ``poisson:4``.

        Raises:
            ConfigError: it is none of them.
        """
        kind, _, number = text.partition(":")
        try:
            if kind == "concurrency" and int(number) > 0:
                return Clients(at_once=int(number))
            if kind == "poisson" and 0 < float(number) < float("inf"):
                return Clients(rate=float(number))
        except ValueError:
            pass
        if text == "closed":
            return Clients()
        raise ConfigError(f"--clients must be closed, concurrency:N or poisson:RATE, got {text!r}")


def groups(
    lengths: Sequence[int],
    *,
    samples: int,
    prompt: int,
    ids: Sequence[int],
    first: int,
    seed: int,
) -> list[Ask]:
    """Requests in the order of their groups.

    Args:
        lengths: tokens of each response; a multiple of ``samples``.
        samples: responses per prompt.
        prompt: tokens of each prompt.
        ids: of which prompts are made.
        first: serial number of the first prompt; those before it belong to other repeats.

    Raises:
        ConfigError: so short prompts cannot all differ.
    """
    count = len(lengths) // samples
    generator = np.random.default_rng((seed, first))
    body = generator.integers(0, len(ids), (count, prompt))
    digits = serial_digits(len(ids))
    if digits > prompt:
        raise ConfigError(
            f"--prompt {prompt} is too short: of {len(ids)} tokens, prompts that no "
            f"cache has seen have {digits} or more"
        )
    numbers = first + np.arange(count)
    for place in range(digits):  # the fastest first: neighbours have no token in common
        body[:, place] = numbers // len(ids) ** place % len(ids)
    prompts = [tuple(ids[index] for index in row) for row in body.tolist()]
    return [
        Ask(index // samples, index % samples, prompts[index // samples], length)
        for index, length in enumerate(lengths)
    ]


def serial_digits(ids: int) -> int:
    """Leading ids that are a prompt's serial number, of so many to choose from."""
    digits = 1
    while ids**digits < PROMPTS:
        digits += 1
    return digits


def arriving(asks: Sequence[Ask], rate: float, seed: int) -> list[Ask]:
    """The same, each due at its moment of a Poisson process of ``rate`` per second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(asks))
    return [replace(a, due=t) for a, t in zip(asks, gaps.cumsum().tolist(), strict=True)]
