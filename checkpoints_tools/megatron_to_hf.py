"""Convert a Megatron torch_dist checkpoint, of any layout, into a Hugging Face one.

Takes what hf_to_megatron.py wrote, a checkpoint of `qurl train` or its whole run directory (the
newest is taken), or one of Megatron-LM with --hf. FP32 masters are read where the checkpoint has
them. Writes safetensors of 5 GB, the index, config.json, tokenizer and generation config.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its inspect.py would hide Python's own

from qurl_megatron.checkpoints.commands import add_export_options, export, parser, run_main


def main(argv: list[str] | None = None) -> int:
    command = parser(__doc__, "megatron_to_hf.py --ckpt runs/qwen14b --out qwen14b-rl --unfold-uaq")
    add_export_options(command)
    return run_main(export, command, argv)


if __name__ == "__main__":
    sys.exit(main())
