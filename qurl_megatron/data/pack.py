"""Responses into training tensors, and nothing else: pure and on the CPU.

Shapes: B = rows, S = their length, N = response tokens of the batch that the policy wrote; all
others, of prompts and of an environment's messages, are context and nothing else. A row is one
response, padded on the right; or all of them lie end to end in a single row (packed). Position t
predicts token t+1: a response token's log-prob is read one place before it. The loss's facts about
tokens are flat, [N], in the order of the responses: other tokens have no ratio and no advantage.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from qurl_megatron.algo.segments import owners_of
from qurl_megatron.data.dealing import round_up
from qurl_megatron.data.responses import Responses


@dataclass(frozen=True)
class TokenBatch:
    """One microbatch."""

    input_ids: Tensor  # [B, S] int64
    positions: Tensor  # [B, S] int64: within the response's own sequence
    real: Tensor  # [B, S] bool: a token, not padding
    targets: Tensor  # [B, S] int64: the next token; 0 where there is none
    mask: Tensor  # [B, S] bool: the target is a response token that the policy wrote
    indices: tuple[int, ...]  # which response of the step each one is
    lengths: tuple[int, ...]  # written tokens of each; they add up to N
    owners: Tensor  # [N] int64: which response of the batch a token belongs to
    behaviour: Tensor  # [N] float32: log-probs the engine reported
    weights: Tensor  # [N] float32: share of each token in the batch loss
    starts: tuple[int, ...] | None = None  # packed: where each sequence begins, and S
    # Experts of this rank's tokens in its layers (``actor.routing``); None: routers choose them.
    routes: Tensor | None = None
    # The policies' scores of the batch, [N] float32 each. None before their phase has run, and if
    # the recipe does without; readers come later.
    proximal: Tensor = cast(Tensor, None)
    reference: Tensor = cast(Tensor, None)
    advantages: Tensor = cast(Tensor, None)
    values: Tensor = cast(Tensor, None)  # the critic's, before the update
    returns: Tensor = cast(Tensor, None)
    kept: Tensor = cast(Tensor, None)  # bool: not of a rejected response; None: there is none

    def to(self, device: torch.device) -> "TokenBatch":
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device)
        return replace(self, **moved)


def pad_samples(
    responses: Responses, indices: Sequence[int], token_weights: Sequence[float], *, length: int
) -> TokenBatch:
    """Return a row for each response, padded to the given length.

    Args:
        indices: which responses of the step.
        token_weights: share of each one's tokens in the batch loss.
        length: S; every prompt with its response must fit.
    """
    starts = range(0, (len(indices) + 1) * length, length)
    return _batch(responses, indices, token_weights, starts, rows=len(indices))


def pack_samples(
    responses: Responses,
    indices: Sequence[int],
    token_weights: Sequence[float],
    *,
    sequence_multiple: int = 1,
    multiple: int = 1,
) -> TokenBatch:
    """Return responses end to end in one row.

    Padding belongs to the sequence before it, where causal attention lets nothing see it.

    Args:
        indices, token_weights: as for ``pad_samples``.
        sequence_multiple: multiple that the length of each sequence is rounded up to.
        multiple: S is rounded up to it, a multiple of the other; the last sequence gets it.
    """
    totals = responses.summary.totals
    starts = [0, *accumulate(round_up(totals[i], sequence_multiple) for i in indices)]
    starts[-1] = round_up(starts[-1], multiple)
    batch = _batch(responses, indices, token_weights, starts, rows=1)
    return replace(batch, starts=tuple(starts))


def _batch(
    responses: Responses,
    indices: Sequence[int],
    token_weights: Sequence[float],
    starts: Sequence[int],
    rows: int,
) -> TokenBatch:
    """Return responses at ``starts``, counted over all rows; the last start is the end."""
    ids = torch.zeros(starts[-1], dtype=torch.int64)
    positions = torch.empty(starts[-1], dtype=torch.int64)
    targets = torch.zeros(starts[-1], dtype=torch.int64)
    real, mask = torch.zeros(2, starts[-1], dtype=torch.bool)
    behaviour = [responses.behaviour[:0]]
    for index, start, stop in zip(indices, starts, starts[1:], strict=False):
        tokens, length = responses.tokens_of[index], responses.summary.lengths[index]
        assert length < len(tokens), "a response needs a token before it"
        end = start + len(tokens)
        assert end <= stop, f"sample of {len(tokens)} tokens does not fit into {stop - start}"
        ids[start:end] = tokens
        real[start:end] = True
        positions[start:stop] = torch.arange(stop - start)
        targets[start : end - 1] = tokens[1:]
        mask[end - length - 1 : end - 1] = responses.mask_of[index].bool()
        behaviour.append(responses.behaviour_of[index])
    written = tuple(responses.summary.written[i] for i in indices)
    owners = owners_of(written)
    return TokenBatch(
        input_ids=ids.view(rows, -1),
        positions=positions.view(rows, -1),
        real=real.view(rows, -1),
        targets=targets.view(rows, -1),
        mask=mask.view(rows, -1),
        indices=tuple(indices),
        lengths=written,
        owners=owners,
        behaviour=torch.cat(behaviour),
        weights=torch.tensor(token_weights, dtype=torch.float32)[owners],
    )
