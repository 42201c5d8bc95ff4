"""A step's samples as a few flat arrays, whole or one data-parallel rank's share of them.

Of every response there are the few numbers that baselines, weights and penalties are made of; of
those that are held also the tokens. A held response lies in one piece: its prompt's tokens, then
its own, then those of the next.

Shapes: R = responses of the step; H = those held here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from qurl_megatron.data.trees import Tree, tree_of
from qurl_megatron.types import Sample


@dataclass(frozen=True, eq=False)
class Summary:
    """What every rank knows of every response of a step."""

    prompt_lengths_R: Tensor  # int64
    lengths_R: Tensor  # int64, of the responses alone
    rewards_R: Tensor  # float64
    truncated_R: Tensor  # bool
    prompts_R: Tensor  # int64: which prompt is answered; one number, the same tokens

    @staticmethod
    def empty(count: int) -> "Summary":
        """Room for so many responses."""
        prompt_lengths, lengths, prompts = torch.zeros(3, count, dtype=torch.int64)
        return Summary(
            prompt_lengths,
            lengths,
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
    def prompt_lengths(self) -> list[int]:
        return self.prompt_lengths_R.tolist()

    @cached_property
    def prompts(self) -> list[int]:
        return self.prompts_R.tolist()

    @cached_property
    def totals(self) -> list[int]:
        """Tokens of prompt and response."""
        return (self.prompt_lengths_R + self.lengths_R).tolist()

    def tree(self, family: Sequence[int], start: int = 0) -> Tree:
        """How responses to one prompt lie in a row that has the prompt once."""
        return tree_of(self.prompt_lengths[family[0]], [self.lengths[i] for i in family], start)


@dataclass(frozen=True, eq=False)
class Responses:
    """The samples of one step, prompt-major, as training sees them."""

    summary: Summary
    held: tuple[int, ...]  # H of the R responses, in the order in which their tokens lie here
    tokens: Tensor  # int32
    behaviour: Tensor  # float32, one per token of a held response, its prompt left out

    @staticmethod
    def of(samples: Sequence[Sample]) -> "Responses":
        """All of them, all held."""
        prompts = {id(prompt): prompt for prompt in (sample.prompt for sample in samples)}
        arrays = {key: np.array(p.input_ids, dtype=np.int32) for key, p in prompts.items()}
        numbers: dict[tuple[int, ...], int] = {}
        for prompt in prompts.values():
            numbers.setdefault(prompt.input_ids, len(numbers))
        pieces = [part for s in samples for part in (arrays[id(s.prompt)], s.response_ids)]
        log_probs = [sample.behaviour_log_probs for sample in samples]
        return Responses(
            Summary(
                torch.tensor([len(s.prompt.input_ids) for s in samples], dtype=torch.int64),
                torch.tensor([len(s.response_ids) for s in samples], dtype=torch.int64),
                torch.tensor([s.reward for s in samples], dtype=torch.float64),
                torch.tensor([s.truncated for s in samples], dtype=torch.bool),
                torch.tensor([numbers[s.prompt.input_ids] for s in samples], dtype=torch.int64),
            ),
            tuple(range(len(samples))),
            torch.from_numpy(np.concatenate([np.empty(0, np.int32), *pieces])),
            torch.from_numpy(np.concatenate([np.empty(0, np.float32), *log_probs])),
        )

    @staticmethod
    def empty(summary: Summary, held: Sequence[int]) -> "Responses":
        """Room for the tokens of ``held``."""
        return Responses(
            summary,
            tuple(held),
            torch.empty(sum(summary.totals[i] for i in held), dtype=torch.int32),
            torch.empty(sum(summary.lengths[i] for i in held), dtype=torch.float32),
        )

    def __len__(self) -> int:
        return len(self.summary)

    def part(self, indices: Sequence[int]) -> "Responses":
        """The same step, holding these responses alone, in this order."""
        tokens = [self.tokens[:0], *(self.tokens_of(i) for i in indices)]
        behaviour = [self.behaviour[:0], *(self.behaviour_of(i) for i in indices)]
        return Responses(self.summary, tuple(indices), torch.cat(tokens), torch.cat(behaviour))

    def tokens_of(self, index: int) -> Tensor:
        """Prompt and response, a view; ``index`` counts the responses of the step."""
        start, _ = self._places[index]
        return self.tokens[start : start + self.summary.totals[index]]

    def behaviour_of(self, index: int) -> Tensor:
        """Log-probs of the response, a view."""
        _, start = self._places[index]
        return self.behaviour[start : start + self.summary.lengths[index]]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """Where the tokens and the log-probs of each held response begin."""
        tokens = accumulate((self.summary.totals[i] for i in self.held), initial=0)
        behaviour = accumulate((self.summary.lengths[i] for i in self.held), initial=0)
        return {i: place for i, *place in zip(self.held, tokens, behaviour, strict=False)}
