"""The critic: a policy's body with one output per position, the return it expects from there on.

Shapes: s = sequence (this tensor rank's part of it under sequence parallelism), b = responses of a
microbatch, H = hidden size.
"""

from dataclasses import replace

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from qurl_megatron.actor.build import build_model, load_weights, transformer_config
from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.actor.trained import Trained, with_optimizer
from qurl_megatron.checkpoints.source import open_checkpoint
from qurl_megatron.config import ModelConfig, OptimizerConfig, ParallelConfig


class Critic(Trained):
    """A Megatron value model. Its output is [B, S, 1], in FP32, on the last pipeline stage."""

    @staticmethod
    def build(
        model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig, ranks: Ranks
    ) -> "Critic":
        """Load the body of ``model.path`` under a head of zeros.

        No engine ever runs it, so no UAQ factor is folded in, and one that a checkpoint has is
        taken out.

        Args:
            optimizer: with the critic's own learning rate and warm-up.

        Raises:
            ConfigError: the checkpoint is unusable.
        """
        source = open_checkpoint(model.path)
        arch = replace(source.arch, tied=False)  # there is no output layer to tie
        config = transformer_config(arch, model, parallel)
        gpt = build_model(arch, config, ranks)
        if ranks.last_stage:
            gpt.output_layer = ValueHead(config, ranks)
        fp32 = load_weights(
            gpt, arch, ranks, source.reader, 1.0 / source.uaq_scale, output_layer=False
        )
        trained = Critic(ranks, *with_optimizer(gpt, config, optimizer))
        for name, parameter in gpt.named_parameters():
            if name in fp32:  # the head's zeros are no different in FP32
                trained.write_master(parameter, fp32.pop(name))
        return trained


class ValueHead(nn.Module):
    """Hidden states to values, in place of GPTModel's output layer and with its signature.

    It begins with zeros: every value is 0, so the first advantages are the returns themselves.
    Random weights would add to them values of the size of a reward that mean nothing. The body
    gets its first gradient once the head has moved, one update later.
    """

    def __init__(self, config: TransformerConfig, ranks: Ranks) -> None:
        super().__init__()
        like = dict(dtype=config.params_dtype, device=ranks.device)
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, **like))
        self.bias = nn.Parameter(torch.zeros(1, **like))
        self.sequence_parallel = config.sequence_parallel
        self.group = ranks.tensor.group
        for parameter in self.parameters():
            # Each tensor rank sees a part of the sequence, so Megatron must sum the gradients over
            # them. Without sequence parallelism all have the whole gradient, which it must not sum.
            # The attribute is Megatron's addition to a parameter.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, weight=None, runtime_gather_output=None) -> tuple:
        """[s, b, H] -> ([S, b, 1] FP32, None): equal values on all tensor ranks."""
        values = functional.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            # Values are gathered, not the hidden states, which are H times as large. All ranks
            # compute the same loss, so each takes its own part of the gradient: no sum.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.group
            )
        return values, None
