"""Choice of a step's responses that are kept for people to read, and their advantages.

Every rank knows rewards and prompts of the whole step, so all choose the same ones; the advantages
are known where the responses were scored.
"""

from collections.abc import Collection, Sequence

from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.data.responses import Summary
from qurl_megatron.observe.samples import telling


def kept_of(summary: Summary, count: int) -> list[int]:
    """Return the indices of the responses that are kept, the same on every rank."""
    return telling(summary.rewards_R.tolist(), summary.prompts, count)


def advantages_of(batches: Sequence[TokenBatch], kept: Collection[int]) -> dict[int, float]:
    """Return the mean advantage of each kept response that lies on this rank and has tokens."""
    return {
        index: part.double().mean().item()
        for batch in batches
        for index, part in zip(batch.indices, batch.advantages.split(batch.lengths), strict=True)
        if index in kept and len(part)
    }
