"""Checks before the queue, so that no job waits for hours and fails in its first minute.

Each check raises ``ConfigError``, one sentence with the fix. They take seconds, and need no GPU.
"""

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from qurl_megatron.checkpoints.integrity import FIX, read_record, wrong_size
from qurl_megatron.checkpoints.ops import parameter_count
from qurl_megatron.checkpoints.places import description_of, find_torch_dist, safetensors_files
from qurl_megatron.cluster.cluster import ClusterConfig, JobConfig, seconds
from qurl_megatron.cluster.layout import lay_out
from qurl_megatron.config import RunConfig
from qurl_megatron.config.sections import file_of
from qurl_megatron.engines.starting import given_key
from qurl_megatron.kit.disk import lock
from qurl_megatron.kit.errors import ConfigError, reading
from qurl_megatron.kit.filesystem import free, refusing
from qurl_megatron.plan.footprint import footprint
from qurl_megatron.plan.memory import GIB
from qurl_megatron.tensors.arch import Arch, read_arch, read_config
from qurl_megatron.training.inputs import sources
from qurl_megatron.training.shapes import check_division, find_models
from qurl_megatron.training.state import latest, refuse_other_run

THERE = (
    "set it to a checkpoint that is there; `hf download OWNER/NAME --revision COMMIT` fetches one "
    "of a hub, and prints its folder"
)


def check(config: RunConfig, cluster: ClusterConfig) -> list[str]:
    """Make all checks of a training run, the cheap ones first; return sizes and warnings to print.

    Raises:
        ConfigError: the first problem found.
    """
    layout = lay_out(config.parallel, config.rollout, cluster.node)
    check_container(cluster)
    run_dir = Path(config.train.run_dir)
    check_shared("train.run_dir", run_dir, cluster)
    check_writable("train.run_dir", run_dir)
    if config.rollout.backend == "sglang" and cluster.container.kind == "none":
        key = "SGLANG_JIT_CACHE_DIR"  # where SGLang compiles kernels, under a lock
        kernels = Path(cluster.site.environment.get(key, "~/.cache/sglang/jit"))
        check_writable(key, kernels.expanduser())
    check_engines(config)
    arch = check_model(config)
    newest = latest(run_dir)
    checkpoints = sources(config, resumed=newest is not None)
    for key, path in checkpoints.items():
        if key != "model.path":
            check_checkpoint(key, Path(path))
    if newest:  # the ranks set a damaged one aside
        refuse_unreadable("train.run_dir", str(run_dir), newest.rglob("*"))
    own_files = {"data.path": config.data.path, "data.eval_path": config.data.eval_path}
    own_files |= {key: file_of(code) for key, code in config.own_code.items()}
    own_files = {key: path for key, path in own_files.items() if path}
    for key, path in own_files.items():
        refuse_unreadable(key, path, [Path(path)])
    refuse_other_run(run_dir, config)  # after the values: a mistaken one makes no other run
    paths = {"model.path": config.model.path, **checkpoints, **own_files}
    # On one node, versions may go where no other node sees them, such as its memory.
    if layout.whole.nodes > 1 and config.sync.transport in ("auto", "files") and config.sync.dir:
        paths["sync.dir"] = config.sync.dir
    for key, path in paths.items():
        check_shared(key, Path(path), cluster)
    nodes = f"nodes: {layout.training.nodes} with {layout.training.tasks} training ranks"
    if layout.rollout:
        nodes += f", {layout.rollout.nodes} with {layout.engines} engines"
    lines = [nodes, check_memory(config, cluster), check_disk(config, arch)]
    if not _is_shared(Path.cwd(), cluster):  # absolute paths are found from everywhere
        lines.append(
            f"the working folder, {Path.cwd()}, lies in none of site.shared: on nodes that lack it "
            "the job starts in /tmp, without the files of relative paths"
        )
    return lines


def check_limits(job: JobConfig, facts: Mapping[str, str]) -> None:
    """Check the job's time against ``commands.partition_facts``; {} if Slurm tells none."""
    longest = facts.get("MaxTime", "UNLIMITED")
    if longest != "UNLIMITED" and seconds(longest) < job.time_limit_s:
        raise ConfigError(
            f"job.time_limit={job.time_limit} is more than MaxTime={longest} of partition "
            f"{facts['PartitionName']}, where the job would wait for ever; lower it"
        )


def check_container(cluster: ClusterConfig) -> None:
    """Check that the image is there, unless it is a name that a registry knows."""
    container = cluster.container
    is_path = container.image.startswith(("/", "./", "../"))
    is_file = is_path or container.image.endswith((".sqsh", ".sif"))
    if container.kind != "none" and is_file and not os.access(container.image, os.R_OK):
        raise ConfigError(
            f"container.image={container.image} does not exist or cannot be read; make it, or name "
            "another in the cluster file"
        )


def check_shared(key: str, path: Path, cluster: ClusterConfig) -> None:
    """Check that all nodes see the path of a recipe's ``key``."""
    folders = cluster.site.shared
    if not folders:
        raise ConfigError(
            "site.shared is missing in the cluster file; name folders that all nodes share"
        )
    if not _is_shared(path, cluster):
        raise ConfigError(
            f"{key}={path} is {path.resolve()}, which lies in none of site.shared={list(folders)}; "
            f"set {key} to a folder that all nodes see, or name its folder in site.shared"
        )


def _is_shared(path: Path, cluster: ClusterConfig) -> bool:
    real = path.resolve()
    return any(real.is_relative_to(Path(folder).resolve()) for folder in cluster.site.shared)


def check_writable(key: str, folder: Path) -> None:
    """Write and lock a temporary file in the nearest existing folder; leave nothing behind."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    with refusing(folder, key=key), tempfile.TemporaryFile(dir=existing) as file:
        lock(file)


def check_engines(config: RunConfig) -> None:
    """Check that engines meet the trainer in the run's folder, and need no key of this shell."""
    run_dir, rendezvous = Path(config.train.run_dir), config.rollout.rendezvous
    if rendezvous and run_dir.resolve() not in Path(rendezvous).resolve().parents:
        raise ConfigError(
            f"rollout.rendezvous={rendezvous} is not in train.run_dir={run_dir}, and the job "
            "clears it; set rollout.rendezvous=auto"
        )
    given_key(os.environ)
    if config.rollout.urls and "QURL_API_KEY" in os.environ:
        raise ConfigError(
            "QURL_API_KEY is set for rollout.urls, and a job inherits nothing of this shell; unset "
            'it here, and have site.prolog read it from a file: export QURL_API_KEY="$(cat FILE)"'
        )


def check_model(config: RunConfig) -> Arch:
    """Check that the model passes ``check_checkpoint`` and divides over ranks and engines."""
    fix = THERE
    if config.warmstart.steps:
        fix = "`qurl train RECIPE train.steps=0`, called here once, makes it"
    arch = check_checkpoint("model.path", Path(config.model.path), fix=fix)
    check_division(config, arch)
    return arch


def check_checkpoint(key: str, path: Path, *, fix: str = THERE) -> Arch:
    """Check that a checkpoint's family is known, and no file is missing, cut off or unreadable.

    Args:
        key: the recipe's key for the path.
        fix: advice if there is no such path.
    """
    if not os.path.exists(path):  # pathlib's would raise where the user may not look
        raise ConfigError(f"{key}={path} does not exist; {fix}")
    try:
        with reading(path):
            description = description_of(path)
        with reading(description / "config.json"):
            arch = read_arch(read_config(description))
        megatron = find_torch_dist(path)
        weights = safetensors_files(path) if megatron is None else megatron.rglob("*")
        if megatron and (wrong := wrong_size(megatron, read_record(megatron) or {})):
            raise ConfigError(f"{wrong}; {FIX}")
    except ConfigError as error:
        raise ConfigError(f"{key}={path}: {error}") from None
    refuse_unreadable(key, str(path), weights)
    return arch


def refuse_unreadable(key: str, value: str, paths: Iterable[Path]) -> None:
    """Read a byte of each file: file systems do not always grant the rights that they show."""
    for path in sorted(paths):
        if path.is_dir():
            continue
        try:
            with path.open("rb") as file:
                file.read(1)
        except OSError as error:
            raise ConfigError(
                f"{key}={value}: {path} cannot be read ({error.strerror}); copy it, or set {key}"
            ) from None


def check_memory(config: RunConfig, cluster: ClusterConfig) -> str:
    """Check that the memory of ``qurl show --dry-run`` fits the cluster's GPUs."""
    total = footprint(config, find_models(config), gpu_gib=cluster.node.gpu_gib)
    _, phase, needed = total.fullest
    if needed > total.gpu:
        raise ConfigError(f"node.gpu_gib: {total.notes[0]}")
    return (
        f"memory: {needed / GIB:.1f} of {cluster.node.gpu_gib:g} GiB on the fullest GPU, in {phase}"
    )


def check_disk(config: RunConfig, arch: Arch) -> str:
    """Check that there is room for the checkpoints that are kept, and for one being written."""
    checkpoint_size = checkpoint_bytes(config, arch)
    run_dir = Path(config.train.run_dir)
    kept = len(list((run_dir / "checkpoints").glob("step_*")))
    needed = max(1, config.checkpoint.keep + 1 - kept) * checkpoint_size
    room = free(run_dir)
    if needed > room:
        raise ConfigError(
            f"train.run_dir={run_dir}: {needed / GIB:.1f} GiB are needed for checkpoints of "
            f"{checkpoint_size / GIB:.1f} (checkpoint.keep={config.checkpoint.keep} and one on its "
            f"way), and {room / GIB:.1f} are free; free some, or lower checkpoint.keep"
        )
    return (
        f"disk: {checkpoint_size / GIB:.1f} GiB a checkpoint, {needed / GIB:.1f} to come, "
        f"{room / GIB:.1f} free"
    )


def checkpoint_bytes(config: RunConfig, arch: Arch) -> int:
    """Return the size of weights, FP32 masters (unless weights are FP32) and Adam's moments."""
    each = 12 if config.model.dtype == "float32" else 14
    models = 2 if config.algo.advantage == "gae" else 1  # about as much again for a critic
    return models * each * parameter_count(arch)
