"""Where tokens go: how evenly routers use their experts, and replay of choices made before.

Which of two experts with nearly equal logits a router takes depends on the last bit of its input,
so engine and trainer, or a policy and itself one update later, send some tokens to different ones,
and the ratio of their probabilities measures that too. Replayed, the choice is fixed; the
probabilities are computed anew at the chosen experts, so the router's gradient flows.

Megatron's routers ask ``router_replay`` where to send tokens. Its own object of that name takes the
choice of another microbatch where a pipeline recomputes activations; this one does not. Asked, it
also counts.

Shapes: T = tokens of this rank's part of a microbatch as its routers see them, L = layers of its
stage, E = experts of a layer, K = of a token. Choices are an expert's number plus one; a row of
zeros has none, and the router chooses.
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from qurl_megatron.actor.context import ContextPart
from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.observe.metrics import Max, Mean, Metric


class _Router:
    """What one router asks; Megatron's name for it is ``router_replay``."""

    def __init__(self) -> None:
        self.given: Tensor | None = None  # [T, K] for the next pass
        self.made: Tensor | None = None  # [T, K] by the newest pass
        self.counted: Tensor | None = None  # [T] bool: tokens that count, of the next pass
        # What passes had whose layers will be computed again; None: none will.
        self.earlier: deque[Tensor | None] | None = None
        # Since the last look: choices for each expert, [E]; given ones that differ, and all given.
        self.loads: list[Tensor] = []
        self.differing: list[Tensor] = []

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Any
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of each token's experts, [T, K] of scores [T, E]."""
        given, again = self.given, False
        if self.earlier is not None and torch.is_grad_enabled():  # the backward pass asks
            given, again = self.earlier.popleft(), True
        elif self.earlier is not None:
            self.earlier.append(given)
        values, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = own
        if given is not None:
            wanted = given.long() - 1
            chosen = torch.where(wanted >= 0, wanted, own)
            values = scores.gather(1, chosen)
            if self.counted is not None and not again:
                replayed = self.counted & (wanted[:, 0] >= 0)
                differs = replayed & (chosen[:, :, None] != own[:, None, :]).all(-1).any(-1)
                self.differing.append(torch.stack([differs.sum(), replayed.sum()]))
        if self.counted is not None and not again:
            once = self.counted.long().repeat_interleave(topk)
            load_E = chosen.new_zeros(scores.shape[1])
            self.loads.append(load_E.scatter_add_(0, chosen.flatten(), once))
        self.made = chosen
        return values, chosen


class Routing:
    """The routers of this rank's stage."""

    def __init__(self, gpt: GPTModel, ranks: Ranks) -> None:
        self._ranks = ranks
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

    def give(self, routes_TLK: Tensor | None, counted_T: Tensor | None) -> None:
        """Set the choices of the next pass; None: the routers choose.

        Args:
            counted_T: tokens of it that ``metrics`` are of; None: none.
        """
        for layer, router in enumerate(self._routers):
            router.counted = counted_T
            router.given = None if routes_TLK is None else routes_TLK[:, layer]

    def made(self, dtype: torch.dtype) -> Tensor:
        """Return the choices of the newest pass, [T, L, K]."""
        made = [router.made for router in self._routers if router.made is not None]
        return (torch.stack(made, dim=1) + 1).to(dtype)

    def metrics(self) -> dict[str, Metric]:
        """Return figures of all passes since the last call; all ranks call it together.

        Of given choices, the share that the routers would not have made themselves, in some expert,
        whatever their order. Of the busiest expert of any layer, its tokens over the mean; and the
        share of experts without any.
        """
        differing = [count for router in self._routers for count in router.differing]
        loads_LE = torch.stack([torch.stack(router.loads).sum(0) for router in self._routers])
        for router in self._routers:
            router.differing.clear()
            router.loads.clear()
        for axis in (self._ranks.copies, self._ranks.tensor):  # each has other tokens
            dist.all_reduce(loads_LE, group=axis.group)
        busiest = (loads_LE.amax(1) / loads_LE.double().mean(1)).max()
        metrics: dict[str, Metric] = {
            "policy/expert_load_max": Max(busiest.item()),
            "policy/experts_idle_fraction": Mean(
                float((loads_LE == 0).sum()), float(loads_LE.numel())
            ),
        }
        if differing:
            differ, given = torch.stack(differing).sum(0).double().tolist()
            metrics["policy/routes_differ_fraction"] = Mean(differ, given)
        return metrics


def dtype_of(experts: int) -> torch.dtype:
    """Return the smallest format that choices among so many experts fit into."""
    return torch.uint8 if experts < 256 else torch.int16


def own_part(whole_BS: Tensor, batch: TokenBatch, ranks: Ranks) -> Tensor:
    """Return [T, ...] of what a whole microbatch has for each token, [B, S, ...].

    Routers see positions before rows, cut by context ranks and then by tensor ranks.
    """
    part_sB = ContextPart.of(ranks.context, batch).cut(whole_BS).transpose(0, 1)
    return part_sB.chunk(ranks.tensor.size)[ranks.tensor.rank].flatten(0, 1).contiguous()
