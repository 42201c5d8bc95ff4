"""Where tokens go: how evenly routers use their experts, replay of choices, the auxiliary loss.

Which of two experts with nearly equal logits a router takes depends on the last bit of its input,
so engine and trainer, or a policy and itself one update later, send some tokens to different ones,
and the ratio of their probabilities measures that too. Replayed, the choice is fixed; the
probabilities are computed anew at the chosen experts, so the router's gradient flows.

Megatron's routers ask ``router_replay`` where to send tokens. Its own object of that name takes the
choice of another microbatch where a pipeline recomputes activations; this one does not. Asked, it
also counts, and adds the auxiliary loss.

That loss is computed per response. Megatron's own cover a whole microbatch, or all before it too,
so an update's gradient would depend on the layout and on how responses are packed.

Shapes: T = tokens of this rank's part of a microbatch as its routers see them, L = layers of its
stage, E = experts of a layer, K = of a token, R = responses of a microbatch. Choices are an
expert's number plus one; a row of zeros has none, and the router chooses.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from qurl_megatron.actor.context import ContextPart
from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.observe.metrics import Max, Mean, Metric
from qurl_megatron.types import routes_dtype


@dataclass(frozen=True)
class Balance:
    """The auxiliary loss of a microbatch: which response a token is of, and its weight."""

    owner_T: Tensor  # int64: a response of the microbatch; padding has R
    length_R: Tensor  # float32: tokens of each, over all ranks
    share: float  # weight of a response in the mean of an update
    scale: float  # from that mean to the number that Megatron's schedule expects
    groups: tuple[dist.ProcessGroup, ...]  # of ranks with other tokens of the same responses

    def loss(self, probability_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        """Return this rank's addend of ``E / K * sum_e f_e p_e``, summed over responses by share.

        Of a response's tokens, the choices of expert e number f_e a token, and p_e is the mean of
        its probability. Equal use of all experts gives 1. Only p has a gradient.
        """
        responses, (_, experts) = len(self.length_R), probability_TE.shape
        count_RE = probability_TE.new_zeros(responses + 1, experts)
        once = probability_TE.new_ones(1).expand_as(chosen_TK)
        count_RE.index_put_((self.owner_T[:, None], chosen_TK), once, accumulate=True)
        for group in self.groups:
            dist.all_reduce(count_RE, group=group)
        sum_RE = torch.zeros_like(count_RE).index_add(0, self.owner_T, probability_TE)
        loss_R = (count_RE * sum_RE)[:responses].sum(1) / self.length_R.square()
        return loss_R.sum() * (self.share * experts / chosen_TK.shape[1])


class _Router:
    """The object that one router asks, its ``router_replay``."""

    def __init__(self, *, softmax_first: bool) -> None:
        self._softmax_first = softmax_first  # scores are probabilities, not logits
        self.replay: Tensor | None = None  # [T, K] for the next pass
        self.chosen: Tensor | None = None  # [T, K] by the newest pass
        self.counted: Tensor | None = None  # [T] bool: tokens that count, of the next pass
        self.balance: Balance | None = None  # of the next pass, if it has gradients
        # Inputs of passes whose layers will be computed again; None: none will.
        self.earlier: deque[tuple[Tensor | None, Balance | None]] | None = None
        # Since the last look: choices for each expert, [E]; replays that differ, and all of them.
        self.loads: list[Tensor] = []
        self.differing: list[Tensor] = []
        self.losses: list[Tensor] = []  # addends of the auxiliary loss

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Any
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of each token's experts, [T, K] of scores [T, E]."""
        given_TK, balance, counted = self.replay, self.balance, self.counted
        if self.earlier is not None:
            if torch.is_grad_enabled():  # the backward pass asks again
                given_TK, balance = self.earlier.popleft()
                counted = None
            else:
                self.earlier.append((given_TK, balance))
        values, own_TK = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen_TK = own_TK
        if given_TK is not None:
            replayed_TK = given_TK.long() - 1
            chosen_TK = torch.where(replayed_TK >= 0, replayed_TK, own_TK)
            values = scores.gather(1, chosen_TK)
            if counted is not None:
                replayed = counted & (replayed_TK[:, 0] >= 0)
                differs = replayed & (chosen_TK[:, :, None] != own_TK[:, None, :]).all(-1).any(-1)
                self.differing.append(torch.stack([differs.sum(), replayed.sum()]))
        if counted is not None:
            once = counted.long().repeat_interleave(topk)
            load_E = chosen_TK.new_zeros(scores.shape[1])
            self.loads.append(load_E.scatter_add_(0, chosen_TK.flatten(), once))
        self.chosen = chosen_TK
        if balance is not None and torch.is_grad_enabled():
            wide = scores.float()
            loss = balance.loss(wide if self._softmax_first else wide.softmax(-1), own_TK)
            self.losses.append(loss.detach())
            values = MoEAuxLossAutoScaler.apply(values, loss * balance.scale)
        return values, chosen_TK


class Routing:
    """The routers of this rank's stage."""

    def __init__(self, gpt: GPTModel, ranks: Ranks, *, aux_coef: float = 0.0) -> None:
        self._ranks = ranks
        self._aux_coef = aux_coef
        self._share = self._scale = 0.0
        self._updates = 0  # since the last look at the metrics
        self._recompute = gpt.config.recompute_granularity is not None
        self._routers: list[_Router] = []
        for layer in gpt.decoder.layers:
            softmax_first = gpt.config.moe_router_pre_softmax
            layer.mlp.router.router_replay = _Router(softmax_first=softmax_first)
            self._routers.append(layer.mlp.router.router_replay)

    def begin(self, batches: Sequence[TokenBatch], *, backward: bool) -> None:
        """Prepare a schedule's first pass. Data ranks have equally many responses of an update."""
        for router in self._routers:
            router.earlier = deque() if backward and self._recompute else None
            router.replay = router.balance = None
        self._share = 0.0
        if backward and self._aux_coef:
            self._share = 1.0 / (sum(len(b.indices) for b in batches) * self._ranks.data.size)
            # Megatron averages over microbatches and data ranks (``Trained.accumulate``).
            self._scale = self._aux_coef * len(batches) * self._ranks.data.size
            self._updates += 1

    def give(self, batch: TokenBatch, routes_TLK: Tensor | None, counted_T: Tensor | None) -> None:
        """Set the choices of the next pass; None: the routers choose.

        Args:
            counted_T: tokens of it that ``metrics`` are of; None: none.
        """
        balance = self._balance(batch) if self._share else None
        for layer, router in enumerate(self._routers):
            router.balance = balance
            router.counted = counted_T
            router.replay = None if routes_TLK is None else routes_TLK[:, layer]

    def _balance(self, batch: TokenBatch) -> Balance:
        rows, length = batch.real.shape
        starts = batch.starts or range(0, (rows + 1) * length, length)
        inner = torch.tensor(starts[1:-1], dtype=torch.int64, device=batch.real.device)
        place = torch.arange(rows * length, device=batch.real.device)
        owner = torch.bucketize(place, inner, right=True).view(rows, length)
        owner = torch.where(batch.real, owner, len(batch.indices))
        length_R = owner.flatten().bincount(minlength=len(batch.indices) + 1)[:-1]
        axes = (self._ranks.tensor, self._ranks.context)
        return Balance(
            own_part(owner, batch, self._ranks),
            length_R.float(),
            self._share,
            self._scale,
            tuple(axis.group for axis in axes if axis.size > 1),
        )

    def choices(self, dtype: torch.dtype) -> Tensor:
        """Return the choices of the newest pass, [T, L, K]."""
        chosen = [router.chosen for router in self._routers if router.chosen is not None]
        return (torch.stack(chosen, dim=1) + 1).to(dtype)

    def metrics(self) -> dict[str, Metric]:
        """Return figures of all passes since the last call; all ranks call it together.

        The share of replayed tokens for which a router would have chosen some other expert,
        whatever the order; the busiest expert's tokens over the mean of its layer; the share of
        experts without any tokens.
        """
        differing = [count for router in self._routers for count in router.differing]
        losses = [loss for router in self._routers for loss in router.losses]
        loads_LE = torch.stack([torch.stack(router.loads).sum(0) for router in self._routers])
        for router in self._routers:
            router.differing.clear()
            router.loads.clear()
            router.losses.clear()
        aux_loss = torch.stack(losses).sum() if losses else None
        for axis in (self._ranks.copies, self._ranks.tensor):  # each has other tokens
            dist.all_reduce(loads_LE, group=axis.group)
            if aux_loss is not None:
                dist.all_reduce(aux_loss, group=axis.group)
        busiest = (loads_LE.amax(1) / loads_LE.double().mean(1)).max()
        metrics: dict[str, Metric] = {
            "policy/expert_load_max": Max(busiest.item()),
            "policy/experts_idle_fraction": Mean(
                float((loads_LE == 0).sum()), float(loads_LE.numel())
            ),
        }
        if aux_loss is not None:
            metrics["policy/router_aux_loss"] = Mean(
                aux_loss.item(), float(self._updates * len(self._routers))
            )
            self._updates = 0
        if differing:
            differ, compared = torch.stack(differing).sum(0).double().tolist()
            metrics["policy/routes_differ_fraction"] = Mean(differ, compared)
        return metrics


def dtype_of(experts: int) -> torch.dtype:
    """Return the smallest format that choices among so many experts fit into."""
    return getattr(torch, routes_dtype(experts))


def own_part(whole_BS: Tensor, batch: TokenBatch, ranks: Ranks) -> Tensor:
    """Return this rank's [T, ...] of a whole microbatch's values, [B, S, ...].

    Routers see positions before rows, cut by context ranks and then by tensor ranks.
    """
    part_sB = ContextPart.of(ranks.context, batch).cut(whole_BS).transpose(0, 1)
    return part_sB.chunk(ranks.tensor.size)[ranks.tensor.rank].flatten(0, 1).contiguous()
