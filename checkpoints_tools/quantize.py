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

import argparse
from pathlib import Path

from qurl_megatron.checkpoints.convert_command import (
    add_folder_options,
    convert,
    file_bytes,
    parser,
    run_main,
    torch_dtype,
)
from qurl_megatron.schemes import EXPORTED


def main(argv: list[str] | None = None) -> int:
    command = parser(
        __doc__,
        "quantize.py --model Qwen2.5-14B --scheme int8 --format compressed-tensors --out qwen-int8",
    )
    command.add_argument("--model", type=Path, required=True, help="checkpoint of either kind")
    command.add_argument("--scheme", choices=EXPORTED, required=True)
    command.add_argument(
        "--format",
        dest="fmt",
        choices=("compressed-tensors", "sglang", "modelopt"),
        default="compressed-tensors",
        help="layout of the folder (default %(default)s)",
    )
    command.add_argument(
        "--backend",
        choices=("native", "modelopt", "te"),
        default="native",
        help="whose arithmetic: ours, ModelOpt's (same bits), Transformer Engine's (fp8_block on a "
        "GPU)",
    )
    command.add_argument(
        "--uaq-scale", type=float, default=1.0, help="update-aware factor s to fold in first"
    )
    add_folder_options(
        command, auto="format of what is not quantized; auto is the one the model came in"
    )
    return run_main(body, command, argv)


def body(arguments: argparse.Namespace) -> int:
    from qurl_megatron.checkpoints import open_checkpoint
    from qurl_megatron.checkpoints.quantized_export import to_quantized

    return convert(
        lambda: to_quantized(
            open_checkpoint(arguments.model, arguments.hf),
            arguments.out.absolute(),
            scheme=arguments.scheme,
            fmt=arguments.fmt,
            backend=arguments.backend,
            uaq_scale=arguments.uaq_scale,
            dtype=torch_dtype(arguments.dtype),
            file_bytes=file_bytes(arguments.file_gb),
        ),
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
