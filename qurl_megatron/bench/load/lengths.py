"""How long responses are: long-tailed like those of a policy that reasons, or a run's own.

The long tail is a log-normal's, cut off at the longest: length = exp(mu + sigma z). n responses
have the n middle quantiles, so that the longest ones do not depend on a draw, and mu is solved for
the mean of the lengths themselves, cut and rounded: what is called a mean of 64 is one. The seed
only decides their order.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qurl_megatron.errors import ConfigError, reading

SAMPLES = "*.samples.jsonl"
"""Files that ``qurl eval`` writes: a line per response, with its ``tokens``."""


def long_tailed(count: int, *, mean: float, sigma: float, longest: int, seed: int) -> list[int]:
    """Tokens of ``count`` responses, in an order that ``seed`` decides.

    Args:
        mean: of the lengths returned, as near as whole tokens allow.
        sigma: standard deviation of the logarithm; 0 makes all alike, 1 gives the longest
            hundredth a fifth or so of all tokens.
        longest: no response has more.

    Raises:
        ConfigError: there is no such distribution.
    """
    if count < 1 or sigma < 0 or not 1 <= mean <= longest:
        raise ConfigError(
            f"--mean {mean:g} --sigma {sigma:g} --max {longest} is no distribution of lengths: the "
            "mean must be from 1 to --max, and sigma 0 or more"
        )
    normal = statistics.NormalDist()
    z = sigma * np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])

    def lengths(mu: float) -> np.ndarray:
        return np.clip(np.exp(np.minimum(mu + z, 700)).round(), 1, longest).astype(int)

    low, high = -z.max() - 1, np.log(longest) - z.min() + 1  # all of length 1, all the longest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).mean() < mean else (low, middle)
    found = min((lengths(low), lengths(high)), key=lambda x: abs(x.mean() - mean))
    return np.random.default_rng(seed).permutation(found).tolist()


def recorded(source: Path, count: int, *, seed: int) -> list[int]:
    """Tokens of ``count`` responses of a run, drawn without putting back until all were drawn.

    Args:
        source: a run's folder, or one of ``qurl eval --out``, or a file of JSON lines that have
            ``tokens``.

    Raises:
        ConfigError: there are no lengths.
    """
    files = [source] if source.is_file() else _newest(source)
    found = [length for file in files for length in _tokens(file)]
    if not found:
        raise ConfigError(
            f"--lengths {source} records no response's length: `qurl eval --run {source}` writes "
            f"{SAMPLES} with the tokens of each"
        )
    generator = np.random.default_rng(seed)
    rounds = -(-count // len(found))
    return np.concatenate([generator.permutation(found) for _ in range(rounds)])[:count].tolist()


def _newest(folder: Path) -> list[Path]:
    """The files of one evaluation: of the latest one where a run has several."""
    files = sorted(folder.rglob(SAMPLES))
    latest = max((file.parent for file in files), default=None)
    return [file for file in files if file.parent == latest]


def _tokens(file: Path) -> Sequence[int]:
    with reading(file):
        lines = file.read_bytes().splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            raise ConfigError(f"{file} line {number} is not JSON; delete the line") from None
        tokens = record.get("tokens") if isinstance(record, dict) else None
        if type(tokens) is int and tokens > 0:
            found.append(tokens)
    return found
