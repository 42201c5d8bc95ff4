"""``qurl rescore``: where the log-probs of one step part, token by token.

Four parties score a token: the engine that sampled it and the actor before the update (both
recorded), then a fresh engine and the actor of the checkpoint that both had. The fresh scores must
confirm the recorded ones; engine and actor may differ by the quantization alone.

Shapes: R = responses of the step; of each a float32 array with an entry per token that the policy
wrote, or None.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qurl_megatron.checkpoints.integrity import refuse_damaged
from qurl_megatron.checkpoints.places import description_of, find_torch_dist
from qurl_megatron.config import RunConfig
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.evaluation.results import aligned
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.samples import say, visible
from qurl_megatron.observe.text import how_many
from qurl_megatron.training.fresh_scores import actor_scores, engine_scores, fresh_engine
from qurl_megatron.training.rollout_file import Recorded, path_of, read_rollouts
from qurl_megatron.training.state import RECIPE, checkpoints, recipe_of
from qurl_megatron.types import Sample

Scores = Sequence[np.ndarray | None]

LEAST = 0.01
"""Nats by which two scores of a token by the same weights may always differ: another order of sums
tips a code of an activation here and there."""
TIMES = 2.0
"""The same, in multiples of the largest difference between engine and actor: on a model that
amplifies rounding, an order of sums can do as much as the quantization, but not more."""


@dataclass(frozen=True)
class Gap:
    """How far two scores of the same tokens are apart, in nats."""

    pair: str
    sizes: np.ndarray  # of each token that both have
    places: np.ndarray  # [tokens, 2]: its response, and its place among the written tokens
    scores: np.ndarray  # [tokens, 2]

    @staticmethod
    def between(pair: str, first: Scores, second: Scores) -> "Gap":
        scores, places = [np.empty((0, 2))], [np.empty((0, 2), int)]
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            if a is not None and b is not None:
                scores.append(np.stack([a, b], 1))
                places.append(np.stack([np.full(len(a), i), np.arange(len(a))], 1))
        both = np.concatenate(scores)
        # A score that is not a number is as far off as can be.
        sizes = np.nan_to_num(np.abs(both[:, 0] - both[:, 1]), nan=np.inf)
        return Gap(pair, sizes, np.concatenate(places), both)

    @property
    def largest(self) -> float:
        return float(self.sizes.max(initial=0.0))

    @property
    def worst(self) -> int:
        """Index of the token that is furthest apart."""
        return int(self.sizes.argmax())


def verdict(engine: Gap, actor: Gap, quantization: Gap, version: int) -> str:
    """Say in one sentence which scores part."""
    largest = quantization.largest
    limit = max(LEAST, TIMES * largest if np.isfinite(largest) else 0.0)
    reasons = {
        "a fresh engine": f"the run's engine had other weights than version {version}, or reported "
        "wrong log-probs",
        "the actor": f"the trainer scored with other weights than those of step {version}, or "
        "other tokens",
    }
    differences, confirming = [], []
    for gap, (scorer, reason) in zip((engine, actor), reasons.items(), strict=True):
        if differing := int((gap.sizes > limit).sum()):
            differences.append(
                f"the record and {scorer} differ by more than {limit:.2g} nats at {differing} of "
                f"{how_many(len(gap.sizes), 'token')}: {reason}"
            )
        elif len(gap.sizes):
            confirming.append(scorer)
    if differences:
        return "; ".join(differences)
    return (
        f"the record is confirmed by {' and '.join(confirming) or 'nothing'}, to {limit:.2g} nats; "
        f"engine and actor differ by up to {largest:.2g} nats"
    )


def rescore(run_dir: Path, step: int, *, responses: int | None = None) -> int:
    """Score a step's samples again, and print a table and a verdict.

    Args:
        responses: only the first so many; None: all.

    Returns:
        0, whatever the verdict; else the exit code of a rank that could not score.

    Raises:
        ConfigError: there is no such run, step or checkpoint; an engine could not score.
    """
    if not (run_dir / RECIPE).is_file():
        raise ConfigError(f"{run_dir} is not the folder of a run; name its train.run_dir")
    config = recipe_of(run_dir)
    if responses is not None and responses < 1:
        raise ConfigError(f"--responses must be 1 or more, got {responses}")
    path = path_of(run_dir, step)
    if not path.is_file():
        kept = sorted(file.stem for file in path.parent.glob("step_*.jsonl"))
        raise ConfigError(
            f"{run_dir} has no samples of step {step}, only {', '.join(kept) or 'none'} "
            "(train.save_rollouts=true keeps them)"
        )
    records = read_rollouts(path)[:responses]
    if not records:
        raise ConfigError(f"{path} holds no samples")
    version = step - 1
    by_step = {int(path.name.removeprefix("step_")): path for path in checkpoints(run_dir)}
    if version not in by_step:
        raise ConfigError(
            f"step {step} was sampled from the checkpoint of step {version}, which {run_dir} does "
            f"not have (it has those of steps {sorted(by_step)}); checkpoint.every=1 and a large "
            "checkpoint.keep keep them"
        )
    checkpoint = by_step[version]
    refuse_damaged(find_torch_dist(checkpoint) or checkpoint)
    if config.rollout.temperature != 1 and not config.rollout.kind.tempers_prompts:
        raise ConfigError(
            f"rollout.temperature={config.rollout.temperature:g}: {config.rollout.backend} scores "
            "prompts at temperature 1 alone, so its scores cannot be compared with this run's"
        )
    samples = [record.sample for record in records]
    print(f"scoring {how_many(len(samples), 'response')} again by {checkpoint}", flush=True)
    fresh = _by_engine(checkpoint, samples, config, version)
    actor = actor_scores(config, checkpoint, path, len(samples))
    if isinstance(actor, int):
        return actor
    gaps = compared(records, fresh, actor)
    say(table(gaps, samples, Tokenizer(description_of(checkpoint))))
    engine, proximal, quantization, _ = gaps
    say(verdict(engine, proximal, quantization, version))
    return 0


def _by_engine(
    checkpoint: Path, samples: Sequence[Sample], config: RunConfig, version: int
) -> Scores:
    """Scores of a fresh engine; None where the sample is too long or of other weights than it has.

    Raises:
        ConfigError: it could not start, or not score.
    """
    scores: list[np.ndarray | None] = [None] * len(samples)
    scheme, rollout, dtype = config.quant.scheme, config.rollout, config.model.dtype
    drawn = scheme != "none" and config.quant.rounding != "nearest"
    chosen = []
    for index, sample in enumerate(samples):
        # A fresh engine rounds to nearest: of codes that were drawn it has others.
        if not drawn and {number for number, _ in sample.versions} <= {version}:
            chosen.append(index)
    if chosen:
        try:
            with fresh_engine(checkpoint, rollout, scheme=scheme, dtype=dtype) as client:
                scored = engine_scores(client, [samples[i] for i in chosen], rollout.temperature)
        except EngineError as error:
            raise ConfigError(f"the fresh engine cannot score the samples: {error}") from error
        for index, sample_scores in zip(chosen, scored, strict=True):
            scores[index] = sample_scores
    if missing := sum(sample_scores is None for sample_scores in scores):
        print(
            f"{how_many(missing, 'response')} scored by the actor alone: drawn codes "
            "(quant.rounding), tokens of another version, or no room in the engine's context"
        )
    return scores


def compared(records: Sequence[Recorded], fresh: Scores, actor: Scores) -> list[Gap]:
    """The gaps of record and engine, record and actor, engine and actor, and within the record.

    Without a fresh engine, the one that sampled is compared with the actor: their distance still
    says how much an order of sums does.
    """
    behaviour = [record.sample.behaviour_log_probs[record.sample.written] for record in records]
    proximal = [record.proximal for record in records]
    engine = fresh if any(scores is not None for scores in fresh) else behaviour
    return [
        Gap.between("behaviour: recorded, fresh engine", behaviour, fresh),
        Gap.between("proximal: recorded, actor", proximal, actor),
        Gap.between("quantization: engine, actor", engine, actor),
        Gap.between("recorded: behaviour, proximal", behaviour, proximal),
    ]


def table(gaps: Sequence[Gap], samples: Sequence[Sample], tokenizer: Tokenizer) -> str:
    """A line per pair; lines of the file and tokens of a response count from 1."""
    rows = [["difference in nats", "at its worst token", "tokens", "mean", "largest"]]
    for gap in gaps:
        if not len(gap.sizes):
            rows.append([gap.pair, "not recorded, or not scored", "0", "", ""])
            continue
        response, place = gap.places[gap.worst]
        sample = samples[response]
        position = int(np.flatnonzero(sample.written)[place])
        token = int(sample.response_ids[position])
        text = " ".join(visible(tokenizer.decode([token])).splitlines())
        first, second = gap.scores[gap.worst]
        worst = f'line {response + 1}, token {position + 1}: {token} "{text}", '
        worst += f"{first:.4f} and {second:.4f}"
        numbers = [str(len(gap.sizes)), f"{gap.sizes.mean():.2g}", f"{gap.largest:.2g}"]
        rows.append([gap.pair, worst, *numbers])
    return aligned(rows, left=2)
