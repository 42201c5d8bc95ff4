"""Convert a Megatron torch_dist checkpoint, of any layout, into a Hugging Face one.

Takes what hf_to_megatron.py wrote, a checkpoint of `qurl train` or its whole run directory (the
newest is taken), or one of Megatron-LM with --hf. FP32 masters are read where the checkpoint has
them. Writes safetensors of 5 GB, the index, config.json, tokenizer and generation config.
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


def main(argv: list[str] | None = None) -> int:
    command = parser(__doc__, "megatron_to_hf.py --ckpt runs/qwen14b --out qwen14b-rl --unfold-uaq")
    command.add_argument(
        "--ckpt",
        type=Path,
        required=True,
        help="checkpoint or run directory; a Hugging Face folder, too, to unfold or round it",
    )
    command.add_argument(
        "--unfold-uaq",
        action="store_true",
        help="take the UAQ factor out again; else the weights stay folded and config.json says so",
    )
    add_folder_options(
        command,
        auto="auto: the format the model came in, or the stored one where a factor stays folded",
    )
    return run_main(body, command, argv)


def body(arguments: argparse.Namespace) -> int:
    from qurl_megatron.checkpoints import open_checkpoint
    from qurl_megatron.checkpoints.to_huggingface import to_huggingface

    return convert(
        lambda: to_huggingface(
            open_checkpoint(arguments.ckpt, arguments.hf),
            arguments.out.absolute(),
            unfold=arguments.unfold_uaq,
            dtype=torch_dtype(arguments.dtype),
            file_bytes=file_bytes(arguments.file_gb),
        ),
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
