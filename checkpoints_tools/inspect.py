"""Describe a checkpoint from its headers alone: ``qurl inspect`` as a script."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its inspect.py would hide Python's own
    from qurl_megatron.cli import main

    sys.exit(main(["inspect", *sys.argv[1:]]))
