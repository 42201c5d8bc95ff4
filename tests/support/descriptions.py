"""A small recipe, and the config.json of small models."""

RECIPE_TEXT = """
[model]
path = "m"
[data]
task = "chain_sum"
task_args = { min_terms = 2, max_terms = 2 }
prompts_per_step = 8
[optimizer]
lr = 1e-6
"""

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128,
    "qurl": {"uaq_scale": 1.5, "dtype": "bfloat16"},
}

QWEN3_MOE = {
    **{"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
}
