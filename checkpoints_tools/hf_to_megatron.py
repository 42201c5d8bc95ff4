"""Convert a Hugging Face checkpoint into a Megatron one, folding UAQ on the way.

Safetensors are streamed: memory is bounded by the largest parameter, not the model. The result is
Megatron's torch_dist format, which loads at any tensor- and pipeline-parallel size, in this package
and in Megatron-LM. Killed and started again, the conversion goes on where it stopped.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its inspect.py would hide Python's own

from qurl_megatron.checkpoints.commands import add_convert_options, convert, parser, run_main


def main(argv: list[str] | None = None) -> int:
    command = parser(
        __doc__, "hf_to_megatron.py --hf Qwen2.5-14B --out qwen14b-s1.5 --uaq-scale 1.5 --tensor 8"
    )
    add_convert_options(command)
    return run_main(convert, command, argv)


if __name__ == "__main__":
    sys.exit(main())
