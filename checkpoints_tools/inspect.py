"""Say what a checkpoint is: Hugging Face, Megatron or quantized, from its headers alone.

With --verify, also hash every file and hold it against the manifest the converters wrote.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its inspect.py would hide Python's own

from qurl_megatron.checkpoints.commands import (
    add_inspect_options,
    inspect_checkpoint,
    parser,
    run_main,
)


def main(argv: list[str] | None = None) -> int:
    command = parser(__doc__, "inspect.py runs/qwen14b")
    add_inspect_options(command)
    return run_main(inspect_checkpoint, command, argv)


if __name__ == "__main__":
    sys.exit(main())
