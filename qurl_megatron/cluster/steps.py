"""The command lines of what runs inside a job: ``srun``, and the container around a command."""

from collections.abc import Sequence
from dataclasses import replace

from qurl_megatron.cluster.cluster import ClusterConfig
from qurl_megatron.cluster.layout import Allocation, Component

TRAINING, ROLLOUT, EXAMINATION = "train", "engines", "examine"
"""Names of the steps of a run, which are also those of their logs."""
ENGINES_SAY = f"{ROLLOUT}: "
"""Before each line of job.log that comes from the engines' srun: task 1 is no rank there."""
EXAMINATION_SAYS = f"{EXAMINATION}: "
"""The same for the examination's srun: what it ends of itself says nothing of the ranks."""


def training_step(
    layout: Allocation, cluster: ClusterConfig, command: Sequence[str], *, folder: str, workdir: str
) -> list[str]:
    """``srun`` for one task per GPU of the training component.

    Args:
        folder: gets train-RANK.log.
        workdir: where the command starts.
    """
    placement = []
    if layout.rollout:
        placement = ["--het-group=0"] if cluster.job.layout == "hetjob" else ["--relative=0"]
    command = inside(cluster, command, workdir)
    return [*_srun(TRAINING, layout.training, cluster, folder), *placement, *command]


def rollout_step(
    layout: Allocation,
    cluster: ClusterConfig,
    command: Sequence[str],
    *,
    folder: str,
    workdir: str,
    nodes: Sequence[str] | None = None,
) -> list[str]:
    """``srun`` for one task per node of the rollout component, which must be there.

    A node that is lost ends its own task alone: the run goes on with the other engines.

    Args:
        nodes: those of the component to take; None takes all.
    """
    assert layout.rollout is not None
    component, placement = layout.rollout, []
    if cluster.job.layout == "hetjob":
        placement.append("--het-group=1")
    if nodes is not None:
        component = replace(component, nodes=len(nodes))
        placement.append(f"--nodelist={','.join(nodes)}")
    elif cluster.job.layout != "hetjob":
        placement.append(f"--relative={layout.training.nodes}")
    command = inside(cluster, command, workdir)
    return [*_srun(ROLLOUT, component, cluster, folder, together=False), *placement, *command]


def examining_steps(
    layout: Allocation, cluster: ClusterConfig, command: Sequence[str], *, workdir: str
) -> list[list[str]]:
    """``srun`` for one task on every node, one call for each component; they print through it."""
    hetjob = layout.rollout is not None and cluster.job.layout == "hetjob"
    components = [layout.whole]
    if layout.rollout is not None and hetjob:
        components = [layout.training, layout.rollout]
    command = inside(cluster, command, workdir)
    return [
        [
            *_srun(EXAMINATION, replace(component, tasks=1), cluster, together=False),
            *([f"--het-group={group}"] if hetjob else []),
            *command,
        ]
        for group, component in enumerate(components)
    ]


def _srun(
    name: str,
    component: Component,
    cluster: ClusterConfig,
    folder: str = "",
    *,
    together: bool = True,
) -> list[str]:
    """
    Args:
        folder: gets what each task prints; "" has srun print it.
    """
    # The job's own options are in srun's environment, and --exclusive is among them at some
    # sites: what a step takes is said in full.
    options = [
        f"--job-name={name}",
        "--export=ALL",  # the job has none of the submitter's environment, and its own is the run's
        "--mpi=none",
        "--input=none",
        f"--nodes={component.nodes}",
        f"--ntasks={component.nodes * component.tasks}",
        f"--ntasks-per-node={component.tasks}",
        f"--cpus-per-task={component.cpus_per_task(cluster.node)}",
        f"--kill-on-bad-exit={int(together)}",
    ]
    if folder:
        options.append(f"--output={folder.replace('%', '%%')}/{name}-%t.log")
    if component.gpus:
        # Of the node, not of the task: each rank sees all GPUs, and takes that of its number.
        options.append(f"--gpus-per-node={gpus(component, cluster)}")
    return ["srun", *options, *([] if together else ["--no-kill"])]


def gpus(component: Component, cluster: ClusterConfig) -> str:
    """The number of GPUs as Slurm's options take it, with their kind where the site has kinds."""
    kind = cluster.node.gpu
    return f"{kind}:{component.gpus}" if kind else str(component.gpus)


def variables(cluster: ClusterConfig) -> dict[str, str]:
    """What the cluster file sets in the environment of every rank and engine."""
    interfaces = ",".join(cluster.node.interfaces)
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if interfaces else ()
    return {**dict.fromkeys(names, interfaces), **cluster.site.environment}


def inside(cluster: ClusterConfig, command: Sequence[str], workdir: str) -> list[str]:
    """What ``srun`` is to run so that ``command`` runs in the container, from ``workdir`` on.

    pyxis adds options to srun: the result follows srun's other options directly. Of a variable that
    the image sets as well, it takes the image's unless it is told the name.
    """
    container, names = cluster.container, ",".join(variables(cluster))
    mounts = ",".join(container.mounts)
    if container.kind == "pyxis":
        options = [f"--container-image={container.image}", f"--container-workdir={workdir}"]
        if mounts:
            options.append(f"--container-mounts={mounts}")
        if names:
            options.append(f"--container-env={names}")
        return [*options, *command]
    if container.kind == "apptainer":
        bind = ["--bind", mounts] if mounts else []
        return ["apptainer", "exec", "--nv", *bind, "--pwd", workdir, container.image, *command]
    return list(command)
