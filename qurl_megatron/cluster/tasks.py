"""Programs that ``srun`` starts in a job: a training rank (``qurl slurm task``), and the engines of
one rollout node (``qurl slurm offer``).

On SIGTERM srun ends the step at once, and some clusters send a signal to everything that a task has
started, engines included. So the supervisor sends SIGUSR1, which is blocked here, and hence in
every thread and child; a thread waits for it and tells the task with SIGTERM.
SIGUSR2 asks for stacks, which a rank writes into its attempt's folder even where it is stuck in
native code: Python's own handler needs no interpreter. It is blocked for children in the same way.

A rank that has saved and stopped ends with 0: srun is told to end all ranks as soon as one of them
fails, so after any other code it would kill ranks that are still writing.
"""

import faulthandler
import os
import signal
import threading
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path

from qurl_megatron.cluster import folder
from qurl_megatron.cluster.layout import lay_out
from qurl_megatron.cluster.verdict import STOPPED
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.observe import failures
from qurl_megatron.observe.failures import FOLDER


def task(run_dir: Path) -> int:
    """Train the submitted recipe as the rank that Slurm's variables name.

    Returns:
        0 also after a clean stop; else the exit code of ``qurl train``.
    """
    attempt = os.environ.get(FOLDER)
    stacks = None
    if attempt:
        stacks = folder.stack_file(Path(attempt), int(os.environ.get("SLURM_PROCID", "0")))
    stop_on_usr1(stacks)
    forget_hook(os.environ)
    try:
        config = folder.recipe(run_dir)
        from qurl_megatron.training.start import start

        code = start(config)
    except Exception as error:
        failures.keep(error)
        raise
    if code == STOPPED:
        return 0
    return code


def stop_on_usr1(stacks: Path | None = None) -> None:
    """Take SIGUSR1 as SIGTERM from here on, and hide it and SIGUSR2 from all children.

    On SIGUSR2 the stacks of all threads are written to the file ``stacks``, which is created.
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


def offer(run_dir: Path) -> int:
    """Run this node's engines, and keep the rendezvous up to date, until SIGUSR1 or SIGTERM.

    Returns:
        0 after a signal; 1 if no engine can be kept alive.
    """
    from qurl_megatron.fleet.offered import KEY, POLL_S, Offering
    from qurl_megatron.training.each_node import start_here

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    stop_on_usr1()
    config, cluster = folder.recipe(run_dir), folder.cluster(run_dir)
    count = lay_out(config.parallel, config.rollout, cluster.node).engines
    rendezvous = Path(config.rollout.rendezvous)
    start = start_here(config, count, (rendezvous / KEY).read_text(encoding="utf-8").strip())
    start = replace(start, config=replace(start.config, engine_first_gpu=0))
    with Offering(start, rendezvous) as engines:
        while not ended.wait(POLL_S):
            if not engines.look():
                return 1
    return 0
