"""Samples into padded training tensors, and nothing else: pure and on the CPU.

Shapes: B = responses, S = padded length, N = response tokens of the batch. Position t predicts
token t+1: a response token's log-prob is read one place before it. What the loss knows of response
tokens is kept flat, [N], in the order of the responses: a prompt has no ratio and no advantage.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from qurl_megatron.types import Sample


@dataclass(frozen=True)
class TokenBatch:
    """One microbatch, padded on the right."""

    input_ids: Tensor  # [B, S] int64
    positions: Tensor  # [B, S] int64
    targets: Tensor  # [B, S] int64: the next token; 0 where there is none
    mask: Tensor  # [B, S] bool: the target is a response token
    indices: tuple[int, ...]  # which response of the step each one is
    lengths: tuple[int, ...]  # response tokens of each; they add up to N
    owners: Tensor  # [N] int64: which response of the batch a token belongs to
    behaviour: Tensor  # [N] float32: log-probs the engine reported
    weights: Tensor  # [N] float32: share of each token in the batch loss
    # What is known once the policies have scored the batch, [N] float32 each:
    proximal: Tensor | None = None
    reference: Tensor | None = None
    advantages: Tensor | None = None
    values: Tensor | None = None  # the critic's, before the update
    returns: Tensor | None = None
    kept: Tensor | None = None  # bool: not of a rejected response; None where none is rejected

    def to(self, device: torch.device) -> "TokenBatch":
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in moved.items() if isinstance(v, Tensor)})


def pad_samples(
    samples: Sequence[Sample],
    token_weights: Sequence[float],
    *,
    length: int,
    pad_id: int = 0,
    indices: Sequence[int] | None = None,
) -> TokenBatch:
    """One batch of the given padded length.

    Args:
        token_weights: share of each sample's tokens in the batch loss.
        length: S; every sample's prompt and response must fit.
        indices: which response of the step each sample is; None numbers them from 0.
    """
    shape = (len(samples), length)
    ids = torch.full(shape, pad_id)
    targets = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, sample in enumerate(samples):
        assert sample.prompt.input_ids, "a response needs a token before it"
        tokens = torch.tensor(sample.prompt.input_ids + sample.response_ids)
        assert len(tokens) <= length, f"sample of {len(tokens)} tokens does not fit into {length}"
        ids[row, : len(tokens)] = tokens
        targets[row, : len(tokens) - 1] = tokens[1:]
        mask[row, len(sample.prompt.input_ids) - 1 : len(tokens) - 1] = True
    lengths = tuple(len(sample.response_ids) for sample in samples)
    repeats = torch.tensor(lengths, dtype=torch.int64)
    return TokenBatch(
        input_ids=ids,
        positions=torch.arange(length).expand(shape).contiguous(),
        targets=targets,
        mask=mask,
        indices=tuple(range(len(samples))) if indices is None else tuple(indices),
        lengths=lengths,
        owners=torch.arange(len(samples)).repeat_interleave(repeats),
        behaviour=torch.tensor([p for s in samples for p in s.behaviour_log_probs]).float(),
        weights=torch.tensor(token_weights, dtype=torch.float32).repeat_interleave(repeats),
    )
