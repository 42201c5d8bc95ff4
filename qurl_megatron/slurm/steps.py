"""The command lines of what runs inside a job: ``srun``, and the container around a command."""

from collections.abc import Sequence

from qurl_megatron.slurm.cluster import ClusterConfig, ContainerConfig
from qurl_megatron.slurm.layout import Allocation, Component

TRAINING, ROLLOUT = "train", "engines"
"""Names of the steps of a run, which are also those of their logs."""


def training_step(
    layout: Allocation, cluster: ClusterConfig, command: Sequence[str], *, folder: str, workdir: str
) -> list[str]:
    """``srun`` for one task per GPU of the training component.

    Args:
        folder: gets train-RANK.log.
        workdir: where the command starts.
    """
    where = []
    if layout.rollout:
        where = ["--het-group=0"] if cluster.job.layout == "hetjob" else ["--relative=0"]
    command = inside(cluster.container, command, workdir)
    return [*_srun(TRAINING, layout.training, cluster, folder), *where, *command]


def rollout_step(
    layout: Allocation, cluster: ClusterConfig, command: Sequence[str], *, folder: str, workdir: str
) -> list[str]:
    """``srun`` for one task per node of the rollout component, which must be there.

    A node that is lost ends its own task alone: the run goes on with the other engines.
    """
    assert layout.rollout is not None
    relative = f"--relative={layout.training.nodes}"
    where = "--het-group=1" if cluster.job.layout == "hetjob" else relative
    command = inside(cluster.container, command, workdir)
    return [
        *_srun(ROLLOUT, layout.rollout, cluster, folder, together=False),
        where,
        *command,
    ]


def _srun(
    name: str,
    component: Component,
    cluster: ClusterConfig,
    folder: str,
    *,
    together: bool = True,
) -> list[str]:
    # The job's own options are in srun's environment, and --exclusive is among them at some
    # sites: what a step takes is said in full.
    options = [
        f"--job-name={name}",
        "--export=ALL",  # the job has none of the submitter's environment, and its own is the run's
        "--mpi=none",
        "--input=none",
        f"--output={folder.replace('%', '%%')}/{name}-%t.log",
        f"--nodes={component.nodes}",
        f"--ntasks={component.nodes * component.tasks}",
        f"--ntasks-per-node={component.tasks}",
        f"--cpus-per-task={component.cpus_per_task(cluster.node)}",
        f"--kill-on-bad-exit={int(together)}",
    ]
    if component.gpus:
        # Of the node, not of the task: each rank sees all GPUs, and takes that of its number.
        options.append(f"--gpus-per-node={gpus(component, cluster)}")
    return ["srun", *options, *([] if together else ["--no-kill"])]


def gpus(component: Component, cluster: ClusterConfig) -> str:
    """The number of GPUs as Slurm's options take it, with their kind where the site has kinds."""
    kind = cluster.node.gpu
    return f"{kind}:{component.gpus}" if kind else str(component.gpus)


def inside(container: ContainerConfig, command: Sequence[str], workdir: str) -> list[str]:
    """What ``srun`` is to run so that ``command`` runs in the container, from ``workdir`` on.

    pyxis adds options to srun: the result follows srun's other options directly.
    """
    mounts = ",".join(container.mounts)
    if container.kind == "pyxis":
        options = [f"--container-image={container.image}", f"--container-workdir={workdir}"]
        if mounts:
            options.append(f"--container-mounts={mounts}")
        return [*options, *command]
    if container.kind == "apptainer":
        bind = ["--bind", mounts] if mounts else []
        return ["apptainer", "exec", "--nv", *bind, "--pwd", workdir, container.image, *command]
    return list(command)
