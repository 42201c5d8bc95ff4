"""The policy: one rank's part of a GPTModel, its optimizer, and FP32 truth behind BF16 weights.

The frozen reference policy has weights of the same shape, and there is one model. While the
reference scores, its weights are in the model and the actor's wait where the reference's did; so it
costs one copy of the weights in all, on the device or the host.

Shapes: B = responses of a microbatch, S = padded length, v = this tensor rank's part of the
vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn

from qurl_megatron.actor.aligned import Align, aligned_layers, plain
from qurl_megatron.actor.build import build_model, load_weights, parameter_ops, transformer_config
from qurl_megatron.actor.megatron import Axis, Ranks
from qurl_megatron.actor.routing import Routing, dtype_of, own_part
from qurl_megatron.actor.trained import Trained, with_optimizer
from qurl_megatron.checkpoints.source import Checkpoint, open_checkpoint
from qurl_megatron.config import ModelConfig, OptimizerConfig, ParallelConfig
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import NOT_COMPUTED, read_aux_coef
from qurl_megatron.tensors.slice import Shard

Memory = Literal["device", "host"]


@dataclass(frozen=True)
class Reference:
    """The weights that the actor is compared with, and where they wait."""

    path: str = ""
    """Checkpoint, Hugging Face or Megatron; empty: the actor's own, as it is built."""

    memory: Memory = "device"


class Policy(Trained):
    """A Megatron actor: forward, update, and its weights under their Hugging Face names."""

    def __init__(
        self,
        source: Checkpoint,
        uaq_scale: float,
        ranks: Ranks,
        model: DistributedDataParallel,
        optimizer: Any,
        scheduler: OptimizerParamScheduler,
        aux_coef: float = 0.0,
    ) -> None:
        super().__init__(ranks, model, optimizer, scheduler)
        self.source = source  # source of the weights; its config describes the model
        self.uaq_scale = uaq_scale  # folded into the weights, there or on the way
        self.arch = source.arch
        self._aligned = aligned_layers(self.gpt)
        self._coded = not self._aligned  # the codes are up to date with the weights
        self._ops = parameter_ops(self.arch, ranks, aligned=bool(self._aligned))
        self._parameters = list(self.gpt.named_parameters())
        self._reference: WaitingWeights | None = None
        self.routing: Routing | None = None
        if self.arch.experts:
            self.routing = Routing(self.gpt, ranks, aux_coef=aux_coef)
        self._free = False  # routers choose, whatever a microbatch has
        self._routes: list[Tensor] | None = None  # chosen by routers, while these are recorded

    @staticmethod
    def build(
        model: ModelConfig,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        ranks: Ranks,
        *,
        uaq_scale: float = 1.0,
        reference: Reference | None = None,
        align: Align | None = None,
    ) -> "Policy":
        """Load ``model.path`` into the given layout, folding ``uaq_scale`` on the way.

        The model must divide over the ranks, and be one that Megatron computes (``training.shapes``
        checks both before ranks start).

        Args:
            uaq_scale: the factor the weights shall have; a checkpoint that was converted with it
                has it already.
            reference: the frozen policy to be kept, for the KL term; folded like the actor.
            align: how the linear layers follow the engines'; None: they do not.

        Raises:
            ConfigError: a checkpoint is unusable; the actor's is folded by another factor; the
                reference's is of another shape.
        """
        source = open_checkpoint(model.path)
        arch = source.arch
        if source.uaq_scale not in (1.0, uaq_scale):
            raise ConfigError(
                f"{model.path} has the UAQ factor {source.uaq_scale} folded in, the recipe says "
                f"quant.uaq_scale={uaq_scale}; set it to {source.uaq_scale}, or unfold the "
                "checkpoint with `qurl export`"
            )
        fold = uaq_scale / source.uaq_scale
        megatron_config = transformer_config(arch, model, parallel)
        gpt = build_model(arch, megatron_config, ranks, fp32_output=model.fp32_output, align=align)
        waiting = None
        if reference and reference.path:
            other = open_checkpoint(reference.path)
            check_same_shape(other, source)
            load_weights(gpt, arch, ranks, other.reader, uaq_scale / other.uaq_scale)
            waiting = WaitingWeights(gpt.parameters(), reference.memory)
        fp32 = load_weights(gpt, arch, ranks, source.reader, fold)
        if reference and not reference.path:
            waiting = WaitingWeights(gpt.parameters(), reference.memory)
        ddp, chained, scheduler = with_optimizer(gpt, megatron_config, optimizer)
        aux_coef = read_aux_coef(source.config) if model.router_aux_loss == "model" else 0.0
        policy = Policy(source, source.uaq_scale * fold, ranks, ddp, chained, scheduler, aux_coef)
        for name, parameter in gpt.named_parameters():
            policy.write_master(parameter, fp32.pop(name))
        policy._reference = waiting
        return policy

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the model holds the frozen reference weights, and its own wait outside.

        No engine runs the reference, so it is computed in full precision, and chooses its experts.
        """
        assert self._reference is not None, "built without a reference"
        self._take_codes()  # or they would be made of the reference
        self._reference.swap(self.gpt.parameters())
        try:
            with plain(self._aligned):
                self._free = True
                yield
        finally:
            self._free = False
            self._reference.swap(self.gpt.parameters())

    @property
    def align(self) -> Align | None:
        """How the linear layers follow the engines'; None: they do not."""
        return self._aligned[0].align if self._aligned else None

    def weights_changed(self) -> None:
        self._coded = not self._aligned

    def _schedule(
        self, microbatches: Sequence[TokenBatch], finish: Callable, *, forward_only: bool
    ) -> list:
        self._take_codes()
        if self.routing:
            self.routing.begin(microbatches, backward=not forward_only)
        return super()._schedule(microbatches, finish, forward_only=forward_only)

    def before_pass(self, batch: TokenBatch) -> None:
        if not self.routing:
            return
        if self._free:
            self.routing.give(batch, None, None)
        else:
            self.routing.give(batch, batch.routes, own_part(batch.real, batch, self.ranks))

    def after_pass(self) -> None:
        if self.routing and self._routes is not None:
            self._routes.append(self.routing.choices(dtype_of(self.arch.routed.count)))

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Inside, each pass adds the experts that its routers chose to the list, [T, L, K]."""
        self._routes = []
        try:
            yield self._routes
        finally:
            self._routes = None

    def _take_codes(self) -> None:
        """Make the codes once for each state of the weights, from the FP32 masters.

        They equal the codes of a published version.
        """
        if self._coded:
            return
        for layer in self._aligned:
            master = self._read_master(layer.weight)
            assert master is not None, "without an owner every rank has it"
            layer.take(master)
        self._coded = True

    def hf_layout(self) -> list[list[Shard]]:
        """Return the shards of each Megatron parameter on the meta device, without values."""
        return [
            list(self.hf_parameter(index, lambda parameter: parameter.detach().to("meta")))
            for index in range(len(self._parameters))
        ]

    def master_shards(self, index: int, *, owner: int) -> list[Shard]:
        """Return the shards of one parameter from its FP32 master, on one rank of its copies.

        Args:
            owner: which of ``copies_of`` it gets them. All of these must call together; the others
                lend their ranges and get an empty list.
        """
        value = self._read_master(self._parameters[index][1], owner=owner)
        return [] if value is None else list(self.hf_parameter(index, lambda _: value))

    def copies_of(self, index: int) -> Axis:
        """Return the ranks that hold the same part of a parameter as this one."""
        return self.ranks.copies_of(self._parameters[index][1])

    def splits(self, index: int) -> Axis:
        """Return the ranks that hold different parts of a parameter."""
        return self.ranks.splits(self._parameters[index][1])

    def hf_parameter(self, index: int, read: Callable[[nn.Parameter], Tensor]) -> Iterator[Shard]:
        """Yield the Hugging Face tensors of one Megatron parameter, as ``read`` returns it."""
        name, parameter = self._parameters[index]
        if self.arch.tied and name == "output_layer.weight":
            return
        rank = self.ranks.splits(parameter).rank
        op = self._ops[name]
        for part, value in zip(op.hf, op.to_hf(read(parameter)).values(), strict=True):
            start = 0 if part.split_dim is None else rank * value.shape[part.split_dim]
            if part.vocabulary:
                value = value[: max(0, part.shape[0] - start)]
            yield Shard(part.name, value, part.shape, part.split_dim, start)

    def _read_master(self, parameter: nn.Parameter, *, owner: int | None = None) -> Tensor | None:
        """Return the FP32 value of a parameter, on every rank of its copies or on ``owner`` alone.

        Each of them owns a range of it: the ranges are summed into place, which is exact because
        the others are zero.
        """
        copies = self.ranks.copies_of(parameter)
        elsewhere = owner is not None and owner != copies.rank
        if parameter.dtype == torch.float32:
            return None if elsewhere else parameter.detach()
        master = parameter.main_param  # type: ignore[attr-defined]  # by Megatron's optimizer
        if copies.size == 1:
            return master.detach().view(parameter.shape)
        full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if master is not None:
            full[self.owned_range(parameter)] = master.detach()
        if owner is None:
            dist.all_reduce(full, group=copies.group)
        else:
            dist.reduce(full, dist.get_global_rank(copies.group, owner), group=copies.group)
        return None if elsewhere else full.view(parameter.shape)


class WaitingWeights:
    """A second set of a model's weights, in the formats of its parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], memory: Memory) -> None:
        """Copy the parameters' present values.

        Args:
            memory: "host" keeps the copies in pinned memory where there is a GPU.
        """
        park = _to_host if memory == "host" else torch.clone
        self.tensors = [park(parameter.detach()) for parameter in parameters]

    @torch.no_grad()
    def swap(self, parameters: Iterable[nn.Parameter]) -> None:
        """Exchange them with the parameters' values, in the order they were copied.

        One parameter is held twice at a time, on the device.
        """
        for parameter, other in zip(parameters, self.tensors, strict=True):
            previous = parameter.detach().clone()
            # Copies to and from pinned memory run in the stream's order; nothing here reads them.
            parameter.copy_(other, non_blocking=True)
            other.copy_(previous, non_blocking=True)


def check_same_shape(reference: Checkpoint, actor: Checkpoint) -> None:
    """Raise ``ConfigError`` unless one model can hold the weights of both, and means the same."""
    for field in fields(actor.arch):
        theirs, ours = getattr(reference.arch, field.name), getattr(actor.arch, field.name)
        if theirs != ours and field.name not in NOT_COMPUTED:
            raise ConfigError(
                f"algo.reference={reference.folder} has {field.name}={theirs} where the actor, "
                f"{actor.folder}, has {ours}; name a checkpoint of the actor's shape"
            )


def _to_host(tensor: Tensor) -> Tensor:
    pinned = torch.cuda.is_available()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor)
