"""A cluster as data: a frozen dataclass per section of ``slurm/clusters/*.toml``.

The job script follows from the cluster file, one per site, and from the recipe, one per run.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from qurl_megatron.config.keys import Section, at_least, key, positive, require
from qurl_megatron.config.load import build, read_tables
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.shipped import shipped, shipped_names

_TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")


def seconds(time: str) -> int:
    """Convert [days-]hours:minutes:seconds; raise ``ValueError`` for others, such as UNLIMITED."""
    if (match := _TIME.fullmatch(time)) is None:
        raise ValueError(time)
    days, hours, minutes, secs = map(int, match.groups(default="0"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + secs


@dataclass(frozen=True, kw_only=True)
class JobConfig(Section, name="job", on_resume="free"):
    """Options of every job, and when a run is told to end."""

    partition: str = ""
    """Partition of the nodes; empty: the site's default."""

    account: str = ""
    """Account that is charged; empty: the user's default."""

    qos: str = ""
    """Quality of service; empty: the site's default."""

    time_limit: str = "24:00:00"
    """Wall time of one job, as [days-]hours:minutes:seconds; a run may take several jobs."""

    signal_s: int = key(900, at_least(60))
    """Seconds before the time limit in which the run finishes its step and saves. Slurm may be a
    minute early."""

    hung_s: int = key(1800, at_least(1))
    """Seconds without a new step after which a run counts as hung: its ranks write their stacks and
    are ended. The longest set-up, step, evaluation and restart of engines must fit in."""

    extra: tuple[str, ...] = ()
    """Further options of sbatch, e.g. ["--exclusive"]."""

    examine_s: int = key(180, at_least(0))
    """Seconds in which every node must have measured itself before the ranks start, the start of
    its container included; a node that has not is bad. 0 examines none."""

    def check(self) -> None:
        require(
            _TIME.fullmatch(self.time_limit) is not None,
            "job.time_limit must be like 24:00:00 or 2-00:00:00, [days-]hours:minutes:seconds, "
            f"got {self.time_limit!r}",
        )
        require(
            self.signal_s < self.time_limit_s,
            f"job.signal_s={self.signal_s} leaves nothing of job.time_limit={self.time_limit}; "
            "lower it",
        )

    @property
    def time_limit_s(self) -> int:
        return seconds(self.time_limit)


@dataclass(frozen=True, kw_only=True)
class NodeConfig(Section, name="node", on_resume="free"):
    """One node; nodes of a partition are alike."""

    gpus: int = key(8, at_least(1))
    """GPUs of a node."""

    gpu: str = ""
    """Kind of GPU as the site's gres names it (`sinfo -o %G`), e.g. h100; empty asks for any."""

    gpu_gib: float = key(80.0, positive())
    """Memory of a GPU, in GiB."""

    cpus: int = 64
    """CPUs of a node, as Slurm counts them; a job gets them in proportion to its GPUs."""

    memory_gib: int = key(0, at_least(0))
    """Host memory of a node that jobs may take, in GiB, in proportion as well; 0 asks for all of
    it, which only jobs with whole nodes should."""

    def check(self) -> None:
        require(
            self.cpus >= self.gpus,
            f"node.cpus={self.cpus} gives some of node.gpus={self.gpus} no CPU; raise it",
        )


@dataclass(frozen=True, kw_only=True)
class ContainerConfig(Section, name="container", on_resume="free"):
    """The ranks' container; the supervisor runs on the node itself, where Slurm's commands are."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    """none: on the node, after site.prolog; pyxis: srun --container-image; apptainer: apptainer
    exec --nv."""

    image: str = ""
    """Image file, or with pyxis also registry#name:tag."""

    mounts: tuple[str, ...] = ()
    """Folders of the node to mount, as outside[:inside]; among them the folder that is submitted
    from, the model's, the data's and the run's, each under its own name."""

    def check(self) -> None:
        require(
            (self.kind == "none") == (not self.image),
            f"container.kind={self.kind} and container.image={self.image!r} contradict each other; "
            "set both or neither",
        )
        require(
            self.kind != "pyxis" or not self.image.endswith(".sqsh") or self.image[0] in "./",
            f"container.image={self.image}: pyxis takes a file only by a path that begins with / "
            f"or ./; write ./{self.image}",
        )


@dataclass(frozen=True, kw_only=True)
class SiteConfig(Section, name="site", on_resume="free"):
    """Files and environment of the site."""

    shared: tuple[str, ...] = ()
    """Folders that all nodes share, or have the same copy of; runs, models and data must lie in
    them."""

    prolog: tuple[str, ...] = ()
    """Shell lines before the run, e.g. "module load cuda" and "source .venv/bin/activate"; the job
    ends where one of them fails. `qurl` must be found after them."""

    environment: dict = key({})
    """Variables of every rank and engine, above all NCCL's, e.g. {NCCL_IB_HCA = "mlx5"}; they go
    before a container image's own. NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the interfaces
    over which ranks meet (`ip -brief address`); without them NCCL and gloo choose."""

    def check(self) -> None:
        for folder in self.shared:
            require(folder.startswith("/"), f"site.shared must be absolute folders, got {folder!r}")
        for name, value in self.environment.items():
            require(
                re.fullmatch(r"[A-Za-z_]\w*", name) is not None and isinstance(value, str),
                f"site.environment must be strings by variable, got {name} = {value!r}",
            )
            require(
                not re.search(r"KEY|TOKEN|SECRET|PASSWORD", name),
                f"site.environment.{name}: job scripts are kept and shown by Slurm; leave secrets "
                "to files that only you can read",
            )


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    job: JobConfig = field(default_factory=JobConfig)
    node: NodeConfig = field(default_factory=NodeConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    site: SiteConfig = field(default_factory=SiteConfig)


def load_cluster(path: Path) -> ClusterConfig:
    """Read a cluster file; raise ``ConfigError``, which names it, where it is missing or wrong."""
    path = shipped(path, "slurm/clusters")
    tables = read_tables(path, "cluster file", f"these ship: {shipped_names('slurm/clusters')}")
    try:
        return build(ClusterConfig, tables, kind="section")
    except ConfigError as error:
        raise ConfigError(f"cluster file {path}: {error}") from None
