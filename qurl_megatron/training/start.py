"""``qurl train`` from command to exit code: check the recipe, start ranks, be one of them."""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from qurl_megatron.config import Change, RunConfig
from qurl_megatron.config.env import (
    prepare_cuda,
    refuse_environment,
    take_libraries_of_wheels,
    use_transformer_engine,
)
from qurl_megatron.engines.starting import given_key, refuse_not_installed, refuse_without_gpu
from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.kit.launch import launch, tell
from qurl_megatron.kit.place import end_with_launcher, mustered, place_under_launcher
from qurl_megatron.kit.stop import StopRequest
from qurl_megatron.kit.terminal import terminal
from qurl_megatron.observe import failures
from qurl_megatron.observe.sinks import read_metrics, wandb_package
from qurl_megatron.observe.text import how_many
from qurl_megatron.rewards import check_rewards
from qurl_megatron.rewards.workers import check_environment
from qurl_megatron.schemes import simulation
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.training.inputs import (
    check_files,
    check_own_loss,
    describe_data,
    doubts,
    longest_prompt,
    refuse_without_tokenizer,
)
from qurl_megatron.training.shapes import check_division, find_models
from qurl_megatron.training.state import TrainState, latest, refuse_other_run, tell_done


def start(config: RunConfig, fork: Path | None = None) -> int:
    """Train, in this process under torchrun or srun, else on ranks started here.

    Args:
        fork: new run directory, to begin with the newest checkpoint of the one in ``config``.

    Returns:
        0 when all steps are done; 128 + n after a clean stop on signal n, or where signal n killed
        a rank; 2 for a mistake in the input; 3 where the guard, or a number that is not finite,
        halted the run.
    """
    if config.rollout.urls or config.rollout.rendezvous:
        given_key(os.environ)  # before minutes are spent on models
    placed = place_under_launcher(config.parallel.world_size)
    source = None
    if fork is not None:
        source = Path(config.train.run_dir)
        config = replace(config, train=replace(config.train, run_dir=str(fork)))
    path = Path(config.model.path)
    if not placed:  # else rank 0 checks for all, once they have met: none waits for one that fails
        if source is None:
            changed = refuse_other_run(Path(config.train.run_dir), config)
            if _already_done(config, changed):
                return 0
        _check(config)
    if not path.exists() and (placed or not config.warmstart.steps):
        raise ConfigError(_missing(config))
    models = find_models(config)
    check_division(config, models.policy)
    longest_prompt(config.rollout, models.policy)
    refuse_without_tokenizer(config)
    if placed:
        end_with_launcher()
        with mustered(Path(config.train.run_dir), key="train.run_dir"):
            return run_rank(config, partial(_prepare, source, config))
    _make_fork(source, config)
    if not path.exists():
        _make_model(config, path)
    # Threads that spin at barriers starve the ranks they wait for where there are more
    # ranks than cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    ranks = how_many(config.parallel.world_size, "training rank")
    print(f"starting {ranks} for {path}; the run is in {config.train.run_dir}", flush=True)
    death_message = partial(_lost, Path(config.train.run_dir))
    return launch(run_rank, (config,), config.parallel.world_size, lost=death_message)


def look_over(config: RunConfig, arch: Arch) -> tuple[list[str], list[str]]:
    """Run the checks that ``qurl train`` makes before it loads a model, except those of layouts.

    Returns:
        The mistakes, each of which prevents the start, and remarks on the data; a sentence each.
    """
    data: list[str] = []
    checks: list[Callable[[], object]] = [
        partial(longest_prompt, config.rollout, arch),
        partial(refuse_without_tokenizer, config),
        *_own_checks(config),
        lambda: data.extend(describe_data(config)),
    ]
    mistakes = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            mistakes.append(str(error))
    return list(dict.fromkeys(mistakes)), data


def _own_checks(config: RunConfig) -> list[Callable[[], object]]:
    """Return the checks that rewards, environment, loss and packages can be used."""
    checks: list[Callable[[], object]] = [
        partial(refuse_not_installed, config.rollout),
        partial(check_rewards, config.reward),
        partial(check_environment, config.rollout),
        partial(check_own_loss, config.algo, config.correction),
    ]
    if config.observe.wandb_project:
        checks.append(wandb_package)
    return checks


def _prepare(source: Path | None, config: RunConfig) -> None:
    """Check the recipe and make the fork, for all ranks."""
    _check(config)
    _make_fork(source, config)


def _check(config: RunConfig) -> None:
    """Check the settings that need no model."""
    for remark in doubts(config, check_files(config)):
        print(remark, flush=True)
    if simulated := simulation(config.quant.scheme):
        print(simulated, flush=True)
    refuse_without_gpu(config.rollout, config.quant.scheme)
    for check in _own_checks(config):
        check()


def _make_fork(source: Path | None, config: RunConfig) -> None:
    if source is not None:
        from qurl_megatron.training.fork import fork

        fork(source, config)


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
        "where it is; `hf download OWNER/NAME --revision COMMIT` fetches one, and prints its folder"
    )


def _lost(run_dir: Path, death: str) -> str:
    """Return the message on the death of a rank: its step, the likely cause, and advice."""
    step, newest = 1, latest(run_dir)
    with suppress(ConfigError):  # no step has ended yet
        step += max(record.step for record in read_metrics(run_dir / "metrics.jsonl"))
    cause = ", as Linux does where memory runs out (`dmesg` says so)" if "SIGKILL" in death else ""
    saved = "nothing is saved"
    if newest:
        saved_step = int(newest.name.removeprefix("step_"))
        saved = f"the newest checkpoint is of step {saved_step}"
    return f"{death} in step {step}{cause}; {saved}: start the same command again"


def _already_done(config: RunConfig, changed: Sequence[Change]) -> bool:
    """Return whether the run directory holds all the steps the recipe asks for, and say so."""
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


@terminal(lasting=True)
def run_rank(config: RunConfig, prepare: Callable[[], None] | None = None) -> int:
    """Train as the rank that the environment names.

    Args:
        prepare: as for ``train.train``.

    Returns:
        0 when all steps are done, 128 + n after a clean stop on signal n. A failure does not
        return: the process leaves with 2 and one sentence for a mistake in the input, with 3 and
        one sentence where the guard, or a number that is not finite, halted the run, with 1 for
        anything else.
    """
    stop = StopRequest()
    prepare_cuda(config.parallel)
    take_libraries_of_wheels()
    from qurl_megatron.actor.megatron import RankLost
    from qurl_megatron.fleet.client import EngineError
    from qurl_megatron.rewards.pool import RewardDown
    from qurl_megatron.training.guard import Collapse
    from qurl_megatron.wire.link import LinkError

    try:
        refuse_environment()
        use_transformer_engine()  # reports a broken one before Megatron trips over it
        from qurl_megatron.training.train import train

        finished = train(config, stop, prepare)
    except ConfigError as error:
        _fail(error, f"qurl: {error}", 2)
    except Collapse as error:
        _fail(error, f"qurl: {error}", 3)
    except (EngineError, RankLost, LinkError, RewardDown) as error:
        _fail(error, f"qurl: {error}", 1)
    except BaseException as error:
        _fail(error, printable(traceback.format_exc()), 1)
    return 0 if finished else 128 + (stop.signal or signal.SIGTERM)


def _fail(error: BaseException, message: str, code: int) -> NoReturn:
    """End the process at once: other ranks may be in a collective that it will never join."""
    failures.keep(error)
    tell(message)
    for child in multiprocessing.active_children():
        child.kill()  # nobody else would end it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
