"""What each response token is worth, once policies, reference and critic have scored the batch.

Every rank holds all samples of the step, but the scores of its own microbatches only: what needs a
whole group of responses, or the whole batch, is summed over the data-parallel ranks.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from qurl_megatron.algo import group_advantages
from qurl_megatron.config import RunConfig
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.runtime.megatron import Ranks
from qurl_megatron.types import Sample


def attach_advantages(
    ranks: Ranks, batches: Sequence[TokenBatch], samples: Sequence[Sample], config: RunConfig
) -> list[TokenBatch]:
    """The same microbatches with advantages, [N].

    Args:
        batches: this rank's microbatches of the step, scored.
        samples: all samples of the step, prompt-major.
    """
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float32)
    groups = rewards.view(-1, config.rollout.samples_per_prompt)
    worth = group_advantages(groups, config.algo.advantage).flatten().to(ranks.device)
    return [
        replace(batch, advantages=worth[list(batch.indices)][batch.owners]) for batch in batches
    ]
