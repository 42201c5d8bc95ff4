"""Samples into padded training tensors, and nothing else: pure and on the CPU.

Shapes: B = responses, S = padded length, N = response tokens of the batch. Position t predicts
token t+1: what belongs to a response token (log-prob, advantage, weight) sits one place before it.
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
    behaviour: Tensor  # [B, S] float32: log-probs the engine reported, 0 off the mask
    advantages: Tensor  # [B, S] float32, 0 off the mask
    weights: Tensor  # [B, S] float32: share of each token in the batch loss, 0 off the mask
    proximal: Tensor | None = None  # [N] float32, in the mask's row-major order
    reference: Tensor | None = None  # [N] float32

    def to(self, device: torch.device) -> "TokenBatch":
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in moved.items() if v is not None})


def pad_samples(
    samples: Sequence[Sample],
    advantages: Sequence[float],
    token_weights: Sequence[float],
    *,
    length: int,
    pad_id: int,
) -> TokenBatch:
    """One batch of the given padded length.

    Args:
        advantages: one per sample, for all its response tokens.
        token_weights: share of each sample's tokens in the batch loss.
        length: S; every sample's prompt and response must fit.
    """
    shape = (len(samples), length)
    ids = torch.full(shape, pad_id)
    targets = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    behaviour, advantage, weight = (torch.zeros(shape) for _ in range(3))
    for row, sample in enumerate(samples):
        assert sample.prompt.input_ids, "a response needs a token before it"
        tokens = torch.tensor(sample.prompt.input_ids + sample.response_ids)
        assert len(tokens) <= length, f"sample of {len(tokens)} tokens does not fit into {length}"
        ids[row, : len(tokens)] = tokens
        targets[row, : len(tokens) - 1] = tokens[1:]
        response = slice(len(sample.prompt.input_ids) - 1, len(tokens) - 1)
        mask[row, response] = True
        behaviour[row, response] = torch.tensor(sample.behaviour_log_probs)
        advantage[row, response] = advantages[row]
        weight[row, response] = token_weights[row]
    positions = torch.arange(length).expand(shape).contiguous()
    return TokenBatch(ids, positions, targets, mask, behaviour, advantage, weight)


def unpad(values_BS: Tensor, mask_BS: Tensor) -> list[list]:
    """What ``pad_samples`` spread out, one list per response; for any [B, S] of the batch."""
    return [values_S[mask_S].tolist() for values_S, mask_S in zip(values_BS, mask_BS, strict=True)]
