"""What torchrun starts: one training rank, which writes ``train-RANK.log`` into its attempt.

As in a job of ``qurl slurm``, SIGUSR1 has it save and end, with 0, for torchrun would take any
other code for a failure; and SIGUSR2 has it write what its threads are doing.
"""

import os
import sys
from pathlib import Path

from qurl_megatron.errors import ConfigError
from qurl_megatron.observe.failures import FOLDER, kept
from qurl_megatron.runtime.filesystem import refusing
from qurl_megatron.slurm import folder
from qurl_megatron.slurm.task import STOPPED, stop_on_usr1


def main(run_dir: Path) -> int:
    """Train with the recipe that the head has left.

    Returns:
        What ``qurl train`` does, but 0 after a clean stop.
    """
    logs, rank = Path(os.environ[FOLDER]), int(os.environ["RANK"])
    try:
        stop_on_usr1(folder.stack_file(logs, rank))
        _write_into(logs / f"train-{rank}.log")
        with kept():
            config = folder.recipe(run_dir)
            from qurl_megatron.training.start import start

            code = start(config)
    except ConfigError as error:
        print(f"qurl: {error}", file=sys.stderr)
        return 2
    return 0 if code == STOPPED else code


def _write_into(file: Path) -> None:
    """Have what this process says, and all that it starts, go into a file."""
    with refusing(file, key="train.run_dir"):
        log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
