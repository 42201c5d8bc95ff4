"""The models that benchmarks take, and random Qwen2.5 checkpoints, written a tensor at a time.

``--model`` is a shape of the table below, a folder of ``launch/models`` or any other folder with a
config.json. Where no weights are at hand random ones do: their values change no bytes and no times.
"""

from pathlib import Path
from typing import Any

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.shipped import ROOT

# Layers, hidden, heads, KV heads, intermediate, vocabulary; 0.5B and 1.5B are Qwen2.5's own.
SIZES = {
    "tiny": (1, 64, 4, 2, 128, 256),
    "h1024": (8, 1024, 16, 4, 2816, 128),
    "0.5B": (24, 896, 14, 2, 4864, 151936),
    "1.5B": (28, 1536, 12, 2, 8960, 151936),
    "7B": (28, 3584, 28, 4, 18944, 152064),
    "14B": (48, 5120, 40, 8, 13824, 152064),
    "32B": (64, 5120, 40, 8, 27648, 152064),
}
UNTIED = ("h1024", "7B", "14B", "32B")  # have an output layer apart from the embedding
MODELS = ROOT / "launch/models"


def config_of(model: str) -> dict[str, Any]:
    """The config.json of a shape's name, or of a folder.

    Raises:
        ConfigError: there is neither.
    """
    from qurl_megatron.tensors.arch import read_config

    if model in SIZES:
        return qwen2(model)
    for folder in (Path(model), MODELS / model):
        if (folder / "config.json").is_file():
            return read_config(folder)
    shipped = sorted(path.name for path in MODELS.glob("*") if path.is_dir())
    raise ConfigError(
        f"--model {model} is neither a folder with a config.json nor a known shape; "
        f"known: {', '.join([*SIZES, *shipped])}"
    )


def qwen2(size: str) -> dict[str, Any]:
    """config.json of a shape."""
    layers, hidden, heads, kv_heads, intermediate, vocab = SIZES[size]
    return {
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
        "tie_word_embeddings": size not in UNTIED,
        "torch_dtype": "bfloat16",
    }


def write_random(config: dict[str, Any], folder: Path) -> None:
    """Write a BF16 Hugging Face folder without a tokenizer."""
    import torch  # not for those who want to know the sizes

    from qurl_megatron.checkpoints.huggingface import TensorSpec, write_safetensors
    from qurl_megatron.checkpoints.ops import hf_shapes
    from qurl_megatron.checkpoints.places import SINGLE
    from qurl_megatron.checkpoints.source import write_json
    from qurl_megatron.tensors.arch import read_arch

    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    shapes = hf_shapes(read_arch(config))

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16).mul_(0.02)

    specs = [TensorSpec(name, shape, torch.bfloat16) for name, shape in shapes.items()]
    tensors = ((name, random(shape)) for name, shape in shapes.items())
    write_safetensors(folder / SINGLE, specs, tensors)
