"""Routing replay: a microbatch's tokens go to experts that were chosen for them before.

Which of two experts with nearly equal logits a router takes depends on the last bit of its input,
so engine and trainer, or a policy and itself one update later, send some tokens to different ones,
and the ratio of their probabilities measures that too. Replayed, the choice is fixed; the
probabilities are computed anew at the chosen experts, so the router's gradient flows.

Megatron's routers ask ``router_replay`` where to send tokens. Its own object of that name takes the
choice of another microbatch where a pipeline recomputes activations; this one does not.

Shapes: T = tokens of this rank's part of a microbatch as its routers see them, L = layers of its
stage, K = experts of a token. Choices are an expert's number plus one; a row of zeros has none, and
the router chooses.
"""

from collections import deque
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from qurl_megatron.actor.context import ContextPart
from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.observe.metrics import Mean


class _Router:
    """What one router asks; Megatron's name for it is ``router_replay``."""

    def __init__(self) -> None:
        self.given: Tensor | None = None  # [T, K] for the next pass
        self.made: Tensor | None = None  # [T, K] by the newest pass
        # What passes had whose layers will be computed again; None: none will.
        self.earlier: deque[Tensor | None] | None = None
        self.counts: list[Tensor] = []  # tokens given a choice that the router would not have made

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Any
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of each token's experts, [T, K] of scores [T, experts]."""
        given, again = self.given, False
        if self.earlier is not None and torch.is_grad_enabled():  # the backward pass asks
            given, again = self.earlier.popleft(), True
        elif self.earlier is not None:
            self.earlier.append(given)
        _, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = own
        if given is not None:
            wanted = given.long() - 1
            chosen = torch.where(wanted >= 0, wanted, own)
            if not again:
                differs = (chosen[:, :, None] != own[:, None, :]).all(-1).any(-1)
                self.counts.append(torch.stack([differs.sum(), (wanted[:, 0] >= 0).sum()]))
        self.made = chosen
        return scores.gather(1, chosen), chosen


class Replay:
    """The routers of this rank's stage."""

    def __init__(self, gpt: GPTModel) -> None:
        self._recompute = gpt.config.recompute_granularity is not None
        self._routers: list[_Router] = []
        for layer in gpt.decoder.layers:
            layer.mlp.router.router_replay = _Router()
            self._routers.append(layer.mlp.router.router_replay)

    def begin(self, *, backward: bool) -> None:
        """Before a schedule's first pass."""
        for router in self._routers:
            router.earlier = deque() if backward and self._recompute else None
            router.given = None

    def give(self, routes_TLK: Tensor | None) -> None:
        """Set the choices of the next pass; None: the routers choose."""
        for layer, router in enumerate(self._routers):
            router.given = None if routes_TLK is None else routes_TLK[:, layer]

    def made(self, dtype: torch.dtype) -> Tensor:
        """Return the choices of the newest pass, [T, L, K]."""
        made = [router.made for router in self._routers if router.made is not None]
        return (torch.stack(made, dim=1) + 1).to(dtype)

    def differing(self) -> Mean:
        """Return the share of given choices, since the last call, that the routers would not have
        made themselves: in some expert, whatever their order."""
        counts = [count for router in self._routers for count in router.counts]
        for router in self._routers:
            router.counts.clear()
        if not counts:
            return Mean(0.0, 0.0)
        return Mean(*torch.stack(counts).sum(0).double().tolist())


def dtype_of(experts: int) -> torch.dtype:
    """Return the smallest format that choices among so many experts fit into."""
    return torch.uint8 if experts < 256 else torch.int16


def own_part(routes_BSLK: Tensor, batch: TokenBatch, ranks: Ranks) -> Tensor:
    """Return [T, L, K] of the choices for a whole microbatch, in its layers here.

    Routers see positions before rows, cut by context ranks and then by tensor ranks.
    """
    part_sBLK = ContextPart.of(ranks.context, batch).cut(routes_BSLK).transpose(0, 1)
    return part_sBLK.chunk(ranks.tensor.size)[ranks.tensor.rank].flatten(0, 1).contiguous()
