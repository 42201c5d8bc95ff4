"""``qurl plan``: the layouts of N GPUs by predicted step time, and where more GPUs stop helping."""

import argparse
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from qurl_megatron.config import RunConfig, load
from qurl_megatron.errors import ConfigError
from qurl_megatron.planning.constants import GB, Constants, Gpu, constants_of, gpu_of, table
from qurl_megatron.planning.layouts import check_backend, overrides, own_choice, scaled
from qurl_megatron.planning.machine import CPU, here
from qurl_megatron.planning.measured import corrected, read_run
from qurl_megatron.planning.predict import Planner, Prediction
from qurl_megatron.planning.scaling import Stop, best_of, sizes, stop
from qurl_megatron.planning.workload import Workload
from qurl_megatron.training.footprint import GIB, find_models

HEAD = ("layout", "GiB", "rollout", "train", "publish", "step s", "tokens/s/GPU", "limited by")


def plan(arguments: argparse.Namespace) -> int:
    """Predict, and print.

    Raises:
        ConfigError: unknown GPU, a recipe that is not for GPUs, or nothing fits.
    """
    config = load(arguments.recipe, arguments.overrides)
    planner = make_planner(config, arguments)
    gpus = arguments.gpus
    found = planner.plan(gpus)
    if not found:
        raise planner.nothing_fits(gpus, arguments.gpu)
    curve: list[Prediction] = []
    if arguments.up_to:
        curve = best_of(planner, sizes(arguments.gpus_per_node, arguments.up_to))
    shown = found if arguments.all else list(best_trainers(found))
    if arguments.confirm:
        confirm(planner, shown[: arguments.top], arguments)
    if arguments.json:
        print(json.dumps(as_json(planner, arguments, found, curve), indent=1))
    else:
        print(render(planner, arguments, found, shown, curve), end="")
    return 0


def make_planner(config: RunConfig, arguments: argparse.Namespace) -> Planner:
    """With the constants that the options say."""
    check_backend(config.rollout, arguments.gpu)
    node = arguments.gpus_per_node
    for name, value in (("--gpus", arguments.gpus), ("--gpus-per-node", node)):
        if value < 1:
            raise ConfigError(f"{name} must be 1 or more, got {value}")
    if arguments.gpus > node and arguments.gpus % node:
        raise ConfigError(
            f"--gpus {arguments.gpus} is no multiple of --gpus-per-node {node}: "
            "whole machines are planned"
        )
    if arguments.gpu == CPU:
        gpu = here(config.model.dtype)
    else:
        gpu = gpu_of(arguments.gpu, config.quant.scheme)
    if arguments.network_gbps:
        gpu = replace(gpu, network=arguments.network_gbps * GB)
    models = find_models(config, arguments.config)
    models.policy.refuse_without_engine(f"model.path={config.model.path}: ")
    constants = constants_of(gpu, config.quant.scheme)
    mean = arguments.mean_tokens
    if arguments.measured:
        constants, measured_mean = from_run(arguments, gpu, constants)
        mean = mean or measured_mean
    work = workload(config, constants, mean, arguments.mean_prompt_tokens)
    return Planner(config, models, gpu, constants, work, node=node)


def workload(
    config: RunConfig, constants: Constants, mean: float | None, prompt: float | None
) -> Workload:
    """What a step of the recipe asks for.

    Args:
        mean, prompt: mean lengths of responses and prompts; None takes the constants' shares.

    Raises:
        ConfigError: one of them is beyond the recipe's limit.
    """
    longest, longest_prompt = config.rollout.max_new_tokens, config.data.max_prompt_tokens
    limits = (
        ("--mean-tokens", mean, "rollout.max_new_tokens", longest),
        ("--mean-prompt-tokens", prompt, "data.max_prompt_tokens", longest_prompt),
    )
    for option, value, key, limit in limits:
        if value is not None and not 0 < value <= limit:
            raise ConfigError(f"{option} {value:g} must lie between 1 and {key}={limit}")
    return Workload(
        prompts=config.data.prompts_per_step,
        samples=config.rollout.samples_per_prompt,
        prompt=prompt or constants.mean_prompt * longest_prompt,
        mean=mean or constants.mean_response * longest,
        longest=longest,
        minibatches=config.algo.minibatches,
        epochs=config.algo.epochs,
    )


def from_run(
    arguments: argparse.Namespace, gpu: Gpu, constants: Constants
) -> tuple[Constants, float]:
    """The constants that a run implies, and the mean length of its responses.

    Raises:
        ConfigError: the folder is not that of a run on such GPUs.
    """
    folder: Path = arguments.measured
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"--measured {folder} has no config.toml; name a run's folder")
    config = load(folder / "config.toml")
    check_backend(config.rollout, arguments.gpu)
    run = read_run(folder, config.data.prompts_per_step * config.rollout.samples_per_prompt)
    models = find_models(config, arguments.config)
    work = workload(config, constants, run.length, arguments.mean_prompt_tokens)
    planner = Planner(config, models, gpu, constants, work, node=arguments.gpus_per_node)
    choice = own_choice(config)
    predicted = planner.predict(choice, own=True)
    if predicted is None:
        raise ConfigError(
            f"--measured {folder}: {choice.label()} does not fit on {arguments.gpu}, so the run "
            "was on other GPUs; name them with --gpu"
        )
    return corrected(constants, predicted, run), run.length


def best_trainers(found: Sequence[Prediction]) -> Iterator[Prediction]:
    """Of layouts that differ in the trainer's alone, the first; and the recipe's own."""
    seen = set()
    for one in found:
        choice = one.choice
        key = (choice.colocated, choice.engines, choice.engine_tensor)
        if key not in seen or one.own:
            yield one
        seen.add(key)


def confirm(planner: Planner, rows: Sequence[Prediction], arguments: argparse.Namespace) -> None:
    """Build the rows, and compare their memory.

    Raises:
        ConfigError: a dry run finds other sums than the formula.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Megatron, which all else here does without
        from qurl_megatron.training.dry_run import dry_run

    for row in rows:
        size = dry_run(row.config, arguments.config, gpu_gib=planner.gpu.gib).fullest[2]
        if size != row.bytes:
            raise ConfigError(
                f"{row.choice.label()}: the dry run finds {size} bytes on the fullest GPU, the "
                f"formula {row.bytes}; please report this, with the recipe"
            )


def render(
    planner: Planner,
    arguments: argparse.Namespace,
    found: Sequence[Prediction],
    shown: Sequence[Prediction],
    curve: Sequence[Prediction],
) -> str:
    """What the command prints."""
    work, top = planner.work, arguments.top
    rows = list(shown[:top])
    rows += [one for one in shown[top:] if one.own]
    text = [
        f"{arguments.gpus} x {arguments.gpu}, {work.responses} responses a step of {work.mean:.0f} "
        f"tokens (at most {work.longest}) after {work.prompt:.0f}, "
        f"{planner.config.quant.scheme} rollouts, "
        f"max_staleness {planner.config.rollout.max_staleness}",
        "",
        *_table(HEAD, [_cells(row) for row in rows]),
        "",
        f"{len(found)} layouts fit{_hidden(found, shown)}; * is the recipe's own.",
    ]
    if not any(one.own for one in found):
        text.append(_own_missing(planner, arguments.gpus))
    if arguments.confirm:
        text.append("The dry run finds the same memory for these rows, to the byte.")
    best = found[0]
    settings = overrides(planner.config, best.config)
    text.append(f"Fastest, as overrides: {' '.join(settings) or 'the recipe as it is'}")
    if curve:
        head = ("GPUs", "best layout", "step s", "tokens/s/GPU", "limited by")
        text += ["", *_table(head, [[str(c.choice.gpus), *_short(c)] for c in curve])]
        text.append(stop_sentence(stop(curve, planner.constants.worth), curve))
    return "\n".join(text) + "\n"


def stop_sentence(found: Stop | None, curve: Sequence[Prediction]) -> str:
    if found is None:
        return f"It scales up to {curve[-1].choice.gpus} GPUs, the most that were simulated."
    phase, _, why = found.doubled.limit.partition(": ")
    return (
        f"It stops scaling at {found.gpus} GPUs: twice as many take {100 * found.saved:.1f} % off "
        f"the step, limited by {phase}" + (f" ({why})." if why else ".")
    )


def _hidden(found: Sequence[Prediction], shown: Sequence[Prediction]) -> str:
    if len(shown) == len(found):
        return ""
    return f"; the best trainer beside each of {len(shown)} sets of engines is shown (--all: all)"


def _own_missing(planner: Planner, gpus: int) -> str:
    own = scaled(own_choice(planner.config), gpus)
    if own is None:
        return f"The recipe's own layout does not come out whole on {gpus} GPUs."
    return f"The recipe's own layout, {own.label()}, does not fit or does not divide the batch."


def _cells(row: Prediction) -> list[str]:
    return [
        ("* " if row.own else "  ") + row.choice.label(),
        f"{row.bytes / GIB:.1f}",
        f"{row.rollout.seconds:.1f}",
        f"{row.training.seconds:.1f}",
        f"{row.publish:.1f}",
        f"{row.step:.1f}",
        f"{row.speed:.0f}",
        row.limit,
    ]


def _short(row: Prediction) -> list[str]:
    return [row.choice.label(), f"{row.step:.1f}", f"{row.speed:.0f}", row.limit]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Words to the left, numbers to the right."""
    lines = [list(head), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    words = {i for i, name in enumerate(head) if name in ("layout", "best layout", "limited by")}
    return [
        "  ".join(
            f"{cell:<{width}}" if i in words else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def as_json(
    planner: Planner,
    arguments: argparse.Namespace,
    found: Sequence[Prediction],
    curve: Sequence[Prediction],
) -> dict[str, Any]:
    """Everything, for programs; ``own`` is what ``qurl report`` shows beside a run."""
    stopped = stop(curve, planner.constants.worth)
    own = next((one for one in found if one.own), None)
    return {
        "gpu": arguments.gpu,
        "gpus": arguments.gpus,
        "gpus_per_node": arguments.gpus_per_node,
        "work": asdict(planner.work),
        "constants": table(
            arguments.gpu, planner.gpu, planner.constants, planner.config.quant.scheme
        ),
        "own": own and _row(planner, own),
        "layouts": [_row(planner, one) for one in found],
        "scaling": [_row(planner, one) for one in curve],
        "stops": stopped and {"gpus": stopped.gpus, "saved": stopped.saved},
    }


def _row(planner: Planner, row: Prediction) -> dict[str, Any]:
    return {
        "layout": row.choice.label(),
        "own": row.own,
        **asdict(row.choice),
        "gpus": row.choice.gpus,
        "bytes": row.bytes,
        "phase": row.phase,
        "seconds": {
            "rollout": row.rollout.seconds,
            "score": row.training.score,
            "train": row.training.train,
            "publish": row.publish,
            "reload": row.reload,
            "step": row.step,
        },
        "metrics": row.logged,
        "rollout_parts": row.rollout.parts,
        "training_parts": row.training.parts,
        "slots": row.rollout.slots,
        "tokens_per_s_and_gpu": row.speed,
        "limited_by": row.limit,
        "overrides": overrides(planner.config, row.config),
    }
