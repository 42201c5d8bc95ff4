"""How far more GPUs help: the best layout of each number of machines, doubled and doubled again."""

from collections.abc import Sequence
from dataclasses import dataclass

from qurl_megatron.planning.predict import Planner, Prediction


@dataclass(frozen=True)
class Stop:
    """Where twice the GPUs are not worth it."""

    gpus: int
    saved: float  # share of the step that twice as many take off
    best: Prediction  # at ``gpus``
    doubled: Prediction


def sizes(node: int, up_to: int) -> list[int]:
    """Numbers of GPUs: one machine, and twice as many each time."""
    found = []
    while node <= up_to:
        found.append(node)
        node *= 2
    return found


def best_of(planner: Planner, numbers: Sequence[int]) -> list[Prediction]:
    """The fastest layout of each number of GPUs that any layout fits on."""
    plans = (planner.plan(gpus) for gpus in numbers)
    return [found[0] for found in plans if found]


def stop(curve: Sequence[Prediction], worth: float) -> Stop | None:
    """The first doubling that takes off less than ``worth`` of the step; None: there is none."""
    for best, doubled in zip(curve, curve[1:], strict=False):
        saved = 1 - doubled.step / best.step
        if doubled.choice.gpus == 2 * best.choice.gpus and saved < worth:
            return Stop(best.choice.gpus, saved, best, doubled)
    return None
