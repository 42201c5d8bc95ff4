"""``qurl train`` before there are ranks: check the recipe, make the warm-start model, start."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from qurl_megatron.checkpoints.places import description_of
from qurl_megatron.config import Change, RunConfig
from qurl_megatron.data.questions import training_questions
from qurl_megatron.data.rows import DataFile
from qurl_megatron.engines.starting import given_key, refuse_not_installed
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.kit.launch import launch
from qurl_megatron.kit.muster import mustered
from qurl_megatron.kit.place import end_with_launcher, place_under_launcher
from qurl_megatron.observe.sinks import read_metrics, wandb_package
from qurl_megatron.observe.text import how_many
from qurl_megatron.rewards import check_rewards
from qurl_megatron.rewards.environment import check_environment
from qurl_megatron.schemes import simulation
from qurl_megatron.tensors.arch import arch_of, read_arch
from qurl_megatron.training.footprint import check_policy_division
from qurl_megatron.training.inputs import (
    check_files,
    check_own_loss,
    doubts,
    refuse_without_tokenizer,
)
from qurl_megatron.training.state import (
    TrainState,
    latest,
    refuse_other_run,
    relatives,
    tell_done,
    tell_of_left_out,
)
from qurl_megatron.training.too_long import refuse_endless_responses


def start(config: RunConfig, fork: Path | None = None, given: Sequence[str] = ()) -> int:
    """Train, in this process under torchrun or srun, else on ranks started here.

    Args:
        fork: new run directory, to begin with the newest checkpoint of the one in ``config``.
        given: overrides of this command.

    Returns:
        0 when all steps are done; 128 + n after a clean stop on signal n, or where signal n killed
        a rank; 2 for a mistake in the input; 3 where the guard, or a number that is not finite,
        halted the run.
    """
    from qurl_megatron.training.rank import run_rank

    if config.rollout.urls or config.rollout.rendezvous:
        given_key(os.environ)  # before minutes are spent on models
    placed = place_under_launcher(config.parallel.world_size)
    source = None
    if fork is not None:
        source = Path(config.train.run_dir)
        config = replace(config, train=replace(config.train, run_dir=str(fork)))
    path = Path(config.model.path)
    if not placed:  # else rank 0 looks for all, once they have met: none waits for one that refuses
        if source is None:
            with suppress(ConfigError):  # which the next check raises
                tell_of_left_out(config, given)
            if _already_done(config, _changes(config)):
                return 0
        _check(config)
    if not path.exists() and (placed or not config.warmstart.steps):
        raise ConfigError(_missing(config))
    _refuse_impossible(config)
    if placed:
        end_with_launcher()
        with mustered(Path(config.train.run_dir), key="train.run_dir"):
            return run_rank(config, partial(_prepare, source, config))
    _begin(source, config)
    if not path.exists():
        _make_model(config, path)
    # Threads that spin at barriers starve the ranks they wait for where there are more
    # ranks than cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    ranks = how_many(config.parallel.world_size, "training rank")
    print(f"starting {ranks} for {path}; the run is in {config.train.run_dir}", flush=True)
    lost = partial(_lost, Path(config.train.run_dir))
    return launch(run_rank, (config,), config.parallel.world_size, lost=lost)


def _refuse_impossible(config: RunConfig) -> None:
    """Raise ``ConfigError`` where the model, made already or not, cannot run the recipe."""
    if Path(config.model.path).exists():
        arch = arch_of(description_of(config.model.path))
    else:
        # transformers takes seconds to import
        from qurl_megatron.training.warmstart import shape_of

        arch = read_arch(shape_of(config.data, config.warmstart))
    arch.refuse_without_engine(f"model.path={config.model.path}: ")
    check_policy_division(config, arch)
    refuse_endless_responses(config.rollout, arch)
    refuse_without_tokenizer(config)


def _prepare(source: Path | None, config: RunConfig) -> dict[str, DataFile]:
    """Check the recipe and make the fork, for all ranks; return the data files, which it read."""
    files = _check(config)
    _begin(source, config)
    return files


def _check(config: RunConfig) -> dict[str, DataFile]:
    """Check the settings that need no model; return the data files."""
    files = check_files(config)
    for remark in doubts(config, files):
        print(remark, flush=True)
    if simulated := simulation(config.quant.scheme):
        print(simulated, flush=True)
    _check_own(config)
    return files


def _begin(source: Path | None, config: RunConfig) -> None:
    """Make the run a fork of ``source``, where there is one."""
    if source is None:
        return _tell_of_relatives(Path(config.train.run_dir))
    from qurl_megatron.training.fork import fork

    fork(source, config)


def _check_own(config: RunConfig) -> None:
    """Check that the recipe's rewards, environment, loss and packages can be used."""
    check_rewards(config.reward)
    check_environment(config.rollout)
    check_own_loss(config)
    refuse_not_installed(config.rollout)
    if config.observe.wandb_project:
        wandb_package()


def _missing(config: RunConfig) -> str:
    """Return the advice for a missing model."""
    if config.warmstart.steps:  # asked for, but not possible under a launcher
        return (
            f"model.path={config.model.path} does not exist, and a model is made there "
            "(warmstart.steps) by qurl train itself alone, not under torchrun or srun; call it once"
            " with train.steps=0"
        )
    return (
        f"model.path={config.model.path} does not exist; put the model there, a Hugging Face folder"
        " (config.json, *.safetensors, tokenizer) or a Megatron checkpoint, or set model.path to "
        "where it is"
    )


def _lost(run_dir: Path, death: str) -> str:
    """Return the message on the death of a rank: its step, the likely cause, and advice."""
    step, newest = 1, latest(run_dir)
    with suppress(ConfigError):  # no step has ended yet
        step += max(record.step for record in read_metrics(run_dir / "metrics.jsonl"))
    cause = ", as Linux does where memory runs out (`dmesg` says so)" if "SIGKILL" in death else ""
    saved = f"the newest checkpoint is of step {_step(newest)}" if newest else "nothing is saved"
    return f"{death} in step {step}{cause}; {saved}: start the same command again"


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def _changes(config: RunConfig) -> list[Change]:
    """Return the changes of ``refuse_other_run``; if it refuses, name an invalid value first."""
    try:
        return refuse_other_run(Path(config.train.run_dir), config)
    except ConfigError:
        check_files(config)
        if config.data.task:
            training_questions(config.data)
        _check_own(config)
        if not Path(config.model.path).exists() and not config.warmstart.steps:
            raise ConfigError(_missing(config)) from None
        raise


def _already_done(config: RunConfig, changed: Sequence[Change]) -> bool:
    """True where the run directory holds all the steps the recipe asks for."""
    run_dir = Path(config.train.run_dir)
    checkpoint = latest(run_dir)
    if checkpoint is None:
        return False
    try:
        state = TrainState.read(checkpoint)
    except ConfigError:
        return False  # the ranks look for an older one, and say so
    if not state.finished(config.train.steps):
        return False
    tell_done(run_dir, state, config, changed)
    return True


def _tell_of_relatives(run_dir: Path) -> None:
    """Say that a run begins where somebody may have meant one of another name."""
    if latest(run_dir) is None and (related_runs := relatives(run_dir)):
        further = (
            f", the newest of {len(related_runs)} runs with other overrides"
            if related_runs[1:]
            else ""
        )
        print(
            f"{run_dir} begins a new run, as overrides are part of a run's name; to go on with "
            f"{related_runs[0]}{further}, stop this and add train.run_dir={related_runs[0]}",
            flush=True,
        )


def _make_model(config: RunConfig, path: Path) -> None:
    from qurl_megatron.training.warmstart import warmstart

    run_dir = Path(config.train.run_dir)
    with refusing(run_dir, key="train.run_dir"):  # before minutes are spent on the model
        run_dir.mkdir(parents=True, exist_ok=True)
    print(
        f"model.path={path} does not exist, and warmstart.steps={config.warmstart.steps} asks for a"
        " small model of random weights to be made there and fitted to the answers of "
        f"{config.data.path or config.data.task}; if you meant a model of your own, stop this and "
        "correct model.path",
        flush=True,
    )
    with refusing(path, key="model.path"):
        accuracy = warmstart(
            path, config.data, config.warmstart, log=lambda line: print(line, flush=True)
        )
    print(
        f"warm start done: {accuracy:.1%} of the held-out answers have the right number", flush=True
    )
