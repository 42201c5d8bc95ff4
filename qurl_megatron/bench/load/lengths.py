"""How long responses are: long-tailed like those of a policy that reasons, or a run's own.

The long tail is a log-normal's, cut off at the longest: length = exp(mu + sigma z). n responses
have the n middle quantiles, so that the longest ones do not depend on a draw, and mu is solved for
the mean of the lengths themselves, cut and rounded: what is called a mean of 64 is one. The seed
only decides their order.
"""

import json
import statistics
from pathlib import Path

import numpy as np

from qurl_megatron.errors import ConfigError, reading


def long_tailed(count: int, *, mean: float, sigma: float, longest: int, seed: int) -> list[int]:
    """Tokens of ``count`` responses, in an order that ``seed`` decides.

    Args:
        mean: of the lengths returned, as near as whole tokens allow.
        sigma: standard deviation of the logarithm; 0 makes all alike, 1 gives the longest
            hundredth 9 % of all tokens, or 4 % where a mean of 64 is cut off at 256.
        longest: no response has more.

    Raises:
        ConfigError: there is no such distribution.
    """
    if count < 1 or sigma < 0 or not 1 <= mean <= longest:
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
    found = min((lengths(low), lengths(high)), key=lambda x: abs(x.mean() - mean))
    return np.random.default_rng(seed).permutation(found).tolist()


def recorded(source: Path, count: int, *, seed: int) -> list[int]:
    """Tokens of ``count`` responses of a run, drawn without putting back until all were drawn.

    Args:
        source: a run's folder, or one of ``qurl eval --out``, or one of their files of JSON lines.

    Raises:
        ConfigError: there are no lengths.
    """
    files = _newest(source) if source.is_dir() else [source]
    try:
        found = [length for file in files for length in _lengths(file)]
    except FileNotFoundError:
        raise ConfigError(f"--lengths {source} does not exist; give the folder of a run") from None
    if not found:
        raise ConfigError(
            f"--lengths {source} records no response's length: train with train.save_rollouts=true "
            f"or run `qurl eval --run {source}`, either of which keeps them"
        )
    generator = np.random.default_rng(seed)
    rounds = -(-count // len(found))
    return np.concatenate([generator.permutation(found) for _ in range(rounds)])[:count].tolist()


def _newest(folder: Path) -> list[Path]:
    """The responses of the last training step, or else of the last evaluation."""
    if steps := sorted(folder.glob("rollouts/step_*.jsonl")):
        return steps[-1:]
    files = sorted(folder.rglob("*.samples.jsonl"))
    latest = max((file.parent for file in files), default=None)
    return [file for file in files if file.parent == latest]


def _lengths(file: Path) -> list[int]:
    """Of the lines that are responses."""
    with reading(file):
        lines = file.read_bytes().splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            raise ConfigError(f"{file} line {number} is not JSON; delete the line") from None
        # Of a training step, or of an evaluation; the first line of the latter has no response.
        # What an environment wrote of a response, no engine generates.
        ids = record.get("response_ids")
        written = [1] * len(ids or ())
        length = record.get("tokens") if ids is None else sum(record.get("loss_mask", written))
        if length:
            found.append(length)
    return found
