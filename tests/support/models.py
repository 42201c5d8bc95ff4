"""Tiny random Hugging Face checkpoints of each family, and made-up samples to train on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qurl_megatron.types import Prompt, Sample

FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "qwen2_moe")

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

_CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 32},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}


def tiny_checkpoint(folder: Path, family: str, **changes: Any) -> Path:
    """Save a random FP32 model of ``family``, its weights large enough that logits differ widely.

    Args:
        changes: keys of the Hugging Face config, e.g. ``tie_word_embeddings=True``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**_SIZES, "tie_word_embeddings": False, **_CHANGES.get(family, {}), **changes}
    generator = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **sizes), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(noise + (1.0 if parameter.ndim == 1 else 0.0))
    model.save_pretrained(folder)
    return folder


def in_float64(folder: Path) -> Any:
    """Return the model of transformers, for a reference."""
    from transformers import AutoModelForCausalLM

    # Other implementations of experts have no float64.
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )


def as_stored(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of a transformers model as its checkpoint has them.

    In memory a layer's experts are one tensor of gates on ups and one of downs; stored, each expert
    has three tensors of its own.
    """
    stored = {}
    for name, value in parameters.items():
        block, experts, kind = name.partition("mlp.experts.")
        if not experts:
            stored[name] = value
            continue
        for index, expert in enumerate(value):
            prefix = f"{block}{experts}{index}."
            if kind == "gate_up_proj":
                gate, up = expert.chunk(2)
                stored |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
            else:
                stored[f"{prefix}{kind}.weight"] = expert
    return stored


def with_routes(samples: Sequence[Sample], layers: int, experts: int, k: int) -> list[Sample]:
    """The samples with experts drawn at random; every third one lacks those of its last tokens."""
    generator, routed = np.random.default_rng(1), []
    for index, sample in enumerate(samples):
        tokens = len(sample.prompt.input_ids) + len(sample.response_ids) - (2 if index % 3 else 4)
        draws = generator.random((max(tokens, 0), layers, experts))
        routes = draws.argsort(-1)[..., :k].astype(np.uint8) + np.uint8(1)
        routed.append(replace(sample, routes=routes))
    return routed


def random_samples(count: int, *, vocab: int = 128, seed: int = 0) -> list[Sample]:
    """Samples of uneven lengths with behaviour log-probs and rewards drawn at random.

    Of every second one the policy did not write the middle.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, size: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high, (size,), generator=generator).tolist())

    samples = []
    for index in range(count):
        prompt_length, response_length = integers(3, 9, 1)[0], integers(1, 12, 1)[0]
        log_probs = (-5 * torch.rand(response_length, generator=generator)).tolist()
        mine = [index % 2 == 0 or 3 * t // response_length != 1 for t in range(response_length)]
        samples.append(
            Sample(
                prompt=Prompt(index, integers(0, vocab, prompt_length), "", ""),
                response_ids=np.array(integers(0, vocab, response_length), np.int32),
                behaviour_log_probs=np.array(log_probs, np.float32),
                finish_reason="stop",
                versions=((0, sum(mine)),),
                reward=float(integers(0, 2, 1)[0]),
                written=np.array(mine),
            )
        )
    return samples
