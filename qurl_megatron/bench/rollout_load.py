"""The load of a reinforcement-learning step: the requests to an engine, and its answers.

A prompt has ``samples`` responses, as in a group of GRPO, each a request of its own with its own
length. Prompts are random ids behind a serial number, in which each prompt of a benchmark differs
from all others: whatever an engine has cached of an earlier repeat, it is not this prompt.

All times are seconds after the load began, of one monotonic clock.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from qurl_megatron.kit.errors import ConfigError, reading

PROMPTS = 1_000_000  # that one benchmark can tell apart
TOGETHER_S = 1e-4  # events closer than this came in one piece: their distance is this side's own


@dataclass(frozen=True)
class Ask:
    """One request."""

    group: int
    prompt: tuple[int, ...]
    tokens: int  # the response has, neither more nor fewer


@dataclass
class TimedAnswer:
    """One request, as its events come in."""

    ask: Ask
    began: float
    times: list[float] = field(default_factory=list)  # at which tokens came
    counts: list[int] = field(default_factory=list)  # tokens after each of them
    ended: float = 0.0
    failure: str = ""
    ids: list[int] = field(default_factory=list)  # where the protocol gives them
    cached: int | None = None  # prompt tokens that the engine did not compute
    preempted: int = 0  # times that it was taken back, to be computed again
    first_of: dict[str, float] = field(default_factory=dict)  # weights' name -> their first token

    @property
    def tokens(self) -> int:
        return self.counts[-1] if self.counts else 0

    def came(self, count: int, at: float) -> None:
        """Note that the response has ``count`` tokens now."""
        if count <= self.tokens:
            return
        if self.times and at - self.times[-1] < TOGETHER_S:
            self.counts[-1] = count
        else:
            self.times.append(at)
            self.counts.append(count)


@dataclass(frozen=True)
class Publication:
    """One new version of the weights, between two tokens."""

    name: str  # the engine's name of the weights
    began: float
    ended: float  # the engine resumes
    paused_s: float


@dataclass(frozen=True)
class Look:
    """An engine's own report at one moment; None: it does not say."""

    running: int | None = None
    waiting: int | None = None
    occupancy: float | None = None  # share of the key/value cache that is in use
    preemptions: int | None = None  # since it started


@dataclass
class LoadOutcome:
    """All that a load left."""

    answers: list[TimedAnswer] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)
    unpublished: str = ""  # why a publication failed
    looks: list[Look] = field(default_factory=list)
    unseen: str = ""  # why the engine could not be looked at, the first time
    client_cpu_s: float = 0.0


def groups(
    lengths: Sequence[int], *, samples: int, prompt: int, vocab: int, first: int, seed: int
) -> list[Ask]:
    """Return requests in the order of their groups.

    Args:
        lengths: tokens of each response; a multiple of ``samples``.
        samples: responses per prompt.
        prompt: tokens of each prompt.
        vocab: of the model. Engines give meanings of their own to the first id and the last.
        first: serial number of the first prompt; those before it belong to other repeats.

    Raises:
        ConfigError: so short prompts cannot all differ.
    """
    ids = vocab - 2
    digits = serial_digits(vocab)
    if digits > prompt:
        raise ConfigError(
            f"--prompt {prompt} is too short: of {ids} tokens, prompts that no cache has seen have "
            f"{digits} or more"
        )
    count = len(lengths) // samples
    body = np.random.default_rng((seed, first)).integers(0, ids, (count, prompt))
    numbers = first + np.arange(count)
    for place in range(digits):  # the fastest first: neighbours have no token in common
        body[:, place] = numbers // ids**place % ids
    prompts = [tuple(row) for row in (body + 1).tolist()]
    return [
        Ask(index // samples, prompts[index // samples], length)
        for index, length in enumerate(lengths)
    ]


def serial_digits(vocab: int) -> int:
    """Return how many leading ids are a prompt's serial number."""
    digits = 1
    while (vocab - 2) ** digits < PROMPTS:
        digits += 1
    return digits


def long_tailed(count: int, *, mean: float, sigma: float, longest: int, seed: int) -> list[int]:
    """Return the tokens of ``count`` responses, in an order that ``seed`` decides.

    They are the middle quantiles of a log-normal that is cut off at the longest: the longest ones
    do not depend on a draw. The mean is taken over the lengths, cut and rounded.

    Args:
        sigma: standard deviation of the logarithm; 0 makes all alike, 1 gives the longest
            hundredth 9 % of all tokens, or 4 % where a mean of 64 is cut off at 256.
        longest: no response has more.

    Raises:
        ConfigError: there is no such distribution.
    """
    if sigma < 0 or not 1 <= mean <= longest:
        raise ConfigError(
            f"--mean {mean:g} --sigma {sigma:g} --max {longest} is not a distribution of lengths: "
            "the mean must be from 1 to --max, and sigma 0 or more"
        )
    normal = statistics.NormalDist()
    z = sigma * np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])

    def lengths(mu: float) -> np.ndarray:
        return np.clip(np.exp(np.minimum(mu + z, 700)).round(), 1, longest).astype(int)

    low, high = -z.max() - 1, np.log(longest) - z.min() + 1  # all of length 1, all the longest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).mean() < mean else (low, middle)
    nearest = min((lengths(low), lengths(high)), key=lambda x: abs(x.mean() - mean))
    return np.random.default_rng(seed).permutation(nearest).tolist()


def recorded(run_dir: Path, count: int, *, seed: int) -> list[int]:
    """Draw the tokens of ``count`` responses from a run's last step, all of them before any again.

    Raises:
        ConfigError: there are no lengths.
    """
    lengths: list[int] = []
    for file in sorted(run_dir.glob("rollouts/step_*.jsonl"))[-1:]:
        with reading(file):
            lines = file.read_bytes().splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError:
                raise ConfigError(f"{file} line {number} is not JSON; delete the line") from None
            # No engine generates an environment's part of a response.
            lengths.append(sum(record.get("loss_mask", [1] * len(record["response_ids"]))))
    lengths = [length for length in lengths if length]
    if not lengths:
        raise ConfigError(
            f"--lengths {run_dir} has no rollouts/step_*.jsonl with responses; give the folder of "
            "a run with train.save_rollouts=true"
        )
    generator = np.random.default_rng(seed)
    rounds = -(-count // len(lengths))
    return np.concatenate([generator.permutation(lengths) for _ in range(rounds)])[:count].tolist()
