"""What this package relies on in packages that change under it: a row each.

``takes`` are arguments of a function or a constructor, ``says`` words that a module has as strings,
fields or attributes: endpoints, options. Both are written as words of one string.
"""

import inspect
from dataclasses import dataclass

from tests.contracts.source import Gone, Sources
from tests.support.transformer_engine import MODULES


@dataclass(frozen=True)
class Row:
    package: str
    path: str
    takes: str = ""
    says: str = ""


def _mc(path: str, takes: str = "", says: str = "") -> Row:
    return Row("megatron-core", f"megatron.core.{path}", takes, says)


def _sg(path: str, takes: str = "", says: str = "") -> Row:
    return Row("sglang", f"sglang.srt.{path}", takes, says)


def _te(path: str, takes: str = "", says: str = "") -> Row:
    return Row("transformer-engine", f"transformer_engine.{path}", takes, says)


def _mo(path: str, takes: str = "") -> Row:
    return Row("nvidia-modelopt", f"modelopt.torch.{path}", takes)


def _stand_in() -> list[Row]:
    """All that the tests' stand-in has, with the arguments it takes."""
    rows = []
    for module, content in MODULES.items():
        rows.append(Row("transformer-engine", module))
        for source, name in content:
            entry, takes = getattr(source, name), []
            if inspect.isfunction(entry) or "__init__" in vars(entry):
                for parameter in inspect.signature(entry).parameters.values():
                    if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                        takes.append(parameter.name)
            rows.append(Row("transformer-engine", f"{module}.{name}", " ".join(takes)))
    return rows


_DISTRIBUTED = "optimizer.distrib_optimizer.DistributedOptimizer"
_CHECKPOINTS = "dist_checkpointing"
_TE = "extensions.transformer_engine"
_LINEAR = "input_size output_size config init_method bias skip_bias_add"

MEGATRON = [
    # runtime
    _mc(
        "parallel_state.initialize_model_parallel",
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
        "create_gloo_process_groups",
    ),
    _mc("parallel_state.get_tensor_model_parallel_group"),
    _mc("parallel_state.get_pipeline_model_parallel_group"),
    _mc("parallel_state.get_context_parallel_group"),
    _mc("parallel_state.get_data_parallel_group", "with_context_parallel"),
    _mc("parallel_state.destroy_model_parallel"),
    _mc("tensor_parallel.model_parallel_cuda_manual_seed", "seed force_reset_rng"),
    # the CPU shim's places
    _mc("pipeline_parallel.schedules"),
    _mc("fusions.fused_cross_entropy.fused_vocab_parallel_cross_entropy"),
    _mc("optimizer.optimizer.Float16OptimizerWithFloat16Params"),
    _mc("optimizer.clip_grads.clip_grad_by_total_norm_fp32"),
    _mc("dist_checkpointing.exchange_utils"),
    _mc("models.common.embeddings.rope_utils"),
    _mc("tensor_parallel.random._get_cuda_rng_state"),
    _mc("tensor_parallel.random._set_cuda_rng_state"),
    # model
    _mc(
        "models.gpt.GPTModel",
        "config transformer_layer_spec vocab_size max_sequence_length pre_process post_process "
        "parallel_output share_embeddings_and_output_weights position_embedding_type rotary_base "
        "rope_scaling rope_scaling_factor",
    ),
    _mc("models.gpt.GPTModel.forward", "input_ids position_ids attention_mask packed_seq_params"),
    _mc(
        "models.gpt.gpt_layer_specs.get_gpt_layer_local_spec",
        "num_experts moe_grouped_gemm normalization qk_layernorm",
    ),
    _mc(
        "models.gpt.gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec",
        "num_experts moe_grouped_gemm qk_layernorm",
    ),
    _mc(
        "packed_seq_params.PackedSeqParams",
        "qkv_format cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv cu_seqlens_q_padded "
        "cu_seqlens_kv_padded",
    ),
    _mc("process_groups_config.ProcessGroupCollection.cp"),
    _mc("transformer.module.MegatronModule", "config"),
    _mc("transformer.moe.router.TopKRouter.gating", "input"),
    _mc("transformer.spec_utils.ModuleSpec"),
    _mc("transformer.transformer_block.TransformerBlockSubmodules", "layer_specs layer_norm"),
    _mc(
        "transformer.TransformerConfig",
        "num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size "
        "normalization layernorm_epsilon activation_func "
        "gated_linear_unit add_bias_linear "
        "add_qkv_bias qk_layernorm hidden_dropout attention_dropout tensor_model_parallel_size "
        "pipeline_model_parallel_size context_parallel_size sequence_parallel params_dtype "
        "pipeline_dtype bf16 recompute_granularity recompute_method recompute_num_layers "
        "perform_initialization use_cpu_initialization bias_activation_fusion bias_dropout_fusion "
        "apply_rope_fusion masked_softmax_fusion gradient_accumulation_fusion persist_layer_norm "
        "deallocate_pipeline_outputs no_sync_func grad_scale_func finalize_model_grads_func "
        "variable_seq_lengths num_moe_experts moe_ffn_hidden_size moe_router_topk "
        "moe_router_pre_softmax moe_router_load_balancing_type moe_aux_loss_coeff "
        "moe_token_dispatcher_type moe_grouped_gemm",
    ),
    # logits in FP32, and layers that compute with the engines' codes
    _mc("tensor_parallel.layers.ColumnParallelLinear._forward_impl", "input weight"),
    _mc("tensor_parallel.layers.RowParallelLinear._forward_impl", "input weight"),
    _mc(
        "tensor_parallel.layers.linear_with_grad_accumulation_and_async_allreduce",
        "sequence_parallel allreduce_dgrad tp_group",
    ),
    _mc(
        "tensor_parallel.gather_from_sequence_parallel_region", "tensor_parallel_output_grad group"
    ),
    _mc("tensor_parallel.set_tensor_model_parallel_attributes", "tensor is_parallel dim stride"),
    # Transformer Engine's layers
    _mc(f"{_TE}.TEColumnParallelLinear", _LINEAR),
    _mc(f"{_TE}.TERowParallelLinear", _LINEAR),
    _mc(f"{_TE}.TELayerNormColumnParallelLinear", _LINEAR),
    _mc(f"{_TE}.TEDotProductAttention", "config layer_number attn_mask_type cp_comm_type"),
    _mc(f"{_TE}.TENorm"),
    _mc(f"{_TE}.fused_apply_rotary_pos_emb", "t freqs"),
    _mc(f"{_TE}.fused_apply_rotary_pos_emb_thd", "t cu_seqlens freqs cp_size cp_rank"),
    # training
    _mc("distributed.DistributedDataParallel", "config ddp_config module"),
    _mc("distributed.DistributedDataParallel.zero_grad_buffer"),
    _mc("distributed.DistributedDataParallel.no_sync"),
    _mc(
        "distributed.DistributedDataParallelConfig",
        "grad_reduce_in_fp32 use_distributed_optimizer overlap_grad_reduce overlap_param_gather "
        "check_for_nan_in_grad bucket_size",
    ),
    _mc("distributed.finalize_model_grads"),
    _mc(
        "optimizer.OptimizerConfig",
        "optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps bf16 params_dtype "
        "use_distributed_optimizer clip_grad",
    ),
    _mc(
        "optimizer.get_megatron_optimizer",
        "config model_chunks config_overrides use_gloo_process_groups",
    ),
    _mc("optimizer.get_standard_config_overrides", "config"),
    _mc(f"{_DISTRIBUTED}._get_model_param_range_map", "param"),
    _mc(f"{_DISTRIBUTED}._get_main_param_and_optimizer_states", "model_param"),
    _mc(
        f"{_DISTRIBUTED}.sharded_param_state_fully_reshardable",
        "model_sharded_state_dict is_loading metadata",
    ),
    _mc(f"{_DISTRIBUTED}.load_parameter_state_from_fully_reshardable"),
    _mc("optimizer.distrib_optimizer", says="model_param_gbuf_map"),
    _mc(
        "optimizer_param_scheduler.OptimizerParamScheduler",
        "optimizer init_lr max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style start_wd "
        "end_wd wd_incr_steps wd_incr_style use_checkpoint_opt_param_scheduler "
        "override_opt_param_scheduler",
    ),
    _mc("pipeline_parallel.get_forward_backward_func"),
    _mc(
        "pipeline_parallel.schedules.forward_backward_no_pipelining",
        "forward_step_func data_iterator model num_microbatches seq_length micro_batch_size "
        "forward_only collect_non_loss_data",
    ),
    # checkpoints
    _mc(f"{_CHECKPOINTS}.save", "sharded_state_dict checkpoint_dir content_metadata"),
    _mc(f"{_CHECKPOINTS}.load", "sharded_state_dict checkpoint_dir"),
    _mc(f"{_CHECKPOINTS}.load_common_state_dict"),
    _mc(f"{_CHECKPOINTS}.core.CheckpointingException"),
    _mc(f"{_CHECKPOINTS}.dict_utils.nested_values", "x"),
    _mc(f"{_CHECKPOINTS}.mapping.is_main_replica", "replica_id"),
    _mc(f"{_CHECKPOINTS}.mapping.ShardedObject", "key data global_shape global_offset replica_id"),
    _mc(f"{_CHECKPOINTS}.serialization.get_default_load_sharded_strategy"),
    _mc(f"{_CHECKPOINTS}.strategies.async_utils.AsyncRequest"),
    _mc(f"{_CHECKPOINTS}.strategies.filesystem_async._results_queue"),
    _mc(
        f"{_CHECKPOINTS}.strategies.filesystem_async.FileSystemWriterAsync.write_preloaded_data",
        "transform_list local_proc_idx write_bucket results_queue count_queue use_fsync",
    ),
    _mc(
        f"{_CHECKPOINTS}.strategies.torch.TorchDistSaveShardedStrategy.async_save",
        "sharded_state_dict checkpoint_dir",
    ),
    _mc(f"{_CHECKPOINTS}.strategies.fully_parallel.FullyParallelLoadStrategyWrapper"),
    _mc(f"{_CHECKPOINTS}.strategies.fully_parallel.FullyParallelSaveStrategyWrapper"),
    _mc(f"{_CHECKPOINTS}.utils.add_prefix_for_sharding"),
]

TRANSFORMER_ENGINE = [
    *_stand_in(),
    # Megatron reads or sets these where the stand-in has no class of its own for them.
    _te("pytorch.module.base.TransformerEngineBaseModule.set_tensor_parallel_group"),
    _te("pytorch.module.base.TransformerEngineBaseModule.get_extra_state"),
    _te("pytorch.module.linear", says="fuse_wgrad_accumulation"),
    _te("pytorch.module.layernorm_linear", says="fuse_wgrad_accumulation layer_norm_bias"),
    _te("pytorch.Linear.forward", "inp is_first_microbatch"),
    _te("pytorch.LayerNormLinear.forward", "inp is_first_microbatch"),
    _te(
        "pytorch.DotProductAttention.forward",
        "query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv "
        "cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type",
    ),
    _te("pytorch.DotProductAttention.set_context_parallel_group"),
    _te("pytorch.optimizers.FusedAdam.initialize_state", "param store_param_remainders"),
    _te("pytorch.optimizers.FusedAdam.step"),
    _te("pytorch.optimizers.FusedAdam.set_scaled_state", "param state_name unscaled_state"),
    # quantize.py --backend te
    _te(
        "pytorch.tensor.float8_blockwise_tensor.Float8BlockQuantizer",
        "fp8_dtype rowwise columnwise amax_epsilon force_pow_2_scales block_scaling_dim",
    ),
]

_IO = "managers.io_struct"

SGLANG = [
    _sg("entrypoints.http_server.app"),
    _sg("entrypoints.http_server.launch_server"),
    _sg("entrypoints.engine.init_tokenizer_manager"),
    _sg("plugins.load_plugins"),
    _sg("runtime_context.get_context"),
    _sg("server_args.prepare_server_args"),
    _sg("server_args.ServerArgs.resolve_once"),
    _sg("entrypoints", says="/v1/loads"),
    _sg(
        "entrypoints.http_server",
        says="/health /server_info /model_info /generate /pause_generation /continue_generation "
        "/flush_cache /abort_request /begin_weight_update /end_weight_update "
        "/update_weights_from_tensor /update_weight_version /release_memory_occupation "
        "/resume_memory_occupation",
    ),
    _sg(
        f"{_IO}.GenerateReqInput",
        "input_ids sampling_params return_logprob logprob_start_len rid extra_key",
    ),
    _sg(f"{_IO}.PauseGenerationReqInput", "mode"),
    _sg(f"{_IO}.AbortReq", "rid abort_all"),
    _sg(
        f"{_IO}.UpdateWeightsFromTensorReqInput", "serialized_named_tensors load_format flush_cache"
    ),
    _sg(f"{_IO}.UpdateWeightVersionReqInput", "new_version abort_all_requests"),
    _sg(f"{_IO}.ReleaseMemoryOccupationReqInput", "tags"),
    _sg(f"{_IO}.ResumeMemoryOccupationReqInput", "tags"),
    _sg(
        "arg_groups.fields",
        says="model_path dtype tp_size host port skip_tokenizer_init load_format "
        "json_model_override_args custom_weight_loader base_gpu_id enable_memory_saver "
        "enable_fp32_lm_head mem_fraction_static device attention_backend max_total_tokens "
        "max_running_requests sleep_on_idle skip_server_warmup",
    ),
    # the engine without a GPU
    _sg("configs.update_config"),
    _sg("platforms.cpu.CpuDeviceMixin"),
    _sg("managers.scheduler.Scheduler.maybe_sleep_on_idle"),
    _sg("layers.quantization.w8a8_int8.W8A8Int8LinearMethod.apply"),
    _sg("layers.quantization.w8a8_fp8.W8A8Fp8LinearMethod.apply"),
    _sg("layers.quantization.compressed_tensors.compressed_tensors.CompressedTensorsConfig"),
]

MODELOPT = [
    _mo("export.quant_utils.get_scaling_factor", "quantizer"),
    _mo("export.quant_utils.to_quantized_weight", "weight block_size"),
    _mo("export.quant_utils.QUANTIZATION_INT8_SQ"),
    _mo("export.quant_utils.QUANTIZATION_FP8_PC_PT"),
    _mo("export.quant_utils.QUANTIZATION_FP8_PB_WO"),
    _mo("quantization.config.QuantizerAttributeConfig", "num_bits axis block_sizes"),
    _mo("quantization.nn.TensorQuantizer.disable_quant"),
    _mo("quantization.nn.TensorQuantizer.enable_calib"),
    _mo("quantization.nn.TensorQuantizer.load_calib_amax"),
]

ROWS = [*MEGATRON, *TRANSFORMER_ENGINE, *SGLANG, *MODELOPT]


def missing(row: Row, found: Sources) -> str:
    """What a release lacks of a row; empty where it has all."""
    try:
        if row.says:
            lacking = set(row.says.split()) - found.says(row.path)
        else:
            place = found.find(row.path)
            lacking = set(row.takes.split())
            if lacking:
                taken = found.arguments(place)
                lacking = lacking - taken if "**" not in taken else set()
    except Gone as gone:
        return str(gone)
    if not lacking:
        return ""
    return f"{row.path} has no {', '.join(sorted(lacking))}"
