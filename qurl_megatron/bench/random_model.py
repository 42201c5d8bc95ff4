"""Random Qwen2.5 checkpoints for benchmarks, written a tensor at a time.

``python -m qurl_megatron.bench.random_model 0.5B DIR``
"""

import sys
from pathlib import Path

# Layers, hidden, heads, KV heads, intermediate, vocabulary; 0.5B and 1.5B are Qwen2.5's own.
SIZES = {
    "tiny": (1, 64, 4, 2, 128, 256),
    "0.1B": (12, 512, 8, 2, 1408, 151936),
    "0.5B": (24, 896, 14, 2, 4864, 151936),
    "1.5B": (28, 1536, 12, 2, 8960, 151936),
}


def main(size: str, folder: Path) -> int:
    """Write a BF16 Hugging Face folder without a tokenizer."""
    import torch  # not for those who want to know the sizes

    from qurl_megatron.weights import read_arch
    from qurl_megatron.weights.checkpoint import hf_shapes, write_json
    from qurl_megatron.weights.hf_writer import Group, TensorSpec, plan_files, write_safetensors

    layers, hidden, heads, kv_heads, intermediate, vocab = SIZES[size]
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    shapes = hf_shapes(read_arch(config))

    def make(name: str) -> dict[str, torch.Tensor]:
        return {name: torch.randn(shapes[name], dtype=torch.bfloat16).mul_(0.02)}

    specs = [TensorSpec(name, shape, torch.bfloat16) for name, shape in shapes.items()]
    (file,) = plan_files([Group(spec.name, (spec,)) for spec in specs], 5 << 30)
    write_safetensors(folder / file.name, file.groups, make)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
