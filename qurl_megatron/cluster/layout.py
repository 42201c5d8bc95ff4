"""Who runs where: nodes, tasks and GPUs of the training ranks and of the engines.

A training rank is a task with a GPU of its own. Engines on nodes of their own are a second
component with one task per node, which starts that node's engines. Engines that take turns with the
trainer on its GPUs, and embedded ones, are started by the leading rank: they need no component.
"""

from dataclasses import dataclass

from qurl_megatron.cluster.cluster import NodeConfig
from qurl_megatron.config.keys import require
from qurl_megatron.config.sections import ParallelConfig, RolloutConfig


@dataclass(frozen=True)
class Component:
    """Nodes that are alike."""

    nodes: int
    tasks: int  # per node
    gpus: int  # per node

    def cpus_per_task(self, node: NodeConfig) -> int:
        """Its share of a node's CPUs; whoever takes no GPU has the node to itself."""
        share = node.cpus * self.gpus // node.gpus if self.gpus else node.cpus
        return max(1, share // self.tasks)

    def memory_gib(self, node: NodeConfig) -> int:
        """Its share of a node's memory; 0: all of it."""
        return node.memory_gib * self.gpus // node.gpus if self.gpus else node.memory_gib


@dataclass(frozen=True)
class Allocation:
    """The components of a training job."""

    training: Component
    rollout: Component | None  # None: engines, if any, are started by the leading rank
    engines: int = 0  # per node of the rollout component

    @property
    def whole(self) -> Component:
        """One component with room for both, where it is to be cut in two."""
        if self.rollout is None:
            return self.training
        return Component(
            self.training.nodes + self.rollout.nodes,
            self.training.tasks,
            max(self.training.gpus, self.rollout.gpus),
        )


def lay_out(parallel: ParallelConfig, rollout: RolloutConfig, node: NodeConfig) -> Allocation:
    """Cut a run into nodes.

    Raises:
        ConfigError: ranks or engines do not fill nodes evenly, or have no room.
    """
    training = _training(parallel, node)
    if rollout.rendezvous:
        return _with_rollout_nodes(training, rollout, node)
    if rollout.kind.takes_gpus and not rollout.urls:
        return Allocation(_with_own_engines(training, rollout, node), None)
    return Allocation(training, None)


def _training(parallel: ParallelConfig, node: NodeConfig) -> Component:
    ranks = parallel.world_size
    require(
        ranks <= node.gpus or ranks % node.gpus == 0,
        "parallel.tensor * parallel.pipeline * parallel.context * parallel.data = "
        f"{ranks} ranks do not fill nodes of node.gpus={node.gpus} evenly; "
        f"change one of them, e.g. parallel.data, to get a multiple of {node.gpus}",
    )
    nodes = max(1, ranks // node.gpus)
    return Component(nodes, ranks // nodes, ranks // nodes)


def _with_rollout_nodes(
    training: Component, rollout: RolloutConfig, node: NodeConfig
) -> Allocation:
    size, count = rollout.engine_tensor, rollout.engines
    require(
        node.gpus % size == 0,
        f"rollout.engine_tensor={size} does not divide node.gpus={node.gpus}, and an engine stays "
        "on one node; lower it",
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
    """The training component where the leading rank's node has room for its SGLang engines too."""
    engines = rollout.engines * rollout.engine_tensor
    last = rollout.engine_first_gpu + engines
    require(
        last <= node.gpus,
        f"rollout.engines={rollout.engines} of rollout.engine_tensor={rollout.engine_tensor} from "
        f"rollout.engine_first_gpu={rollout.engine_first_gpu} on take GPUs up to {last}, and the "
        f"node of the leading rank has node.gpus={node.gpus}; lower them, or set "
        "rollout.rendezvous to a folder in the run's, for engines on nodes of their own",
    )
    require(
        rollout.colocate or rollout.engine_first_gpu >= training.gpus,
        f"rollout.engine_first_gpu={rollout.engine_first_gpu} puts engines on GPUs of the "
        f"{training.gpus} training ranks; set rollout.engine_first_gpu={training.gpus}, "
        "rollout.colocate=true, or rollout.rendezvous for nodes of their own",
    )
    return Component(training.nodes, training.tasks, max(training.gpus, last))
