"""What can be known before a job waits in a queue for hours to fail in its first minute.

Each check is a function that returns, or raises one sentence with the fix. They need no GPU, no
Slurm, and a few seconds.
"""

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from qurl_megatron.checkpoints.integrity import FIX, read_record, wrong_size
from qurl_megatron.checkpoints.ops import parameter_count
from qurl_megatron.checkpoints.places import description_of, find_torch_dist, safetensors_files
from qurl_megatron.cluster.cluster import ClusterConfig, ContainerConfig, JobConfig, seconds
from qurl_megatron.cluster.layout import lay_out
from qurl_megatron.cluster.pace import Pace
from qurl_megatron.config import RunConfig
from qurl_megatron.engines.starting import given_key
from qurl_megatron.kit.errors import ConfigError, reading
from qurl_megatron.kit.filesystem import free, refusing
from qurl_megatron.tensors.arch import Arch, read_arch, read_config
from qurl_megatron.training.footprint import find_models, footprint
from qurl_megatron.training.sources import sources
from qurl_megatron.training.state import latest, refuse_other_run

GIB = 1 << 30
THERE = "set it to a checkpoint that is there"
SILENT_S = 45
"""Of SlurmdTimeout: with what it takes to end the attempt, a minute."""


def check(config: RunConfig, cluster: ClusterConfig) -> list[str]:
    """All checks of a training run, the cheap ones first.

    Returns:
        What was found, a line for each.

    Raises:
        ConfigError: the first thing that stands in the way.
    """
    layout = lay_out(config.parallel, config.rollout, cluster.node)
    check_container(cluster)
    run_dir = Path(config.train.run_dir)
    check_shared("train.run_dir", run_dir, cluster)
    check_writable(run_dir)
    check_engines(config)
    arch = check_model(config)
    for key, path in others(config).items():
        check_checkpoint(key, Path(path))
    check_newest(run_dir)
    check_data(config)
    check_own_files_are_there(config)
    refuse_other_run(run_dir, config)  # after the values: a mistaken one makes no other run
    check_paths(config, cluster, nodes=layout.whole.nodes)
    nodes = f"nodes: {layout.training.nodes} with {layout.training.tasks} training ranks"
    if layout.rollout:
        nodes += f", {layout.rollout.nodes} with {layout.engines} engines"
    found = [nodes, check_memory(config, cluster), check_disk(config, arch)]
    found += unset_keys(config, cluster)
    return found + started_elsewhere(cluster) + not_mounted(config, cluster.container)


def check_limits(job: JobConfig, facts: Mapping[str, str], pace: Pace) -> str:
    """The job fits into its partition's limits, and who takes its nodes leaves it time to save.

    Args:
        facts: of the partition, as ``commands.partition_facts`` has them; empty where Slurm tells
            nothing.
        pace: of the run so far.

    Returns:
        What becomes of the run where a job of higher priority wants the nodes; "" where none can.
    """
    most = facts.get("MaxTime", "UNLIMITED")
    if most != "UNLIMITED" and seconds(most) < job.time_limit_s:
        raise ConfigError(
            f"job.time_limit={job.time_limit} is more than MaxTime={most} of partition "
            f"{facts['PartitionName']}, where the job would wait for ever; lower it"
        )
    grace = facts.get("GraceTime", "")
    if facts.get("PreemptMode", "OFF") == "OFF" or not grace.isdecimal():
        return ""
    name = facts["PartitionName"]
    if int(grace) == 0:
        return (
            f"preemption: partition {name} leaves no time to save (GraceTime=0): steps since the "
            "newest checkpoint are done again; lower checkpoint.every, or set job.partition to one "
            "that leaves some"
        )
    leaves = f"preemption: partition {name} leaves {grace} s to finish a step and save"
    if pace.stop_s is None:
        return (
            f"{leaves}; where that is too short, steps since the newest checkpoint are done again"
        )
    if int(grace) >= pace.stop_s:
        return f"{leaves}, and this run takes {pace.stop_s:.0f} at most"
    return (
        f"{leaves}, and this run may take {pace.stop_s:.0f}: steps since the newest checkpoint "
        "would be done again; lower checkpoint.every"
    )


def silent_nodes(job: JobConfig, facts: Mapping[str, str]) -> list[str]:
    """A line where a node that falls silent, without power say, is not noticed within a minute:
    Slurm alone hears of nodes.

    Args:
        facts: of the site, as ``commands.site_facts`` has them; empty where Slurm tells nothing.
    """
    told = facts.get("SlurmdTimeout", "").split()
    if not told or not told[0].isdecimal() or 0 < int(told[0]) <= SILENT_S:
        return []
    timeout = int(told[0])
    gives = f"one up after {timeout} s (SlurmdTimeout" if timeout else "none up (SlurmdTimeout=0"
    enough = f"{SILENT_S} or less" if timeout else SILENT_S
    return [
        f"silent nodes: Slurm gives {gives}, which the site sets; {enough} would end the attempt "
        f"within a minute), and a run that stands still is ended after {job.hung_s} (job.hung_s)"
    ]


def check_container(cluster: ClusterConfig) -> None:
    """The image is there, unless it is a name that a registry knows."""
    container = cluster.container
    if container.kind == "none":
        return
    is_file = container.image.startswith(("/", "./", "../")) or container.image.endswith(
        (".sqsh", ".sif")
    )
    if is_file and not os.access(container.image, os.R_OK):
        raise ConfigError(
            f"container.image={container.image} does not exist or cannot be read; make it, or set "
            "container.image in the cluster file to one that is there"
        )


def not_mounted(config: RunConfig, container: ContainerConfig) -> list[str]:
    """What the recipe names and ``container.mounts`` has not under the same name, a line for each.

    No more than lines: a site may mount folders in every container, and apptainer mounts some.
    """
    if container.kind == "none":
        return []
    needed = {
        "the working folder": ".",
        "train.run_dir": config.train.run_dir,
        "model.path": config.model.path,
        "critic.path": config.critic.path,
        "algo.reference": config.algo.reference,
        "data.path": config.data.path,
        "data.eval_path": config.data.eval_path,
        "sync.dir": config.sync.dir,
        **own_files(config),
    }
    ends = [mount.split(":")[:2] for mount in container.mounts]
    same = [Path(outside) for outside, *inside in ends if inside in ([], [outside])]
    paths = {key: Path(os.path.abspath(path)) for key, path in needed.items() if path}
    return [
        f"{key}, {path}, is in none of container.mounts: unless this site mounts it everywhere, "
        "the ranks will not find it"
        for key, path in paths.items()
        if not any(path.is_relative_to(mount) for mount in same)
    ]


def check_script(command: Sequence[str]) -> None:
    """A job runs where it is submitted, and finds the converters there."""
    for word in command:
        if word.startswith("checkpoints_tools/") and not Path(word).is_file():
            raise ConfigError(
                f"{word} does not exist here, where the job would run; submit from the folder of "
                "the repository"
            )


def check_shared(key: str, path: Path, cluster: ClusterConfig) -> None:
    """What the recipe's ``key`` names lies where all nodes see it."""
    folders = cluster.site.shared
    if not folders:
        raise ConfigError(
            "site.shared is missing in the cluster file; set it to the folders that all nodes "
            'share, e.g. ["/home"]'
        )
    if not _is_shared(path, cluster):
        raise ConfigError(
            f"{key}={path} is {path.resolve()}, which lies in none of "
            f"site.shared={list(folders)}: other nodes would not see it; submit from a shared "
            f"folder, set {key}, or name the folder in site.shared"
        )


def _is_shared(path: Path, cluster: ClusterConfig) -> bool:
    real = path.resolve()
    return any(real.is_relative_to(Path(folder).resolve()) for folder in cluster.site.shared)


def check_paths(config: RunConfig, cluster: ClusterConfig, *, nodes: int) -> None:
    """What the job reads, and the versions that it publishes, lie where all nodes see them.

    Args:
        nodes: of the job. On one, versions may go where no other node sees them, such as its
            memory.
    """
    named = {"model.path": config.model.path, **others(config)}
    named |= {"data.path": config.data.path, "data.eval_path": config.data.eval_path}
    named |= own_files(config)
    if nodes > 1 and config.sync.transport in ("auto", "files"):
        named["sync.dir"] = config.sync.dir
    for key, path in named.items():
        if path:
            check_shared(key, Path(path), cluster)


def started_elsewhere(cluster: ClusterConfig) -> list[str]:
    """A line where the job's nodes may lack the folder that it is submitted from.

    No more than a line: absolute paths are found from everywhere.
    """
    here = Path.cwd()
    if _is_shared(here, cluster):
        return []
    return [
        f"the working folder, {here}, lies in none of site.shared: on nodes that lack it the job "
        "starts in /tmp, and finds nothing that site.prolog names by a relative path"
    ]


def check_writable(run_dir: Path) -> None:
    """Asked of the nearest folder that is there, so that a check leaves nothing behind."""
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    with refusing(run_dir, key="train.run_dir"):
        tempfile.TemporaryFile(dir=existing).close()


def check_engines(config: RunConfig) -> None:
    """Engines meet the trainer in a folder of the run's own, and no key has to travel in the job's
    environment."""
    run_dir, rendezvous = Path(config.train.run_dir), config.rollout.rendezvous
    if rendezvous and run_dir.resolve() not in Path(rendezvous).resolve().parents:
        raise ConfigError(
            f"rollout.rendezvous={rendezvous} is not in train.run_dir={run_dir}: the job starts "
            "engines of its own, and clears the folder where they meet the trainer; set "
            f"rollout.rendezvous={run_dir / 'engines'}"
        )
    given_key(os.environ)
    if config.rollout.urls and "QURL_API_KEY" in os.environ:
        raise ConfigError(
            "QURL_API_KEY is set for the engines in rollout.urls, and a job inherits nothing of "
            "this shell; unset it here, and have site.prolog read it from a file that only you "
            'can read: export QURL_API_KEY="$(cat FILE)"'
        )


def check_model(config: RunConfig) -> Arch:
    """The model is there, as ``check_checkpoint`` wants it, and divides over the ranks."""
    fix = THERE
    if config.warmstart.steps:
        fix = (
            "the ranks of a job do not make it: `qurl train RECIPE train.steps=0`, called here "
            "once, makes it"
        )
    arch = check_checkpoint("model.path", Path(config.model.path), fix=fix)
    arch.refuse_without_engine(f"model.path={config.model.path}: ")
    arch.check_parallel(config.parallel.tensor, config.parallel.pipeline)
    return arch


def others(config: RunConfig) -> dict[str, str]:
    """The checkpoints beside the model that the run will read, by their keys in the recipe."""
    has_checkpoint = latest(Path(config.train.run_dir)) is not None
    paths = sources(config, resumed=has_checkpoint)
    return {key: path for key, path in paths.items() if key != "model.path"}


def check_checkpoint(key: str, path: Path, *, fix: str = THERE) -> Arch:
    """A checkpoint of a known family, none of whose files is missing, cut off or unreadable.

    Args:
        key: of the recipe, which names it.
        fix: what to do where there is nothing.
    """
    if not os.path.exists(path):  # pathlib's would raise where the user may not look
        raise ConfigError(f"{key}={path} does not exist; {fix}")
    try:
        with reading(path):
            description = description_of(path)
        with reading(description / "config.json"):
            arch = read_arch(read_config(description))
        refuse_unreadable(_weights(path))
    except ConfigError as error:
        raise ConfigError(f"{key}={path}: {error}") from None
    return arch


def _weights(path: Path) -> list[Path]:
    """The weight files of a checkpoint, by its index or record where it has one."""
    megatron = find_torch_dist(path)
    if megatron is None:
        return safetensors_files(path)
    if wrong := wrong_size(megatron, read_record(megatron) or {}):
        raise ConfigError(f"{wrong}; {FIX}")
    return _files(megatron)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def check_newest(run_dir: Path) -> None:
    """What the run goes on from can be read; one that is damaged the ranks set aside."""
    if newest := latest(run_dir):
        try:
            refuse_unreadable(_files(newest))
        except ConfigError as error:
            raise ConfigError(f"train.run_dir={run_dir}: {error}") from None


def refuse_unreadable(files: Iterable[Path]) -> None:
    """Read a byte of each: what file systems say of rights is not always what they do.

    Raises:
        ConfigError: one cannot be read.
    """
    for path in files:
        try:
            with path.open("rb") as file:
                file.read(1)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}); let this user read it, or copy it again"
            ) from None


def check_data(config: RunConfig) -> None:
    for key in ("path", "eval_path"):
        path = getattr(config.data, key)
        if path and not os.access(path, os.R_OK):
            raise ConfigError(f"data.{key}={path} does not exist or cannot be read")


def own_files(config: RunConfig) -> dict[str, str]:
    """The Python files of rewards and of an environment of the user's own, by their keys."""
    parts = config.reward.parts.items()
    files = {f"{key}.function": part.file for key, part in parts if part.file}
    if config.rollout.environment_file:
        files["rollout.environment"] = config.rollout.environment_file
    return files


def check_own_files_are_there(config: RunConfig) -> None:
    """Their files; what these import, the job's own environment may have and this one lack."""
    for key, path in own_files(config).items():
        if not os.access(path, os.R_OK):
            raise ConfigError(f"{key}: {path} does not exist or cannot be read; write it there")


def unset_keys(config: RunConfig, cluster: ClusterConfig) -> list[str]:
    """A line for each key of a reward's server that the job's environment seems to lack."""
    prolog = "\n".join(cluster.site.prolog)
    return [
        f"{key}.key_env={part.key_env}: a job inherits nothing of this shell, and site.prolog does "
        "not set it; have that read it from a file that only you can read"
        for key, part in config.reward.parts.items()
        if part.key_env and part.key_env not in prolog
    ]


def check_memory(config: RunConfig, cluster: ClusterConfig) -> str:
    """By the sums of ``qurl show --dry-run`` from shapes alone, for the cluster's GPUs."""
    total = footprint(config, find_models(config), gpu_gib=cluster.node.gpu_gib)
    _, phase, needed = total.fullest
    if needed > total.gpu:
        raise ConfigError(f"node.gpu_gib: {total.notes[0]}")
    return (
        f"memory: {needed / GIB:.1f} of {cluster.node.gpu_gib:g} GiB on the fullest GPU, in {phase}"
    )


def check_disk(config: RunConfig, arch: Arch) -> str:
    """Room for the checkpoints that are kept, and the one that is written before one is deleted."""
    checkpoint_size = checkpoint_bytes(config, arch)
    run_dir = Path(config.train.run_dir)
    kept = len(list((run_dir / "checkpoints").glob("step_*")))
    needed = max(1, config.checkpoint.keep + 1 - kept) * checkpoint_size
    room = free(run_dir)
    if needed > room:
        raise ConfigError(
            f"train.run_dir={run_dir}: {needed / GIB:.1f} GiB are needed for checkpoints of "
            f"{checkpoint_size / GIB:.1f} (checkpoint.keep={config.checkpoint.keep} and one on its "
            f"way), and {room / GIB:.1f} are free; free some, lower checkpoint.keep, or set "
            "train.run_dir to a folder with more"
        )
    return (
        f"disk: {checkpoint_size / GIB:.1f} GiB a checkpoint, {needed / GIB:.1f} to come, "
        f"{room / GIB:.1f} free"
    )


def checkpoint_bytes(config: RunConfig, arch: Arch) -> int:
    """Weights, their FP32 masters where they are not FP32 themselves, Adam's two moments, and the
    reference where it moves."""
    each = 12 if config.model.dtype == "float32" else 14
    models = 2 if config.algo.advantage == "gae" else 1  # about as much again for a critic
    reference = config.model.itemsize if config.algo.reference_every else 0
    return (models * each + reference) * parameter_count(arch)
