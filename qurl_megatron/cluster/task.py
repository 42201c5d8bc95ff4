"""``qurl slurm task``: one training rank, started by ``srun``.

Of the signals that srun passes on, SIGTERM ends the step at once, and some clusters give a signal
to all that a task has started, engines included. So the supervisor sends SIGUSR1, which is blocked
here, and hence in every thread and child; a thread waits for it and tells the rank with SIGTERM.

SIGUSR2 asks for stacks, which a rank writes into its attempt's folder even where it is stuck in
native code: Python's own handler needs no interpreter. It is blocked for children in the same way.

A rank that has saved and stopped ends with 0: srun, which is to end all ranks as soon as one of
them fails, would take any other code for a failure, and kill those that are still writing.
"""

import faulthandler
import os
import signal
import threading
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path

from qurl_megatron.cluster import folder
from qurl_megatron.cluster.verdict import STOPPED
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.observe.failures import FOLDER, kept


def task(run_dir: Path, engines: int | None = None) -> int:
    """Train as the rank that Slurm's variables name, with the recipe that was submitted.

    Args:
        engines: how many to wait for, where bad nodes leave fewer than the recipe has.

    Returns:
        0 also after a clean stop; else what ``qurl train`` returns.

    Raises:
        ConfigError: nothing was submitted there, or what ``qurl train`` raises.
    """
    attempt = os.environ.get(FOLDER)
    if attempt:
        rank = int(os.environ.get("SLURM_PROCID", "0"))
        stop_on_usr1(folder.stack_file(Path(attempt), rank))
    else:
        stop_on_usr1()
    forget_hook(os.environ)
    with kept():
        config = folder.recipe(run_dir)
        if engines is not None:
            config = replace(config, rollout=replace(config.rollout, engines=engines))
        from qurl_megatron.training.start import start

        code = start(config)
    return 0 if code == STOPPED else code


def stop_on_usr1(stacks: Path | None = None) -> None:
    """Take SIGUSR1 as SIGTERM from here on, and hide it and SIGUSR2 from all children.

    Args:
        stacks: file that is made, and gets the stacks of all threads on SIGUSR2; None: nobody will
            ask.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    if stacks is not None:
        with refusing(stacks, key="train.run_dir"):
            # Never closed, for the handler cannot open it; and other nodes must see it at once.
            options = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_SYNC
            file = os.open(stacks, options, 0o644)
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)

    def wait_for_usr1() -> None:
        if stacks is not None:  # the one thread to which the system can deliver it
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        signal.sigwait({signal.SIGUSR1})
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()

    threading.Thread(target=wait_for_usr1, name="signals", daemon=True).start()


def forget_hook(env: MutableMapping[str, str]) -> None:
    """Have the ranks meet at a port that is free, wherever they run.

    A hook of enroot's gives containers with PyTorch in them torchrun's variables, with a port that
    follows from the job's number alone: not every attempt, nor every job on the node, finds it
    free. Of these variables srun itself sets none.
    """
    if "RANK" in env:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            env.pop(name, None)
