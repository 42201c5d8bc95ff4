"""Hugging Face -> W8A8 INT8 by llm-compressor's model-free quantization.

``python -m benchmarks.peers.through_llmcompressor HF OUT``
"""

import sys


def main(hf: str, out: str) -> int:
    from llmcompressor import model_free_ptq

    model_free_ptq(hf, out, scheme="W8A8", ignore=["lm_head", "re:.*embed_tokens"], device="cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
