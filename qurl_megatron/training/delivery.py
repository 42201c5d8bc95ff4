"""A step's responses from the leading rank to the ranks that train on them.

Lengths and rewards go to everybody. Tokens go only where they are needed, as flat tensors that
nobody pickles: the leading rank sends each data-parallel rank's share once, to one rank, and that
one passes it on to the others that train on the same responses (tensor, context and pipeline
ranks). All of it stays on the CPU.
"""

from dataclasses import fields

import torch
import torch.distributed as dist

from qurl_megatron.config import RunConfig
from qurl_megatron.data.responses import Responses, Summary
from qurl_megatron.runtime.megatron import Ranks
from qurl_megatron.training.step import shares


def deliver(
    ranks: Ranks, responses: Responses | None, config: RunConfig, *, step: int
) -> Responses:
    """This rank's share of one step's responses; all ranks call it together.

    Args:
        responses: all of them, on the leading rank; None on the others.
    """
    summary = _summary(responses)
    parts = shares(ranks, summary, config, step=step)
    mine = Responses.empty(summary, parts[ranks.data.rank])
    if responses is not None:
        # The ranks beside the leading one along the data axis each lead a set of twins.
        for place, head in enumerate(dist.get_process_group_ranks(ranks.data.group)):
            part = responses.part(parts[place])
            if head == ranks.rank:
                mine = part
                continue
            dist.send(part.tokens, head)
            dist.send(part.behaviour, head)
    elif ranks.twins.rank == 0:
        dist.recv(mine.tokens, 0)
        dist.recv(mine.behaviour, 0)
    head = dist.get_global_rank(ranks.twins.group, 0)
    dist.broadcast(mine.tokens, head, ranks.twins.group)
    dist.broadcast(mine.behaviour, head, ranks.twins.group)
    return mine


def _summary(responses: Responses | None) -> Summary:
    """The leading rank's, on every rank."""
    count = torch.tensor([len(responses) if responses is not None else 0])
    dist.broadcast(count, 0)
    summary = responses.summary if responses is not None else Summary.empty(count.item())
    for field in fields(summary):
        dist.broadcast(getattr(summary, field.name), 0)
    return summary
