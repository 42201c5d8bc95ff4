"""What a load takes at least, by the bytes a decode step reads; and what ``qurl plan`` predicts.

A step reads all weights once, and of every running response the keys and values so far. How many
run, and how long they are by then, follows from their lengths alone, if none waits for anything but
its turn.
"""

from collections.abc import Sequence

from qurl_megatron.plan.constants import GPUS, Constants, Gpu
from qurl_megatron.plan.rollout_time import DecodeRank, decode_step, schedule


def least_seconds(
    rank: DecodeRank, lengths: Sequence[int], *, prompt: int, slots: int, bytes_per_s: float
) -> float:
    """Seconds of all decode steps at the memory's rate; prompts and all else take none.

    Args:
        lengths: tokens of each response, in the order in which they begin.
        prompt: tokens of each prompt.
        slots: responses at once.
        bytes_per_s: that one rank of the engine reads.
    """
    read = 0.0
    for steps, running, tokens in schedule(lengths, slots):
        read += steps * (rank.weights + running * (prompt + tokens) * rank.token)
    return read / bytes_per_s


def predicted_seconds(
    rank: DecodeRank,
    lengths: Sequence[int],
    *,
    prompt: int,
    prompts: int,
    slots: int,
    gpu: Gpu,
    constants: Constants,
) -> float:
    """Return the seconds that ``qurl plan`` gives the same responses on one engine of such GPUs."""
    seconds = prompts * prompt * rank.quantized / (gpu.flops[rank.scheme] * constants.prefill)
    for steps, running, tokens in schedule(lengths, slots):
        seconds += steps * sum(decode_step(rank, gpu, constants, running, prompt + tokens).values())
    return constants.rollout_over * seconds


def gpu_named(name: str, scheme: str) -> Gpu | None:
    """The data sheet of a GPU by what its driver calls it; None where there is none, or engines
    have no kernels of that scheme for it."""
    for kind, gpu in GPUS.items():
        words = kind.upper().split("-")
        if all(word in name.upper() for word in words) and scheme in gpu.flops:
            return gpu
    return None
