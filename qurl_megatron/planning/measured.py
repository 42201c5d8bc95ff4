"""What runs say of the constants: their seconds per phase over those predicted for them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from qurl_megatron.errors import ConfigError
from qurl_megatron.observe.sinks import Record, read_metrics
from qurl_megatron.planning.constants import Constants
from qurl_megatron.planning.predict import Prediction

SCORE, TRAIN, PUBLISH = "time/score", "time/train", "time/publish"
SPEED, LENGTH = "throughput/rollout_tokens_per_s", "response/length"
NEEDED = (SCORE, TRAIN, PUBLISH, SPEED, LENGTH)


@dataclass(frozen=True)
class Measured:
    """Medians over the steps of a run, in seconds, and the mean length of its responses."""

    rollout: float
    score: float
    train: float
    publish: float
    length: float


def read_run(run_dir: Path, responses: int) -> Measured:
    """Its usual step.

    Args:
        responses: of a step.

    Raises:
        ConfigError: the run has no metrics, or not those of a step.
    """
    records = [r for r in read_metrics(run_dir / "metrics.jsonl") if set(NEEDED) <= set(r.metrics)]
    if not records:
        raise ConfigError(
            f"--measured {run_dir}: metrics.jsonl has no step with {', '.join(NEEDED)}; name the "
            "folder of a run that has trained"
        )
    steps = records[1:] or records  # the first one compiles and allocates
    # Ahead of training, time/rollout is the wait alone; the speed counts the whole rollout.
    return Measured(
        rollout=median(responses * r.metrics[LENGTH] / r.metrics[SPEED] for r in steps),
        score=_median(steps, SCORE),
        train=_median(steps, TRAIN),
        publish=_median(steps, PUBLISH),
        length=_median(steps, LENGTH),
    )


def _median(records: list[Record], name: str) -> float:
    return median(record.metrics[name] for record in records)


def corrected(constants: Constants, predicted: Prediction, run: Measured) -> Constants:
    """Constants with which the run's own layout takes what it took.

    A run tells by how much a phase is off, not which of its parts is: so each phase gets a factor.

    Args:
        predicted: with ``constants``, the layout of the run and the length of its responses.
    """
    return replace(
        constants,
        rollout_over=constants.rollout_over * run.rollout / predicted.rollout.seconds,
        training_over=constants.training_over
        * (run.score + run.train)
        / predicted.training.seconds,
        publish_over=constants.publish_over * run.publish / predicted.publish,
    )


def fitted(constants: Constants, runs: Sequence[tuple[Prediction, Measured]]) -> Constants:
    """Constants that several runs imply: of each phase's factors the median, so that one run with a
    slow phase does not move it.

    Args:
        runs: each beside its prediction with ``constants``.
    """
    each = [corrected(constants, predicted, run) for predicted, run in runs]
    factors = ("rollout_over", "training_over", "publish_over")
    return replace(constants, **{name: median(getattr(c, name) for c in each) for name in factors})
