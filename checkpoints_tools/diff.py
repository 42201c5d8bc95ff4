"""Compare two checkpoints of any kinds, tensor by tensor: ``qurl diff`` as a script."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its inspect.py would hide Python's own
    from qurl_megatron.cli import main

    sys.exit(main(["diff", *sys.argv[1:]]))
