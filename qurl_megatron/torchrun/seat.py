"""What torchrun starts: one training rank, which writes ``train-RANK.log`` into its attempt."""

import os
import sys
from pathlib import Path

from qurl_megatron.errors import ConfigError
from qurl_megatron.observe.failures import FOLDER
from qurl_megatron.runtime.files import refusing


def main(run_dir: Path) -> int:
    """What ``qurl slurm task`` returns."""
    logs = Path(os.environ[FOLDER])
    file = logs / f"train-{os.environ['RANK']}.log"
    try:
        with refusing(file, key="train.run_dir"):
            log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        from qurl_megatron.slurm.task import task

        return task(run_dir)
    except ConfigError as error:
        print(f"qurl: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
