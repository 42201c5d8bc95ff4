"""Compare two checkpoints of any kinds, tensor by tensor.

Compared are the numbers the model computes with: fused parameters are taken apart, codes multiplied
by their scales, and a UAQ factor that one side alone has folded in is taken out (--as-stored leaves
it in). Exits 1 where a tensor is missing, left over, of another shape, or differs by more than
--tol in relative norm.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its inspect.py would hide Python's own

from qurl_megatron.checkpoints.commands import add_diff_options, diff, parser, run_main


def main(argv: list[str] | None = None) -> int:
    command = parser(__doc__, "diff.py Qwen2.5-14B qwen14b-megatron --tol 1e-6")
    add_diff_options(command)
    return run_main(diff, command, argv)


if __name__ == "__main__":
    sys.exit(main())
