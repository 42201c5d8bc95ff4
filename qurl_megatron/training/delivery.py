"""A step's responses from the leading rank to the ranks that train on them.

Lengths and rewards go to everybody. Tokens go only where they are needed, as flat tensors that
nobody pickles: the leading rank sends each data-parallel rank's share once, to one rank, and that
one passes it on to the others that train on the same responses (tensor, context and pipeline
ranks). All of it stays on the CPU.
"""

from collections.abc import Callable
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.data.responses import Responses, Summary

Split = Callable[[Summary], list[list[int]]]
"""Which responses' tokens each data-parallel rank needs; the same on every rank."""


def deliver(ranks: Ranks, responses: Responses | None, split: Split) -> Responses:
    """This rank's share of one step's responses; all ranks call it together.

    Args:
        responses: all of them, on the leading rank; None on the others.
    """
    summary = _summary(responses)
    parts = split(summary)
    teams = _teams(ranks)
    team = teams[ranks.data.rank]
    own_share = Responses.empty(summary, parts[ranks.data.rank])
    if responses is not None:
        for part, (head, *_) in zip(parts, teams, strict=True):
            share = responses.part(part)
            if head == ranks.rank:
                own_share = share
                continue
            for tensor in _tensors(share):
                dist.send(tensor, head)
    elif ranks.rank == team[0]:
        for tensor in _tensors(own_share):
            dist.recv(tensor, 0)
    for tensor in _tensors(own_share):
        _pass_on(tensor, team, ranks.rank)
    return own_share


def _tensors(responses: Responses) -> tuple[Tensor, ...]:
    """Return the tensors to send, in this order."""
    return responses.tokens, responses.mask, responses.behaviour


def _teams(ranks: Ranks) -> list[list[int]]:
    """Return the ranks that train on the same responses, by data-parallel rank."""
    place = torch.tensor([ranks.data.rank])
    everywhere = [torch.empty_like(place) for _ in range(ranks.world_size)]
    dist.all_gather(everywhere, place)
    teams: list[list[int]] = [[] for _ in range(ranks.data.size)]
    for rank, team in enumerate(everywhere):
        teams[int(team)].append(rank)
    return teams


def _pass_on(tensor: Tensor, team: list[int], rank: int) -> None:
    """Send a tensor from the first of a team to all; its holders double in each round.

    A broadcast would need a group for each team, which on GPUs nobody has for tensors on the CPU.
    """
    place, have = team.index(rank), 1
    while have < len(team):
        if place < have and place + have < len(team):
            dist.send(tensor, team[place + have])
        elif have <= place < 2 * have:
            dist.recv(tensor, team[place - have])
        have *= 2


def _summary(responses: Responses | None) -> Summary:
    """Return the leading rank's summary on every rank."""
    count = torch.tensor([len(responses) if responses is not None else 0])
    dist.broadcast(count, 0)
    summary = responses.summary if responses is not None else Summary.empty(int(count))
    for field in fields(summary):
        dist.broadcast(getattr(summary, field.name), 0)
    return summary
