"""A shell, or a command, with a Slurm of its own: four nodes on this machine until it ends.

python -m tests.slurm.shell [COMMAND ...]
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.slurm.cluster import GPUS, NODES, CannotStart, cluster


def main(*command: str) -> int:
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name) / "slurm"  # the one around it becomes a mount of its own
        folder.mkdir()
        try:
            with cluster(folder) as slurm:
                print(f"a Slurm of {', '.join(NODES)}, each with {GPUS} GPUs that are not there")
                shell = [os.environ.get("SHELL", "/bin/sh")]
                return subprocess.run(command or shell, env=slurm.env).returncode
        except CannotStart as why:
            print(f"no Slurm: {why}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
