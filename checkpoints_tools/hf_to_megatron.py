"""Convert a Hugging Face checkpoint into a Megatron one, folding UAQ on the way.

Safetensors are streamed: memory is bounded by the largest parameter, not the model. The result is
Megatron's torch_dist format, which loads at any tensor- and pipeline-parallel size, in this package
and in Megatron-LM. Killed and started again, the conversion goes on where it stopped. Under
torchrun or srun several processes share the work.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its inspect.py would hide Python's own

import argparse
from pathlib import Path

from qurl_megatron.checkpoints.convert_command import (
    DTYPES,
    add_job_options,
    convert,
    file_bytes,
    parser,
    run_main,
    torch_dtype,
)


def main(argv: list[str] | None = None) -> int:
    command = parser(
        __doc__, "hf_to_megatron.py --hf Qwen2.5-14B --out qwen14b-s1.5 --uaq-scale 1.5 --tensor 8"
    )
    command.add_argument("--hf", type=Path, required=True, help="Hugging Face folder, safetensors")
    command.add_argument(
        "--uaq-scale",
        type=float,
        default=1.0,
        help="update-aware factor s to fold in: norms * s, what reads them / s (default 1: none)",
    )
    command.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="auto loses nothing: the source's format, or float32 where s is no power of two "
        "(W/1.5 rounded to bfloat16 moves about 5 %% of the INT8 codes)",
    )
    command.add_argument(
        "--tensor", type=int, default=1, help="tensor-parallel size to cut for (default 1)"
    )
    command.add_argument(
        "--pipeline", type=int, default=1, help="stages that get files of their own (default 1)"
    )
    add_job_options(command, file_gb=0.25)
    return run_main(body, command, argv)


def body(arguments: argparse.Namespace) -> int:
    from qurl_megatron.checkpoints import open_checkpoint
    from qurl_megatron.checkpoints.to_megatron import to_megatron

    return convert(
        lambda: to_megatron(
            open_checkpoint(arguments.hf),
            arguments.out.absolute(),
            uaq_scale=arguments.uaq_scale,
            dtype=torch_dtype(arguments.dtype),
            tensor=arguments.tensor,
            pipeline=arguments.pipeline,
            file_bytes=file_bytes(arguments.file_gb),
        ),
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
