"""Quantize a checkpoint into a W8A8 folder that engines load: ``qurl quantize`` as a script."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its inspect.py would hide Python's own
    from qurl_megatron.cli import main

    sys.exit(main(["quantize", *sys.argv[1:]]))
