"""Compare two checkpoints of any kinds, tensor by tensor.

Compared are the numbers the model computes with: fused parameters are taken apart, codes multiplied
by their scales, and a UAQ factor that one side alone has folded in is taken out (--as-stored leaves
it in). Exits 1 where a tensor is missing, left over, of another shape, or differs by more than
--tol in relative norm.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its inspect.py would hide Python's own

import argparse
from pathlib import Path

from qurl_megatron.checkpoints.convert_command import parser, run_main


def main(argv: list[str] | None = None) -> int:
    command = parser(__doc__, "diff.py Qwen2.5-14B qwen14b-megatron --tol 1e-6")
    command.add_argument("a", type=Path, help="a checkpoint")
    command.add_argument("b", type=Path, help="the one to compare with it")
    command.add_argument(
        "--tol", type=float, default=0.0, help="largest ||b-a||/||a|| that is no difference"
    )
    command.add_argument("--as-stored", action="store_true", help="do not unfold UAQ factors")
    command.add_argument("--all", action="store_true", help="list the tensors that agree, too")
    command.add_argument("--hf-a", type=Path, help="folder with config.json for A")
    command.add_argument("--hf-b", type=Path, help="folder with config.json for B")
    return run_main(body, command, argv)


def body(arguments: argparse.Namespace) -> int:
    from qurl_megatron.checkpoints.anykind import open_any
    from qurl_megatron.checkpoints.diff import differences, row

    a = open_any(arguments.a, arguments.hf_a)
    b = open_any(arguments.b, arguments.hf_b)
    if a.uaq_scale != b.uaq_scale and not arguments.as_stored:
        print(f"A has s = {a.uaq_scale:g} folded in, B {b.uaq_scale:g}: compared without")
    count = beyond = 0
    worst = ""
    furthest = -1.0
    for difference in differences(a, b, as_stored=arguments.as_stored):
        count += 1
        far = difference.beyond(arguments.tol)
        beyond += far
        if far or arguments.all:
            print(row(difference))
        if difference.relative > furthest:
            furthest, worst = difference.relative, row(difference)
    print(f"{count} tensors, {beyond} differ beyond {arguments.tol:g}; furthest: {worst}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
