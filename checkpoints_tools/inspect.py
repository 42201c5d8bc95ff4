"""Say what a checkpoint is: Hugging Face, Megatron or quantized, from its headers alone.

With --verify, also hash every file and hold it against the manifest the converters wrote.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its inspect.py would hide Python's own

import argparse
import json
from pathlib import Path

from qurl_megatron.checkpoints.convert_command import parser, run_main


def main(argv: list[str] | None = None) -> int:
    command = parser(__doc__, "inspect.py runs/qwen14b")
    command.add_argument("dir", type=Path, help="checkpoint of any kind, or a run directory")
    command.add_argument(
        "--hf", type=Path, help="folder with config.json, if a Megatron checkpoint has none"
    )
    command.add_argument("--verify", action="store_true", help="hash every file; exits 1 if wrong")
    command.add_argument("--json", action="store_true", help="print the facts as JSON")
    command.add_argument("--tensors", action="store_true", help="list every tensor")
    return run_main(body, command, argv)


def body(arguments: argparse.Namespace) -> int:
    from qurl_megatron.checkpoints.anykind import open_any
    from qurl_megatron.checkpoints.inspect import inspect, tensor_rows, text
    from qurl_megatron.checkpoints.job import verify

    found = open_any(arguments.dir, arguments.hf)
    facts = inspect(found)
    wrong = verify(found.folder) if arguments.verify else []
    if arguments.json:
        print(json.dumps({**facts, "wrong": wrong} if arguments.verify else facts, indent=1))
        return 1 if wrong else 0
    print(text(facts))
    if arguments.tensors:
        print("\n".join(tensor_rows(found)))
    if arguments.verify:
        print("\n".join(wrong) or "  verified    every file is what was written")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
