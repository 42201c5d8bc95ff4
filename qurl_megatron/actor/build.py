"""From an ``Arch`` to one rank's part of a GPTModel, with weights."""

import importlib
import re
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional

from qurl_megatron.actor.aligned import Align, aligned_layers
from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.actor.spec import decoder_spec
from qurl_megatron.checkpoints.ops import Op, stage_ops
from qurl_megatron.checkpoints.source import Reader
from qurl_megatron.checkpoints.uaq import folded
from qurl_megatron.config import ModelConfig, ParallelConfig
from qurl_megatron.config.env import use_transformer_engine
from qurl_megatron.data.dealing import round_up
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import Arch, Experts

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
_GROUPED = re.compile(r"local_experts\.(\d+)\.(linear_fc\d)\.weight$")  # of Transformer Engine


def transformer_config(
    arch: Arch, model: ModelConfig, parallel: ParallelConfig
) -> TransformerConfig:
    """Return Megatron's configuration of this model; only Transformer Engine brings fused kernels.

    Raises:
        ConfigError: ``parallel.expert_dispatcher`` needs what this machine lacks.
    """
    dtype = getattr(torch, model.dtype)
    gpu = use_transformer_engine()
    recompute: dict[str, Any] = {}
    if model.recompute:
        recompute = dict(recompute_granularity="full", recompute_method="uniform")
        recompute["recompute_num_layers"] = 1
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.intermediate,
        normalization="RMSNorm",
        layernorm_epsilon=arch.rms_eps,
        activation_func=functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.tensor > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights come from a checkpoint: nothing is drawn.
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        bias_activation_fusion=gpu,
        bias_dropout_fusion=gpu,
        # Megatron's own rotation rounds sines and cosines to BF16, as transformers do and as SGLang
        # does without a GPU, and fetches the lengths of packed sequences from the GPU in every
        # layer. The fused one waits for nothing and rotates in FP32, as SGLang does on GPUs.
        apply_rope_fusion=gpu,
        masked_softmax_fusion=False,
        # Would want apex for the output layer; see ``_accumulate_in_place`` for the others.
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=True,
        **recompute,
        **_expert_options(arch.experts, parallel),
    )


def _expert_options(experts: Experts | None, parallel: ParallelConfig) -> dict[str, Any]:
    """Every token reaches the experts its router chose: none is dropped.

    The router computes in the dtype of the model, as transformers and engines do; in FP32 it would
    choose other experts than they where two are nearly equal.
    """
    if experts is None:
        return {}
    # Where each rank holds a slice of every expert, tokens are gathered before they are copied
    # to their top_k experts; "alltoall" sends every copy, but to one rank alone.
    dispatcher = {"moe_token_dispatcher_type": "allgather" if parallel.expert == 1 else "alltoall"}
    if parallel.expert_dispatcher != "alltoall":
        _refuse_without_deep_ep(parallel.expert_dispatcher)
        dispatcher = {
            "moe_token_dispatcher_type": "flex",
            "moe_flex_dispatcher_backend": parallel.expert_dispatcher,
        }
    return dict(
        num_moe_experts=experts.count,
        moe_ffn_hidden_size=experts.intermediate,
        moe_router_topk=experts.top_k,
        # Softmax over the chosen ones is softmax over all of them, made to sum to one.
        moe_router_pre_softmax=not experts.norm_topk_prob,
        moe_shared_expert_intermediate_size=experts.shared or None,
        moe_shared_expert_gate=experts.shared > 0,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        moe_grouped_gemm=use_transformer_engine(),
        **dispatcher,
    )


def _refuse_without_deep_ep(dispatcher: str) -> None:
    """Raise ``ConfigError`` unless this rank has a GPU and the library that a dispatcher needs."""
    setting = f"parallel.expert_dispatcher={dispatcher}"
    if not torch.cuda.is_available():
        raise ConfigError(f"{setting} needs GPUs, and there is none; leave it out")
    try:
        library: Any = importlib.import_module("deep_ep")
    except ImportError as error:
        raise ConfigError(f"{setting} needs the library deep_ep ({error}); leave it out") from None
    kernels = {"deepep": "Buffer", "hybridep": "HybridEPBuffer"}[dispatcher]
    if not hasattr(library, kernels):
        raise ConfigError(
            f"{setting} needs {kernels} of the library deep_ep, which the installed version lacks; "
            "install another one"
        )


def build_model(
    arch: Arch,
    config: TransformerConfig,
    ranks: Ranks,
    *,
    fp32_output: bool = False,
    align: Align | None = None,
) -> GPTModel:
    """Build this rank's part of the model, with undefined weights, on its device.

    Args:
        fp32_output: leave logits in FP32, whatever the format of weights and hidden states.
        align: how its linear layers follow the engines', once they are given codes.
    """
    model = GPTModel(
        config,
        decoder_spec(config, qk_norm=arch.qk_norm, align=align),
        vocab_size=padded_vocab(arch, ranks),
        max_sequence_length=arch.max_position,
        pre_process=ranks.first_stage,
        post_process=ranks.last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
        rope_scaling=arch.rope_scaling is not None,
        rope_scaling_factor=arch.rope_scaling.factor if arch.rope_scaling else 8.0,
    )
    if fp32_output and ranks.last_stage:
        model.output_layer._forward_impl = _wide_logits
    _accumulate_in_place(model)
    return model.to(ranks.device)


def _wide_logits(
    input: Tensor, weight: Tensor, *, sequence_parallel: bool, tp_group: Any, **_: Any
) -> Tensor:
    """Compute FP32 logits in place of an output layer's product; its arguments are Megatron's."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    return _WideProduct.apply(input, weight)


class _WideProduct(torch.autograd.Function):
    """[s, b, H] hidden states times the output layer [v, H], summed and left in FP32.

    SGLang's --enable-fp32-lm-head computes so: on a GPU by a product of BF16 numbers, which is as
    fast as one with a BF16 result, elsewhere by one of the same numbers in FP32. The backward
    products take a gradient in the weight's format, as those of BF16 logits do.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_vH: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight_vH)
        hidden_TH = hidden.flatten(0, 1)
        if hidden.is_cuda and hidden.dtype == torch.bfloat16:
            logits_Tv = torch.mm(hidden_TH, weight_vH.t(), out_dtype=torch.float32)
        else:
            logits_Tv = hidden_TH.float() @ weight_vH.float().t()
        return logits_Tv.view(*hidden.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight_vH = ctx.saved_tensors
        gradient_Tv = gradient.to(weight_vH.dtype).flatten(0, 1)
        of_hidden = (gradient_Tv @ weight_vH).view(hidden.shape)
        return of_hidden, gradient_Tv.t() @ hidden.flatten(0, 1)


def _accumulate_in_place(model: GPTModel) -> None:
    """Let Transformer Engine's layers add weight gradients to the FP32 sum in their own product.

    Otherwise each microbatch's gradient is rounded to BF16 first, and takes memory and another pass
    over the sum. Megatron's switch would include its own output layer, which wants apex for it.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def padded_vocab(arch: Arch, ranks: Ranks) -> int:
    """Return the vocabulary rounded up to a multiple of the tensor-parallel size."""
    return round_up(arch.vocab, ranks.tensor.size)


def parameter_ops(arch: Arch, ranks: Ranks, *, aligned: bool = False) -> dict[str, Op]:
    """Return the op behind each parameter this rank holds, by the local name GPTModel gives it.

    Megatron numbers layers from 0 on every pipeline stage, and experts on every rank; ops carry
    global numbers. Transformer Engine has the weights of all experts in one module.

    Args:
        aligned: the layers are ``aligned``: norms have parameters of their own everywhere.
    """
    per_stage = arch.num_layers // ranks.pipeline.size
    layers = range(ranks.pipeline.rank * per_stage, (ranks.pipeline.rank + 1) * per_stage)
    fused = use_transformer_engine() and not aligned
    ops = stage_ops(
        arch,
        layers,
        first=ranks.first_stage,
        last=ranks.last_stage,
        fused_norms=fused,
    )
    experts = range(0)
    if arch.experts:
        count = arch.experts.count // ranks.expert.size
        experts = range(ranks.expert.rank * count, (ranks.expert.rank + 1) * count)
    named = {}
    for op in ops:
        expert = _EXPERT.search(op.megatron)
        if expert is None or int(expert[0]) in experts:
            name = _LAYER.sub(lambda number: str(int(number[0]) - layers.start), op.megatron)
            name = _EXPERT.sub(lambda number: str(int(number[0]) - experts.start), name)
            named[_GROUPED.sub(r"\2.weight\1", name) if fused else name] = op
    return named


def load_weights(
    model: GPTModel,
    arch: Arch,
    ranks: Ranks,
    reader: Reader,
    uaq_scale: float,
    *,
    output_layer: bool = True,
) -> dict[str, torch.Tensor]:
    """Copy a Hugging Face checkpoint into this rank's parameters.

    Args:
        output_layer: False leaves the output layer as it is; the checkpoint need not have one.

    Returns:
        The same values in FP32 by local name, for the master weights, which BF16 would round.

    Raises:
        ConfigError: the checkpoint lacks a tensor or has one of another shape than its config says.
    """
    ops = parameter_ops(arch, ranks, aligned=bool(aligned_layers(model)))
    parameters = dict(model.named_parameters())
    if not output_layer:
        ops.pop("output_layer.weight", None)
        parameters = {k: p for k, p in parameters.items() if not k.startswith("output_layer.")}
    assert ops.keys() == parameters.keys(), (
        f"no op or no parameter: {ops.keys() ^ parameters.keys()}"
    )
    loaded = {}
    for name, parameter in parameters.items():
        split = ranks.splits(parameter)
        slices = reader.shards(
            ops[name], rank=split.rank, size=split.size, padded_vocab=padded_vocab(arch, ranks)
        )
        value = ops[name].to_megatron(
            {name: folded(name, part.float(), uaq_scale) for name, part in slices.items()}
        )
        if value.shape != parameter.shape:
            names = ", ".join(slices)
            raise ConfigError(
                f"{names} in {reader.folder} make up shape {list(value.shape)}, "
                f"config.json says {list(parameter.shape)}"
            )
        with torch.no_grad():
            parameter.copy_(value)
        _mark_split(parameter, ops[name])
        loaded[name] = value
    return loaded


def _mark_split(parameter: torch.nn.Parameter, op: Op) -> None:
    """Tell Megatron that the tensor ranks hold different parts of a parameter.

    It marks weights only while it initialises them, which is switched off here; an unmarked one
    counts as a copy, and the gradient norm would leave out all shards but the first.
    """
    split_dim = op.hf[0].split_dim
    if split_dim is not None and not getattr(parameter, "tensor_model_parallel", False):
        set_tensor_model_parallel_attributes(parameter, True, split_dim, stride=len(op.hf))
