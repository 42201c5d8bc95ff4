"""The environment and cores that a training rank's child processes inherit.

Launchers set variables for each rank, and may bind it to cores of its own. Neither is meant for a
child: an SGLang server that finds torchrun's variables waits for peers at torchrun's store, and
eight engines on one rank's four cores crawl.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

OF_A_RANK = frozenset(
    {
        *("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        # Slurm's variables of a task; those of the job stay.
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID"),
        *("SLURM_NTASKS", "SLURM_NPROCS"),
        # How the trainer treats failing collectives: they end the process.
        *("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT"),
        # Memory savers and CUDA IPC do not work with expandable segments.
        *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    }
)
OF_A_LAUNCHER = (
    *("TORCHELASTIC_", "PET_", "MASTER_", "GROUP_", "ROLE_"),  # torchrun
    *("SLURM_STEP_", "SLURM_CPU_BIND", "SLURM_MPI", "PMI_", "PMI2_", "PMIX_", "OMPI_"),
    "TORCH_NCCL_",
)
"""How the names of further variables begin."""


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` for a process that is no rank, as if the program had been started by hand."""
    return {
        name: value
        for name, value in env.items()
        if name not in OF_A_RANK and not name.startswith(OF_A_LAUNCHER)
    }


def expandable_segments(env: Mapping[str, str]) -> str | None:
    """Return the setting that turns torch's expandable segments on, as "NAME=value", or None."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in env.get(name, "").lower().replace(" ", ""):
            return f"{name}={env[name]}"
    return None


def job_cores(own: set[int], fenced: set[int], env: Mapping[str, str]) -> set[int]:
    """Return the cores of a rank's children: the job's, if a batch system bound the rank to a part.

    Args:
        own: cores that this process may use.
        fenced: cores that the kernel grants when it asks for all: the job's, where the batch system
            fences jobs in, else the machine's.
        env: a binding set by hand, with ``taskset``, is deliberate and is kept.
    """
    batch = "SLURM_JOB_ID" in env or "OMPI_COMM_WORLD_SIZE" in env
    if not batch or not own <= fenced:
        return own
    granted = env.get("SLURM_CPUS_ON_NODE", "")
    if granted.isdigit() and len(fenced) > int(granted):
        return own  # no fence: the rest may be another job's
    return fenced


def children_cores() -> set[int]:
    """Return ``job_cores`` of this process."""
    allowed_cores = os.sched_getaffinity(0)
    try:
        # The kernel removes cores that the job may not have.
        with on_cores(set(range(os.sysconf("SC_NPROCESSORS_CONF")))):
            fenced = os.sched_getaffinity(0)
    except OSError:  # a container that forbids asking
        return allowed_cores
    return job_cores(allowed_cores, fenced, os.environ)


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Inside, this thread has these cores, and so has every process that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
