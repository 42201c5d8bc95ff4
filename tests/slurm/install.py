"""Debian's Slurm, where it is missing and we may: ``python -m tests.slurm.install``.

Ends with 2, and a sentence, where it cannot be had.
"""

import os
import shutil
import subprocess
import sys

from tests.slurm.cluster import PROGRAMS, SEARCHED

PACKAGES = ("slurm-wlm", "munge")


def main() -> int:
    missing = [program for program in PROGRAMS if not shutil.which(program, path=SEARCHED)]
    if not missing:
        return 0
    apt = shutil.which("apt-get")
    if os.geteuid() != 0 or apt is None:
        why = "apt-get is not here" if apt is None else "only root may install it"
        print(
            f"tests/slurm need {missing[0]}, and {why}: have {' and '.join(PACKAGES)} installed",
            file=sys.stderr,
        )
        return 2
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = [apt, "install", "--yes", "--quiet", "--no-install-recommends", *PACKAGES]
    if subprocess.run(install, env=env).returncode:  # the lists of packages may be too old
        subprocess.run([apt, "update", "--quiet"], env=env, check=True)
        subprocess.run(install, env=env, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
