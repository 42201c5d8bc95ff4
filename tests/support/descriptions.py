"""A small recipe, and the config.json of a small model."""

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
