"""``qurl rescore``: where the log-probs of one step part, token by token.

Four parties score a token: the engine that sampled it and the actor before the update (both
recorded), then a fresh engine and the actor of the checkpoint that both had. The fresh scores must
confirm the recorded ones; engine and actor may differ by the quantization alone.

Shapes: R = responses of the step; of each a float32 array with an entry per token that the policy
wrote, or None.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qurl_megatron.checkpoints.integrity import refuse_damaged
from qurl_megatron.checkpoints.places import description_of, find_torch_dist
from qurl_megatron.checkpoints.source import open_checkpoint
from qurl_megatron.config import RunConfig
from qurl_megatron.data.tokenizer import Tokenizer
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
    blames = [
        (
            engine,
            "a fresh engine",
            f"the run's engine had other weights than version {version}, or reported wrong "
            "log-probs",
        ),
        (
            actor,
            "the actor",
            f"the trainer scored with other weights than those of step {version}, or other tokens",
        ),
    ]
    differences, confirming = [], []
    for gap, scorer, reason in blames:
        if differing := int((gap.sizes > limit).sum()):
            differences.append(
                f"the record and {scorer} differ by more than {limit:.2g} nats at {differing} of "
                f"{how_many(len(gap.sizes), 'token')}: {reason}"
            )
        elif len(gap.sizes):
            confirming.append(scorer)
    if differences:
        return "; ".join(differences)
    confirmed = " and ".join(confirming) or "nothing"
    sentence = f"the record is confirmed by {confirmed}, to {limit:.2g} nats"
    if len(engine.sizes):
        sentence += (
            f": the rest between engine and actor, up to {largest:.2g} nats, is the quantization"
        )
    return sentence


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
    path = _rollouts(run_dir, step)
    records = read_rollouts(path)[:responses]
    if not records:
        raise ConfigError(f"{path} holds no samples")
    version = step - 1
    checkpoint = _checkpoint(run_dir, version, config)
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
    scheme = config.quant.scheme
    if scheme != "none" and config.quant.rounding != "nearest":
        print(
            f"quant.rounding={config.quant.rounding} published other codes than a fresh engine, "
            "which rounds to nearest: scored by the actor alone"
        )
        return scores
    chosen = [i for i, sample in enumerate(samples) if {v for v, _ in sample.versions} <= {version}]
    if left_out := len(samples) - len(chosen):
        print(
            f"{how_many(left_out, 'response')} with tokens of another version than {version} "
            "(rollout.max_staleness): scored by the actor alone"
        )
    rollout, dtype = config.rollout, config.model.dtype
    try:
        with fresh_engine(checkpoint, rollout, scheme=scheme, dtype=dtype) as client:
            scored = engine_scores(client, [samples[i] for i in chosen], rollout.temperature)
    except EngineError as error:
        raise ConfigError(f"the fresh engine cannot score the samples: {error}") from error
    if long := sum(sample_scores is None for sample_scores in scored):
        print(
            f"{how_many(long, 'response')} with no room left in the engine's context for the token "
            "that scoring generates: scored by the actor alone"
        )
    for index, sample_scores in zip(chosen, scored, strict=True):
        scores[index] = sample_scores
    return scores


def compared(records: Sequence[Recorded], fresh: Scores, actor: Scores) -> list[Gap]:
    """The gaps of record and engine, record and actor, engine and actor, and within the record.

    Without a fresh engine, the one that sampled is compared with the actor: their distance still
    says how much an order of sums does.
    """
    behaviour = [record.sample.behaviour_log_probs[record.sample.written] for record in records]
    proximal = [record.proximal for record in records]
    name, engine = "recorded", behaviour
    if any(scores is not None for scores in fresh):
        name, engine = "fresh engine", list(fresh)
    return [
        Gap.between("behaviour: recorded, fresh engine", behaviour, fresh),
        Gap.between("proximal: recorded, actor", proximal, actor),
        Gap.between(f"quantization: {name}, actor", engine, actor),
        Gap.between("recorded: behaviour, proximal", behaviour, proximal),
    ]


def table(gaps: Sequence[Gap], samples: Sequence[Sample], tokenizer: Tokenizer) -> str:
    """A line per pair; lines of the file and tokens of a response count from 1."""
    rows = [["|difference| in nats", "tokens", "mean", "largest", "at its worst token"]]
    for gap in gaps:
        if not len(gap.sizes):
            rows.append([gap.pair, "0", "", "", "not recorded, or not scored"])
            continue
        response, place = gap.places[gap.worst]
        sample = samples[response]
        position = int(np.flatnonzero(sample.written)[place])
        token = int(sample.response_ids[position])
        text = " ".join(visible(tokenizer.decode([token])).splitlines())
        quoted = f'"{text}"' if text else "(special)"
        first, second = gap.scores[gap.worst]
        worst = f"line {response + 1}, token {position + 1}: {token} {quoted}, "
        worst += f"{first:.4f} and {second:.4f}"
        mean, largest = f"{gap.sizes.mean():.2g}", f"{gap.largest:.2g}"
        rows.append([gap.pair, str(len(gap.sizes)), mean, largest, worst])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for pair, *numbers, worst in rows:
        padded = map(str.rjust, numbers, widths[1:4])
        lines.append("  ".join([pair.ljust(widths[0]), *padded, worst]))
    return "\n".join(lines)


def _rollouts(run_dir: Path, step: int) -> Path:
    path = path_of(run_dir, step)
    if path.is_file():
        return path
    recorded_steps = []
    for file in path.parent.glob("step_*.jsonl"):
        recorded_steps.append(int(file.stem.removeprefix("step_")))
    kept = ""
    if recorded_steps:
        kept = f"; it has those of {_steps(recorded_steps)}"
    raise ConfigError(
        f"{run_dir} has no samples of step {step}{kept} (train.save_rollouts=true keeps them)"
    )


def _checkpoint(run_dir: Path, version: int, config: RunConfig) -> Path:
    """The checkpoint with the weights of a version.

    Raises:
        ConfigError: it is not there, or damaged.
    """
    by_step = {int(path.name.removeprefix("step_")): path for path in checkpoints(run_dir)}
    if version in by_step:
        refuse_damaged(find_torch_dist(by_step[version]) or by_step[version])
        return by_step[version]
    start = Path(config.model.path)
    if version == 0 and start.exists():
        folded = open_checkpoint(start).uaq_scale
        if folded == config.quant.uaq_scale:
            return start
        raise ConfigError(
            f"step 1 was sampled from {start} with quant.uaq_scale={config.quant.uaq_scale:g} "
            "folded in, which no folder holds; name a later step"
        )
    saved_steps = f"it has those of {_steps(by_step)}" if by_step else "it has none"
    raise ConfigError(
        f"step {version + 1} was sampled from the checkpoint of step {version}, which {run_dir} "
        f"does not have ({saved_steps}); checkpoint.every=1 and a large checkpoint.keep keep them"
    )


def _steps(steps: Collection[int]) -> str:
    return "step" + "s" * (len(steps) > 1) + " " + ", ".join(map(str, sorted(steps)))
