"""The engines' choice of experts, from the leading rank to the ranks that replay it.

Every rank gets its own responses' choices, in its own layers alone: for Qwen3-30B-A3B they take 384
bytes a token, all else of a response 13. The leading rank sends each of them once.

Shapes: B = rows of a microbatch, S = their length, T = B * S, L = layers of a rank's stage, K =
experts of a token.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.actor.megatron import Ranks, everywhere
from qurl_megatron.actor.routing import dtype_of, own_part
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.data.responses import Responses
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.training.layout import Minibatch


def with_routes(
    ranks: Ranks, arch: Arch, samples: Responses, minibatches: Sequence[Minibatch]
) -> list[Minibatch]:
    """Return the microbatches with ``TokenBatch.routes``; all ranks call it together.

    Args:
        samples: on the leading rank, with the engines' choices.
    """
    indices = [i for minibatch in minibatches for batch in minibatch for i in batch.indices]
    routes = dict(zip(indices, _received(ranks, arch, samples, indices), strict=True))

    def laid_out(batch: TokenBatch) -> TokenBatch:
        rows, length = batch.input_ids.shape
        starts = batch.starts or range(0, rows * length, length)
        shape = next(iter(routes.values())).shape[1:]
        routes_TLK = torch.zeros(rows * length, *shape, dtype=dtype_of(arch.routed.count))
        for index, start in zip(batch.indices, starts, strict=False):
            routes_TLK[start : start + len(routes[index])] = routes[index]
        part = own_part(routes_TLK.unflatten(0, (rows, length)).to(ranks.device), batch, ranks)
        return replace(batch, routes=part)

    return [[laid_out(batch) for batch in minibatch] for minibatch in minibatches]


def _received(
    ranks: Ranks, arch: Arch, samples: Responses, indices: Sequence[int]
) -> Sequence[Tensor]:
    """Return the choices for these responses, [tokens, L, K] each: 0 where the engine gave none."""
    layers = arch.num_layers // ranks.pipeline.size
    totals, kind = samples.summary.totals, dtype_of(arch.routed.count)

    def memory(responses: Sequence[int]) -> Tensor:
        tokens = sum(totals[i] for i in responses)
        return torch.zeros(tokens, layers, arch.routed.top_k, dtype=kind)

    def filled(responses: Sequence[int], stage: int) -> Tensor:
        part, start = memory(responses), 0
        engine_routes = samples.routes or ()  # no answer may have any
        for i in responses if engine_routes else ():
            choices = torch.from_numpy(engine_routes[i])
            part[start : start + len(choices)] = choices[:, stage * layers : (stage + 1) * layers]
            start += totals[i]
        return part

    # One rank per stage and share of the responses receives it, and passes it to its neighbours.
    local = memory(indices)
    requests = everywhere((ranks.counted, list(indices), ranks.pipeline.rank))
    if ranks.leads:
        for rank, (receives, responses, stage) in enumerate(requests):
            if not receives:
                continue
            choices = filled(responses, stage)
            if rank == ranks.rank:
                local = choices
            else:
                dist.send(choices.view(torch.uint8), rank)
    elif ranks.counted:
        dist.recv(local.view(torch.uint8), 0)
    for axis, takes_part in ((ranks.context, ranks.tensor.rank == 0), (ranks.tensor, True)):
        if takes_part and axis.size > 1:
            first = dist.get_global_rank(axis.group, 0)
            dist.broadcast(local.view(torch.uint8), first, group=axis.group)
    return local.split([totals[i] for i in indices])
