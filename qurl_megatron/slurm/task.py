"""``qurl slurm task``: what ``srun`` starts, one training rank.

Of the signals that srun passes on, SIGTERM ends the step at once, and some clusters give a signal
to all that a task has started, engines included. So the supervisor sends SIGUSR1, which is blocked
here, and hence in every thread and child; a thread waits for it and tells the rank with SIGTERM.

A rank that has saved and stopped ends with 0: srun, which is to end all ranks as soon as one of
them fails, would take any other code for a failure, and kill those that are still writing.
"""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

from qurl_megatron.slurm import folder

STOPPED = 128 + signal.SIGTERM
"""What a run returns after a clean stop."""


def task(run_dir: Path, engines: int | None = None) -> int:
    """Train as the rank that Slurm's variables name, with the recipe that was submitted.

    Args:
        engines: how many to wait for, where bad nodes leave fewer than the recipe has.

    Returns:
        0 also after a clean stop; else what ``qurl train`` returns.

    Raises:
        ConfigError: nothing was submitted there, or what ``qurl train`` raises.
    """
    stop_on_usr1()
    config = folder.recipe(run_dir)
    if engines is not None:
        config = replace(config, rollout=replace(config.rollout, engines=engines))
    from qurl_megatron.training.start import start

    code = start(config)
    return 0 if code == STOPPED else code


def stop_on_usr1() -> None:
    """From here on SIGUSR1 is SIGTERM to this process, and nothing to its children."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    threading.Thread(target=_wait, name="SIGUSR1", daemon=True).start()


def _wait() -> None:
    signal.sigwait({signal.SIGUSR1})
    os.kill(os.getpid(), signal.SIGTERM)
