"""Who runs where: nodes, tasks and GPUs of ranks and engines, and the ``srun`` that starts them.

A training rank is a task with a GPU of its own. Engines on nodes of their own take the last nodes
of the job, with one task per node, which starts that node's engines. Engines that take turns with
the trainer on its GPUs, and embedded ones, are started by ranks: they need no nodes.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qurl_megatron.cluster.cluster import ClusterConfig, NodeConfig
from qurl_megatron.config.keys import require
from qurl_megatron.config.sections import ParallelConfig, RolloutConfig

ENGINES_PREFIX = "engines: "
"""Before each line of job.log from the engines' srun: task 1 is no rank there."""
EXAMINATION_PREFIX = "examine: "
"""Before each line of job.log from the examination's srun."""


@dataclass(frozen=True)
class Component:
    """Nodes that are alike."""

    nodes: int
    tasks: int  # per node
    gpus: int  # per node

    def cpus_per_task(self, node: NodeConfig) -> int:
        """Return CPUs in proportion to the GPUs; a component without GPUs has whole nodes."""
        return max(1, self._share(node.cpus, node) // self.tasks)

    def options(self, node: NodeConfig) -> list[str]:
        """Return the options of sbatch and srun that ask for it, except for its memory."""
        options = [
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.tasks}",
            f"--cpus-per-task={self.cpus_per_task(node)}",
        ]
        if self.gpus:
            # Per node, not per task: each rank sees all GPUs, and takes the one with its number.
            options.append("--gpus-per-node=" + f"{node.gpu}:{self.gpus}".removeprefix(":"))
        return options

    def memory_gib(self, node: NodeConfig) -> int:
        """Return memory in proportion to the GPUs; 0: all of a node's."""
        return self._share(node.memory_gib, node)

    def _share(self, total: int, node: NodeConfig) -> int:
        if self.gpus == 0:
            return total
        return total * self.gpus // node.gpus


@dataclass(frozen=True)
class Allocation:
    """The nodes of a training job."""

    training: Component
    rollout: Component | None  # None: engines, if any, are started by the leading rank
    engines: int = 0  # per node of the rollout component

    @property
    def whole(self) -> Component:
        """All nodes, each with room for either."""
        if self.rollout is None:
            return self.training
        return Component(
            self.training.nodes + self.rollout.nodes,
            self.training.tasks,
            max(self.training.gpus, self.rollout.gpus),
        )


def lay_out(parallel: ParallelConfig, rollout: RolloutConfig, node: NodeConfig) -> Allocation:
    """Lay a run out over nodes; raise ``ConfigError`` if it has no room or fills nodes unevenly."""
    ranks = parallel.world_size
    require(
        ranks <= node.gpus or ranks % node.gpus == 0,
        f"parallel.tensor * pipeline * context * data = {ranks} ranks do not fill nodes of "
        f"node.gpus={node.gpus} evenly; change one, to get a multiple of {node.gpus}",
    )
    nodes = max(1, ranks // node.gpus)
    training = Component(nodes, ranks // nodes, ranks // nodes)
    if rollout.each_node:
        rollout = replace(rollout, engines=rollout.engines_on_each(nodes))
    elif rollout.rendezvous:
        return _with_rollout_nodes(training, rollout, node)
    if rollout.kind.takes_gpus and not rollout.urls:
        return Allocation(_with_own_engines(training, rollout, node), None)
    return Allocation(training, None)


def _with_rollout_nodes(
    training: Component, rollout: RolloutConfig, node: NodeConfig
) -> Allocation:
    size, count = rollout.engine_tensor, rollout.engines
    require(
        not rollout.colocate,
        "rollout.rendezvous gives engines nodes of their own, and rollout.colocate has them take "
        "turns with the trainer; leave one of them out, or set rollout.each_node=true",
    )
    require(
        node.gpus % size == 0,
        f"rollout.engine_tensor={size} does not divide node.gpus={node.gpus}; lower it",
    )
    fit = node.gpus // size
    require(
        count <= fit or count % fit == 0,
        f"rollout.engines={count} do not fill nodes evenly: {fit} of rollout.engine_tensor={size} "
        f"fit on node.gpus={node.gpus}; make them a multiple of {fit}",
    )
    nodes = max(1, count // fit)
    engines = count // nodes
    return Allocation(training, Component(nodes, 1, engines * size), engines)


def _with_own_engines(training: Component, rollout: RolloutConfig, node: NodeConfig) -> Component:
    """Return the training component with room for the engines that ranks start on its nodes."""
    last = rollout.engine_first_gpu + rollout.engines * rollout.engine_tensor
    require(
        last <= node.gpus,
        f"rollout.engines={rollout.engines} of rollout.engine_tensor={rollout.engine_tensor} from "
        f"rollout.engine_first_gpu={rollout.engine_first_gpu} on take GPUs up to {last} of "
        f"node.gpus={node.gpus}; lower them, or set rollout.each_node=true, or "
        "rollout.rendezvous for nodes of their own",
    )
    require(
        rollout.colocate or rollout.engine_first_gpu >= training.gpus,
        f"rollout.engine_first_gpu={rollout.engine_first_gpu} puts engines on GPUs of the "
        f"{training.gpus} training ranks; set it to {training.gpus}, rollout.colocate=true, or "
        "rollout.rendezvous for nodes of their own",
    )
    return Component(training.nodes, training.tasks, max(training.gpus, last))


def step(
    name: str,
    component: Component,
    cluster: ClusterConfig,
    command: Sequence[str],
    *,
    first_node: int = 0,
    folder: str = "",
    together: bool = True,
) -> list[str]:
    """Return the ``srun`` that runs a command as each task of a component, in the container.

    Args:
        first_node: of the job's nodes, from 0.
        folder: gets the output of each task, as NAME-TASK.log; "" has srun print it.
        together: one task that fails ends the others; else a node that is lost ends its own tasks
            alone.
    """
    # The job's own options are in srun's environment, and --exclusive is among them at some
    # sites: each step therefore names all that it takes.
    srun = [
        "srun",
        f"--job-name={name}",
        "--export=ALL",  # of the job, which has nothing of the submitter's shell
        "--mpi=none",
        "--input=none",
        *component.options(cluster.node),
        f"--ntasks={component.nodes * component.tasks}",
        f"--kill-on-bad-exit={int(together)}",
        f"--relative={first_node}",
    ]
    if folder:
        srun.append(f"--output={folder.replace('%', '%%')}/{name}-%t.log")
    if not together:
        srun.append("--no-kill")
    return [*srun, *inside(cluster, command)]


def examination(run_dir: Path, layout: Allocation, cluster: ClusterConfig) -> list[str]:
    """Return the step that has each node of a job measure itself."""
    measure = ["qurl", "slurm", "examine", str(run_dir)]
    return step("examine", replace(layout.whole, tasks=1), cluster, measure, together=False)


def run_steps(
    run_dir: Path, layout: Allocation, cluster: ClusterConfig, logs: Path
) -> dict[str, list[str]]:
    """Return the steps of an attempt by name, in the order in which they start."""
    steps = {}
    if layout.rollout:
        steps["engines"] = step(
            "engines",
            layout.rollout,
            cluster,
            ["qurl", "slurm", "offer", str(run_dir)],
            folder=str(logs),
            first_node=layout.training.nodes,
            together=False,
        )
    ranks = ["qurl", "slurm", "task", str(run_dir)]
    steps["train"] = step("train", layout.training, cluster, ranks, folder=str(logs))
    return steps


def inside(cluster: ClusterConfig, command: Sequence[str]) -> list[str]:
    """Return the words for ``srun`` that run ``command`` in the container, from this folder on.

    pyxis adds options to srun: the result follows srun's other options directly. A variable that
    the image sets, too, keeps the image's value unless pyxis is told its name.
    """
    container, names, workdir = cluster.container, ",".join(cluster.site.environment), os.getcwd()
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
