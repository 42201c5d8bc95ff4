"""A step's samples as a few flat arrays: numbers of each response, then the tokens of all.

A prompt's tokens come first, then its response's, then the next one's. Of a response's tokens the
policy wrote all, or in a conversation with an environment some: log-probs and lengths count these
tokens alone.

Shapes: R = responses of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from qurl_megatron.types import Sample


@dataclass(frozen=True, eq=False)
class Summary:
    """The facts that every rank has of every response of a step."""

    prompt_lengths_R: Tensor  # int64
    lengths_R: Tensor  # int64, of the responses alone
    written_R: Tensor  # int64, tokens of these that the policy wrote
    rewards_R: Tensor  # float64
    truncated_R: Tensor  # bool
    prompts_R: Tensor  # int64: which prompt is answered; one number, the same tokens

    @staticmethod
    def empty(count: int) -> "Summary":
        """Return room for ``count`` responses."""
        prompt_lengths, lengths, written, prompts = torch.zeros(4, count, dtype=torch.int64)
        return Summary(
            prompt_lengths,
            lengths,
            written,
            torch.zeros(count, dtype=torch.float64),
            torch.zeros(count, dtype=torch.bool),
            prompts,
        )

    def __len__(self) -> int:
        return len(self.lengths_R)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each response alone."""
        return self.lengths_R.tolist()

    @cached_property
    def written(self) -> list[int]:
        """Tokens of each response that the policy wrote."""
        return self.written_R.tolist()

    @cached_property
    def totals(self) -> list[int]:
        """Tokens of prompt and response."""
        return (self.prompt_lengths_R + self.lengths_R).tolist()


@dataclass(frozen=True, eq=False)
class Responses:
    """The samples of one step, prompt-major, as training sees them."""

    summary: Summary
    tokens: Tensor  # int32
    mask: Tensor  # uint8, one per token of a response, its prompt left out: 1 if written
    behaviour: Tensor  # float32, one per written token of a response
    # Each response's ``Sample.routes``, on the leading rank where they are replayed.
    routes: tuple[np.ndarray, ...] | None = None

    @staticmethod
    def of(samples: Sequence[Sample]) -> "Responses":
        summary = Summary.empty(len(samples))
        prompt_numbers: dict[tuple[int, ...], int] = {}
        tokens, masks, log_probs = [np.empty(0, np.int32)], [np.empty(0, np.uint8)], []
        for row, sample in enumerate(samples):
            prompt_ids = sample.prompt.input_ids
            summary.prompt_lengths_R[row] = len(prompt_ids)
            summary.lengths_R[row] = len(sample.response_ids)
            summary.written_R[row] = sample.written_tokens
            summary.rewards_R[row] = sample.reward
            summary.truncated_R[row] = sample.truncated
            summary.prompts_R[row] = prompt_numbers.setdefault(prompt_ids, len(prompt_numbers))
            tokens += [np.array(prompt_ids, dtype=np.int32), sample.response_ids]
            masks.append(sample.written)
            log_probs.append(sample.behaviour_log_probs[sample.written])
        routes = None
        some_routes = next((s.routes for s in samples if s.routes is not None), None)
        if some_routes is not None:
            routes = tuple(some_routes[:0] if s.routes is None else s.routes for s in samples)
        return Responses(
            summary,
            torch.from_numpy(np.concatenate(tokens)),
            torch.from_numpy(np.concatenate(masks, dtype=np.uint8)),
            torch.from_numpy(np.concatenate([np.empty(0, np.float32), *log_probs])),
            routes,
        )

    @staticmethod
    def empty(summary: Summary) -> "Responses":
        """Return room for the tokens of a summary's responses."""
        return Responses(
            summary,
            torch.empty(sum(summary.totals), dtype=torch.int32),
            torch.empty(sum(summary.lengths), dtype=torch.uint8),
            torch.empty(sum(summary.written), dtype=torch.float32),
        )

    def __len__(self) -> int:
        return len(self.summary)

    @cached_property
    def tokens_of(self) -> tuple[Tensor, ...]:
        """A view for each response: tokens of its prompt, then its own."""
        return self.tokens.split(self.summary.totals)

    @cached_property
    def mask_of(self) -> tuple[Tensor, ...]:
        """A view for each response: 1 for each token that the policy wrote."""
        return self.mask.split(self.summary.lengths)

    @cached_property
    def behaviour_of(self) -> tuple[Tensor, ...]:
        """A view for each response: log-probs of its written tokens."""
        return self.behaviour.split(self.summary.written)
