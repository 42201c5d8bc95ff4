"""A Megatron model that learns: forward through Megatron's schedules, gradients, optimizer steps.

Losses and readers are arguments. The policy and the critic are trained models.

Shapes: B = rows, S = padded length, s = this context-parallel rank's part of it, v = this tensor
rank's part of the output layer's result.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from qurl_megatron.actor.context import ContextPart
from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.config import OptimizerConfig
from qurl_megatron.data.pack import TokenBatch

Loss = Callable[[Tensor, TokenBatch], tuple[Tensor, dict[str, Any]]]
"""(output [B, s, v], microbatch) -> (this microbatch's share of the batch loss, its metrics).

The microbatch is whole; ``ContextPart.join`` makes [B, S] of each rank's results. All
context-parallel ranks return the same loss."""


@dataclass(eq=False)
class Trained:
    """This rank's part of a model, with its optimizer and learning-rate schedule."""

    ranks: Ranks
    model: DistributedDataParallel
    optimizer: Any
    scheduler: OptimizerParamScheduler

    @property
    def gpt(self) -> GPTModel:
        return self.model.module

    def score(
        self, microbatches: Sequence[TokenBatch], read: Callable[[Tensor, TokenBatch], Tensor]
    ) -> list[Tensor]:
        """Return ``read(output, microbatch)`` of every microbatch, without gradients.

        Returns:
            One result per microbatch on the last pipeline stage, an empty list on the others.
        """
        if not microbatches:
            return []

        def collect(microbatch: TokenBatch, logits: Tensor, non_loss_data: bool = True) -> Tensor:
            return read(logits, microbatch)

        with torch.no_grad():
            return self._schedule(microbatches, collect, forward_only=True)

    def accumulate(self, microbatches: Sequence[TokenBatch], loss: Loss) -> list[dict[str, Any]]:
        """Run forward and backward over ``microbatches``; gradients are reduced over all ranks.

        ``loss`` returns shares of one batch loss: they are summed, over microbatches and data
        ranks. Megatron averages over both instead, so each share is scaled up by their number;
        data ranks may have different numbers of microbatches, unless they have different experts:
        then each pass is one of all of them. Context-parallel ranks return the same shares, each
        with its part of the gradient, and count once (``ContextPart.join``).

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

    def apply(self) -> tuple[float, float]:
        """Make one optimizer step on the accumulated gradients.

        Returns:
            The norm of the gradient before it was clipped, and the learning rate.
        """
        self.scheduler.step(1)
        lr = self.optimizer.param_groups[0]["lr"]
        _, grad_norm, _ = self.optimizer.step()
        self.weights_changed()
        return float(grad_norm), float(lr)

    def before_pass(self, batch: TokenBatch) -> None:
        """Called before each microbatch's forward pass."""

    def after_pass(self) -> None:
        """Called after it."""

    def weights_changed(self) -> None:
        """Call this after writing into weights or masters of a model that has computed."""

    def _schedule(
        self, microbatches: Sequence[TokenBatch], finish: Callable, *, forward_only: bool
    ) -> list:
        """Run Megatron's schedule (1F1B in a pipeline); ``finish`` sees the last stage's output.

        Pipeline stages tell each other the shapes to come only where there are several. (Given to
        TransformerConfig, the same switch would forbid the all-gather of tokens before experts, for
        the sake of ranks with experts and sequences of their own, which exchange them all to all.)
        """

        def step(batches: Iterator[TokenBatch], model: nn.Module) -> tuple[Tensor, Callable]:
            batch = next(batches)
            self.before_pass(batch)
            part = ContextPart.of(self.ranks.context, batch)
            logits = model(
                part.cut(batch.input_ids),
                part.cut(batch.positions),
                None,
                packed_seq_params=_packed(batch, split=self.ranks.context.size > 1),
            )
            self.after_pass()
            return logits, partial(finish, batch)

        rows, length = microbatches[0].input_ids.shape
        self.gpt.config.variable_seq_lengths = any(
            b.input_ids.shape != (rows, length) for b in microbatches
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

    @torch.no_grad()
    def write_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Give a parameter's master the FP32 value that BF16 rounded."""
        if parameter.dtype == torch.float32:
            return
        master = parameter.main_param  # type: ignore[attr-defined]  # by Megatron's optimizer
        if master is not None:
            master.copy_(value.flatten()[self.owned_range(parameter)])

    def masters(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield the FP32 values this rank's optimizer updates: name, value, whether it counts here.

        A rank has a flattened part of each, but all of FP32 weights. Over all ranks each value
        counts once, wherever else there are copies of it.
        """
        ranks = self.ranks
        for name, parameter in self.gpt.named_parameters():
            full = parameter.dtype == torch.float32
            master = parameter if full else parameter.main_param
            if master is None:
                continue
            split = getattr(parameter, "tensor_model_parallel", False)
            first = not full or ranks.copies_of(parameter).rank == 0
            counts = first and (split or ranks.tensor.rank == 0)
            yield name, master.detach(), counts and not getattr(parameter, "shared", False)

    def owned_range(self, parameter: nn.Parameter) -> slice:
        """Return the part of a flattened parameter this rank's optimizer updates; may be empty.

        The ranges of ``ranks.copies_of`` it make up the whole.
        """
        for optimizer in optimizer_parts(self.optimizer):
            if parameter in optimizer.model_param_gbuf_map:
                owned = optimizer._get_model_param_range_map(parameter)["param"]
                return slice(owned.start, owned.end)
        return slice(0, 0)


def _packed(batch: TokenBatch, *, split: bool) -> PackedSeqParams | None:
    """Return where sequences that lie end to end begin; padding belongs to the one before.

    Megatron divides the places by the number of context-parallel ranks itself. Transformer Engine's
    attention over these ranks wants to be told where there is padding between sequences: nowhere.
    """
    if batch.starts is None:
        return None
    starts = torch.tensor(batch.starts, dtype=torch.int32)
    longest = int(starts.diff().max())
    starts = starts.to(batch.input_ids.device)
    padded_starts = starts if split else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cu_seqlens_q_padded=padded_starts,
        cu_seqlens_kv_padded=padded_starts,
    )


def with_optimizer(
    gpt: GPTModel, config: TransformerConfig, optimizer: OptimizerConfig
) -> tuple[DistributedDataParallel, Any, OptimizerParamScheduler]:
    """Wrap a loaded model for data parallelism; return it, its optimizer and schedule."""
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=optimizer.overlap_grad_reduce,
            # Never: between an update and the next pass a rank's weights would be old but for its
            # own part, while the reference changes places with them, checkpoints and FP32 versions
            # read them, and the next pass would come too late for all of these.
            overlap_param_gather=False,
            # It would end one rank in the middle of a collective. The norm tells all of them.
            check_for_nan_in_grad=False,
        ),
        gpt,
    )
    megatron = MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.lr * optimizer.decay_to,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        bf16=config.params_dtype == torch.bfloat16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
        clip_grad=optimizer.clip_grad,
    )
    chained = get_megatron_optimizer(
        megatron,
        [ddp],
        config_overrides=get_standard_config_overrides(megatron),
        # Beside NCCL it wants gloo groups for host tensors; on a CPU the groups are gloo already.
        use_gloo_process_groups=torch.cuda.is_available(),
    )
    scheduler = schedule(chained, optimizer)
    _make_state(chained)
    config.grad_scale_func = chained.scale_loss
    # All but the last microbatch of an update only add up; that one sends each bucket when ready.
    config.no_sync_func = ddp.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return ddp, chained, scheduler


def optimizer_parts(optimizer: Any) -> list[Any]:
    """Return Megatron's optimizers, one for each kind of parameter; a single one is not chained."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _make_state(optimizer: Any) -> None:
    """Make Adam's moments now, where every kind of Adam would make them in its first step.

    Engines that share the GPU are sized by the memory they find free, and Megatron saves and loads
    moments as if they were there.
    """
    for part in optimizer_parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
    for state in torch_adam_states(optimizer):
        state["step"] = torch.tensor(0.0)


def torch_adam_states(optimizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the states of torch's Adam, where TE and apex bring no fused one.

    It counts steps per parameter; the fused ones count per group, from their first step.
    """
    for part in optimizer_parts(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            yield from part.optimizer.state.values()


def schedule(optimizer: Any, config: OptimizerConfig) -> OptimizerParamScheduler:
    """Return Megatron's learning-rate schedule, by updates: warm-up, then ``config.schedule``."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr * config.decay_to,
        lr_warmup_steps=config.warmup_steps,
        # One more, or the last update would be of no size where the rate decays to 0. "constant"
        # does not use it, but it must exceed the warm-up.
        lr_decay_steps=max(config.decay_steps, config.warmup_steps) + 1,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # The present recipe counts, not the one a checkpoint was written with.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
