"""Quantize a checkpoint, Hugging Face or Megatron, into a W8A8 folder that engines load.

Weights are quantized one tensor at a time from the widest numbers there are: the FP32 masters of a
Megatron checkpoint, else what is stored. Activations are quantized by the engine, per token.

  scheme       format                read by
  int8, fp8    compressed-tensors    SGLang, vLLM, transformers (with compressed-tensors)
  int8, fp8    sglang                SGLang
  fp8_block    compressed-tensors    SGLang, vLLM, transformers
  fp8_block    sglang                SGLang, vLLM
  fp8 (both)   modelopt              vLLM
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its inspect.py would hide Python's own

from qurl_megatron.checkpoints.commands import add_quantize_options, parser, quantize, run_main


def main(argv: list[str] | None = None) -> int:
    command = parser(
        __doc__,
        "quantize.py --model Qwen2.5-14B --scheme int8 --format compressed-tensors --out qwen-int8",
    )
    add_quantize_options(command)
    return run_main(quantize, command, argv)


if __name__ == "__main__":
    sys.exit(main())
