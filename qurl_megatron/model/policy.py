"""The policy: one rank's part of a GPTModel, its optimizer, and FP32 truth behind BF16 weights.

Shapes: B = responses of a microbatch, S = padded length, v = this tensor rank's part of the
vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from qurl_megatron.config import ModelConfig, OptimizerConfig, ParallelConfig
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.errors import ConfigError
from qurl_megatron.model.build import (
    build_model,
    load_weights,
    parameter_ops,
    transformer_config,
)
from qurl_megatron.runtime.megatron import Ranks
from qurl_megatron.weights import (
    Checkpoint,
    is_vocabulary,
    open_checkpoint,
)

Loss = Callable[[Tensor, TokenBatch], tuple[Tensor, dict[str, Any]]]
"""(logits [B, S, v], microbatch) -> (this microbatch's share of the batch loss, its metrics)."""


@dataclass(frozen=True)
class HfShard:
    """This rank's part of one Hugging Face tensor, in FP32."""

    name: str
    value: Tensor
    split_dim: int | None
    offset: int  # of the first row or column, along split_dim
    shape: tuple[int, ...]  # of the whole tensor


class Policy:
    """A Megatron actor: forward, update, and its weights under their Hugging Face names."""

    def __init__(
        self,
        source: Checkpoint,
        uaq_scale: float,
        ranks: Ranks,
        model: DistributedDataParallel,
        optimizer: Any,
        scheduler: OptimizerParamScheduler,
    ) -> None:
        self.source = source  # what the weights were loaded from; its config describes the model
        self.uaq_scale = uaq_scale  # folded into the weights, there or on the way
        self.arch = source.arch
        self.ranks = ranks
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._ops = parameter_ops(self.arch, ranks)
        self._parameters = list(self.gpt.named_parameters())
        self._reference: list[Tensor] | None = None

    @staticmethod
    def build(
        model: ModelConfig,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        ranks: Ranks,
        *,
        uaq_scale: float = 1.0,
        keep_reference: bool = False,
    ) -> "Policy":
        """Load ``model.path`` into the given layout, folding ``uaq_scale`` on the way.

        Args:
            uaq_scale: the factor the weights shall have; a checkpoint that was converted with it
                has it already.
            keep_reference: remember the loaded weights, for the KL term.

        Raises:
            ConfigError: the checkpoint is unusable, folded by another factor, or does not divide
                over the ranks.
        """
        source = open_checkpoint(model.path)
        arch = source.arch
        if source.uaq_scale not in (1.0, uaq_scale):
            raise ConfigError(
                f"{model.path} has the UAQ factor {source.uaq_scale} folded in, the recipe says "
                f"quant.uaq_scale={uaq_scale}; set it to {source.uaq_scale}, or unfold the "
                "checkpoint with checkpoints_tools/megatron_to_hf.py"
            )
        fold = uaq_scale / source.uaq_scale
        arch.check_parallel(parallel.tensor, parallel.pipeline)
        megatron_config = transformer_config(arch, model, parallel)
        gpt = build_model(arch, megatron_config, ranks)
        fp32 = load_weights(gpt, arch, ranks, source.reader, fold)
        ddp = DistributedDataParallel(
            megatron_config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=optimizer.distributed,
                check_for_nan_in_grad=True,
            ),
            gpt,
        )
        chained, scheduler = _optimizer(optimizer, megatron_config.params_dtype, ddp)
        megatron_config.grad_scale_func = chained.scale_loss
        megatron_config.finalize_model_grads_func = finalize_model_grads
        policy = Policy(source, source.uaq_scale * fold, ranks, ddp, chained, scheduler)
        for name, parameter in gpt.named_parameters():
            policy._write_master(parameter, fp32.pop(name))
        if keep_reference:
            policy._reference = [p.detach().clone() for p in ddp.parameters()]
        return policy

    @property
    def gpt(self) -> GPTModel:
        return self.model.module

    # -- forward and backward ------------------------------------------------------------------

    def score(
        self, microbatches: Sequence[TokenBatch], read: Callable[[Tensor, TokenBatch], Tensor]
    ) -> list[Tensor]:
        """``read(logits, microbatch)`` of every microbatch, without gradients.

        Returns:
            One result per microbatch on the last pipeline stage, an empty list on the others.
        """

        def collect(microbatch: TokenBatch, logits: Tensor, non_loss_data: bool = True) -> Tensor:
            return read(logits, microbatch)

        with torch.no_grad():
            return self._schedule(microbatches, collect, forward_only=True)

    def accumulate(self, microbatches: Sequence[TokenBatch], loss: Loss) -> list[dict[str, Any]]:
        """Forward and backward over ``microbatches``; gradients end up reduced over all ranks.

        ``loss`` returns shares of one batch loss: they are summed, over microbatches and data
        ranks. Megatron averages over both instead, so each share is scaled up by their number.

        Returns:
            Metrics of every microbatch on the last pipeline stage, an empty list on the others.
        """
        scale = len(microbatches) * self.ranks.data.size

        def share(microbatch: TokenBatch, logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
            value, metrics = loss(logits, microbatch)
            return value * scale, metrics

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self._schedule(microbatches, share, forward_only=False)

    def apply(self) -> dict[str, float]:
        """One optimizer step on the accumulated gradients."""
        self.scheduler.step(1)
        lr = self.optimizer.param_groups[0]["lr"]
        _, grad_norm, _ = self.optimizer.step()
        return {"optimizer/grad_norm": float(grad_norm), "optimizer/lr": float(lr)}

    def _schedule(
        self, microbatches: Sequence[TokenBatch], finish: Callable, *, forward_only: bool
    ) -> list:
        """Run Megatron's schedule (1F1B in a pipeline); ``finish`` sees the last stage's logits."""

        def step(batches: Iterator[TokenBatch], model: nn.Module) -> tuple[Tensor, Callable]:
            batch = next(batches)
            logits = model(batch.input_ids, batch.positions, None)
            return logits, partial(finish, batch)

        rows, length = microbatches[0].input_ids.shape
        assert all(b.input_ids.shape == (rows, length) for b in microbatches), (
            "one shape per schedule"
        )
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(microbatches),
            model=self.model,
            num_microbatches=len(microbatches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the model holds the frozen initial weights, swapped in: no third copy exists."""
        assert self._reference is not None, "built without keep_reference"
        self._swap_reference()
        try:
            yield
        finally:
            self._swap_reference()

    @torch.no_grad()
    def _swap_reference(self) -> None:
        for parameter, other in zip(self.model.parameters(), self._reference, strict=True):
            held = parameter.detach().clone()
            parameter.copy_(other)
            other.copy_(held)

    # -- weights -------------------------------------------------------------------------------

    def hf_shards(self, read: Callable[[nn.Parameter], Tensor] | None = None) -> Iterator[HfShard]:
        """This rank's weights from the FP32 masters, one Megatron parameter at a time.

        Every tensor of the model appears on exactly one pipeline stage; tied output layers, which
        are a copy, and vocabulary padding are left out. All ranks of a data-parallel group must
        iterate together.

        Args:
            read: what to export of each parameter instead of its master, e.g. its gradient.
        """
        for index in range(self.parameter_count):
            yield from self.hf_parameter(index, read or self._read_master)

    @property
    def parameter_count(self) -> int:
        """Megatron parameters on this rank, tied copies included."""
        return len(self._parameters)

    def hf_layout(self) -> list[list[HfShard]]:
        """The shards of each Megatron parameter on the meta device: places without values."""
        return [
            list(self.hf_parameter(index, lambda parameter: parameter.detach().to("meta")))
            for index in range(self.parameter_count)
        ]

    def master_shards(self, index: int, *, owner: int) -> list[HfShard]:
        """The shards of one Megatron parameter from its FP32 master, on one data-parallel rank.

        Args:
            owner: the data-parallel rank that gets them. All ranks of a data-parallel group must
                call together; the others lend what they own and get an empty list.
        """
        value = self._read_master(self._parameters[index][1], owner=owner)
        return [] if value is None else list(self.hf_parameter(index, lambda _: value))

    def hf_parameter(self, index: int, read: Callable[[nn.Parameter], Tensor]) -> Iterator[HfShard]:
        """``read`` of one Megatron parameter, as the Hugging Face tensors it holds."""
        name, parameter = self._parameters[index]
        if self.arch.tied and name == "output_layer.weight":
            return
        tensor = self.ranks.tensor
        op = self._ops[name]
        for part, (hf_name, shard) in zip(op.hf, op.to_hf(read(parameter)).items(), strict=True):
            if part.split_dim is None:
                yield HfShard(hf_name, shard, None, 0, tuple(shard.shape))
                continue
            offset = tensor.rank * shard.shape[part.split_dim]
            shape = list(shard.shape)
            shape[part.split_dim] *= tensor.size
            if is_vocabulary(hf_name):
                shape[0] = self.arch.vocab
                shard = shard[: max(0, self.arch.vocab - offset)]
            yield HfShard(hf_name, shard, part.split_dim, offset, tuple(shape))

    def _read_master(self, parameter: nn.Parameter, *, owner: int | None = None) -> Tensor | None:
        """The FP32 value of a parameter, on every data-parallel rank or on ``owner`` alone.

        With a distributed optimizer each data rank owns a range of it: the ranges are summed into
        place, which is exact because the others are zero.
        """
        data = self.ranks.data
        elsewhere = owner is not None and owner != data.rank
        if parameter.dtype == torch.float32:
            return None if elsewhere else parameter.detach()
        master = parameter.main_param
        if not getattr(parameter, "main_param_sharded", False):
            return None if elsewhere else master.detach()
        if data.size == 1:
            return master.detach().view(parameter.shape)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if master is not None:
            whole[self._owned_range(parameter)] = master.detach()
        if data.size > 1 and owner is None:
            dist.all_reduce(whole, group=data.group)
        elif data.size > 1:
            dist.reduce(whole, dist.get_global_rank(data.group, owner), group=data.group)
        return None if elsewhere else whole.view(parameter.shape)

    @torch.no_grad()
    def _write_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        if parameter.dtype == torch.float32:
            return
        master = parameter.main_param
        if not getattr(parameter, "main_param_sharded", False):
            master.copy_(value)
        elif master is not None:
            master.copy_(value.flatten()[self._owned_range(parameter)])

    def _owned_range(self, parameter: nn.Parameter) -> slice:
        """The part of a flattened parameter this data rank's optimizer updates; may be empty."""
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            if parameter in optimizer.model_param_gbuf_map:
                owned = optimizer._get_model_param_range_map(parameter)["param"]
                return slice(owned.start, owned.end)
        return slice(0, 0)


def _optimizer(
    config: OptimizerConfig, dtype: torch.dtype, model: DistributedDataParallel
) -> tuple[Any, OptimizerParamScheduler]:
    megatron = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=0.0,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=config.distributed,
        clip_grad=config.clip_grad,
    )
    overrides = get_standard_config_overrides(megatron)
    optimizer = get_megatron_optimizer(
        megatron,
        [model],
        config_overrides=overrides,
        # Beside NCCL it wants gloo groups for host tensors; on a CPU the groups are gloo already.
        use_gloo_process_groups=torch.cuda.is_available(),
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=0.0,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(
            1, 2 * config.warmup_steps
        ),  # unused by "constant", but must exceed the warm-up
        lr_decay_style="constant",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler
