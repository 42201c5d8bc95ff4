"""``qurl plan``: the layouts of N GPUs by predicted step time, and where more GPUs stop helping."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from qurl_megatron.config import RunConfig, load
from qurl_megatron.config.arguments import add_recipe
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.text import aligned
from qurl_megatron.plan.constants import GB, Constants, gpu_of
from qurl_megatron.plan.layouts import overrides
from qurl_megatron.plan.memory import GIB
from qurl_megatron.plan.planner import Planner, Prediction
from qurl_megatron.plan.seconds import Roofline, Workload
from qurl_megatron.training.shapes import find_models

HEAD = ("layout", "GiB", "rollout", "train", "publish", "step s", "tokens/s/GPU", "limited by")
WORDS = ("layout", "best layout", "limited by")
SCALING_HEAD = ("GPUs", "best layout", "step s", "tokens/s/GPU", "limited by")


def add_plan_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``qurl plan``."""
    add_recipe(command)
    command.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs in all")
    kinds = "kind: a100-80, h100, h200 or b200"
    command.add_argument("--gpu", type=str.lower, default="h100", help=kinds)
    command.add_argument("--gpus-per-node", type=int, default=8, metavar="N")
    command.add_argument(
        "--network-gbps", type=float, metavar="GB", help="GB/s of the network per GPU, one way"
    )
    command.add_argument(
        "--mean-tokens", type=float, metavar="N", help="mean length of a response, in tokens"
    )
    command.add_argument("--mean-prompt-tokens", type=float, metavar="N", help="and of a prompt")
    command.add_argument(
        "--config",
        type=Path,
        metavar="DIR",
        help="the model's config.json, or its folder; default: where model.path is",
    )
    command.add_argument("--top", type=int, default=12, metavar="N", help="rows of the table")
    command.add_argument(
        "--up-to", type=int, default=1024, metavar="N", help="GPUs to simulate; 0: only --gpus"
    )


def plan(arguments: argparse.Namespace) -> int:
    """Predict memory and step time of every layout of N GPUs, and where more stop helping.

    Raises:
        ConfigError: unknown GPU, a recipe that is not for GPUs, or nothing fits.
    """
    config = load(arguments.recipe, arguments.overrides)
    planner = make_planner(config, arguments)
    layouts = planner.plan(arguments.gpus)
    if not layouts:
        raise planner.nothing_fits(arguments.gpus, arguments.gpu)
    curve = planner.scaling(arguments.up_to)
    print(render(planner, arguments, layouts, curve), end="")
    return 0


def make_planner(config: RunConfig, arguments: argparse.Namespace) -> Planner:
    """Return a planner of the recipe on the GPUs that the options name."""
    if config.rollout.backend != "sglang":
        raise ConfigError(
            "qurl plan predicts SGLang engines on GPUs, and "
            f"rollout.backend={config.rollout.backend}: set rollout.backend=sglang"
        )
    node = arguments.gpus_per_node
    for name, value in (("--gpus", arguments.gpus), ("--gpus-per-node", node)):
        if value < 1:
            raise ConfigError(f"{name} must be 1 or more, got {value}")
    if arguments.gpus > node and arguments.gpus % node:
        raise ConfigError(
            f"--gpus {arguments.gpus} is no multiple of --gpus-per-node {node}: "
            "whole machines are planned"
        )
    gpu = gpu_of(arguments.gpu, config.quant.scheme)
    if arguments.network_gbps:
        gpu = replace(gpu, network=arguments.network_gbps * GB)
    models = find_models(config, arguments.config)
    models.policy.refuse_without_engine(f"model.path={config.model.path}: ")
    roof = Roofline(gpu=gpu, constants=Constants(), node=node)
    work = workload(config, arguments.mean_tokens, arguments.mean_prompt_tokens)
    return Planner(config, models, roof, work)


def workload(config: RunConfig, mean: float | None, prompt: float | None) -> Workload:
    """Return the work that a step of the recipe asks for.

    Args:
        mean, prompt: mean lengths of responses and prompts; None takes the constants' shares.

    Raises:
        ConfigError: one of them is beyond the recipe's limit.
    """
    longest, longest_prompt = config.rollout.max_new_tokens, config.data.max_prompt_tokens
    for option, value, key, limit in (
        ("--mean-tokens", mean, "rollout.max_new_tokens", longest),
        ("--mean-prompt-tokens", prompt, "data.max_prompt_tokens", longest_prompt),
    ):
        if value is not None and not 0 < value <= limit:
            raise ConfigError(f"{option} {value:g} must lie between 1 and {key}={limit}")
    return Workload(
        prompts=config.data.prompts_per_step,
        samples=config.rollout.samples_per_prompt,
        prompt=prompt or Constants.mean_prompt * longest_prompt,
        mean=mean or Constants.mean_response * longest,
        longest=longest,
        minibatches=config.algo.minibatches,
        epochs=config.algo.epochs,
    )


def best_trainers(layouts: Sequence[Prediction]) -> list[Prediction]:
    """Return the fastest layout for each set of engines, plus the recipe's own."""
    engine_layouts, best = set(), []
    for layout in layouts:
        choice = layout.choice
        engines = (choice.colocated, choice.engines, choice.engine_tensor)
        if engines not in engine_layouts or layout.own:
            best.append(layout)
        engine_layouts.add(engines)
    return best


def render(
    planner: Planner,
    arguments: argparse.Namespace,
    layouts: Sequence[Prediction],
    curve: Sequence[Prediction],
) -> str:
    """Return the tables and the sentences below them."""
    work, top = planner.work, arguments.top
    shown = best_trainers(layouts)
    rows = [*shown[:top], *(layout for layout in shown[top:] if layout.own)]
    settings = overrides(planner.config, layouts[0].config)
    changed = {setting.partition("=")[0] for setting in settings}
    kept = [given for given in arguments.overrides if given.partition("=")[0] not in changed]
    text = [
        f"{arguments.gpus} x {arguments.gpu}, {work.responses} responses a step of {work.mean:.0f} "
        f"tokens (at most {work.longest}) after {work.prompt:.0f}, "
        f"{planner.config.quant.scheme} rollouts, "
        f"max_staleness {planner.config.rollout.max_staleness}",
        "",
        *aligned([HEAD, *(_cells(row, planner.config) for row in rows)], words=WORDS),
        "",
        f"{len(layouts)} layouts fit; the best trainer beside each of {len(shown)} sets of engines "
        "is shown; * is the recipe's own, ~ the same scaled.",
        f"Fastest, as overrides: {shlex.join([*kept, *settings]) or 'the recipe as it is'}",
    ]
    if not any(layout.own for layout in layouts):
        text.insert(-1, f"The recipe's own layout is not among those of {arguments.gpus} GPUs.")
    if curve:
        scaling = [SCALING_HEAD]
        for best in curve:
            speed = (f"{best.step:.1f}", f"{best.speed:.0f}", best.limit)
            scaling.append((str(best.choice.gpus), best.choice.label(), *speed))
        text += [
            "",
            *aligned(scaling, words=WORDS),
            stop_sentence(curve, planner.roof.constants.worth),
        ]
    return "\n".join(text) + "\n"


def stop_sentence(curve: Sequence[Prediction], worth: float) -> str:
    """Name the doubling that saves less than ``worth`` of the step, and its limit."""
    for best, doubled in zip(curve, curve[1:], strict=False):
        saved = 1 - doubled.step / best.step
        if doubled.choice.gpus == 2 * best.choice.gpus and saved < worth:
            return (
                f"It stops scaling at {best.choice.gpus} GPUs: twice as many take "
                f"{100 * saved:.1f} % off the step, limited by {doubled.limit}."
            )
    return f"It scales up to {curve[-1].choice.gpus} GPUs, the most that were simulated."


def _cells(row: Prediction, recipe: RunConfig) -> list[str]:
    mark = " "
    if row.own:
        mark = "*" if row.config == recipe else "~"
    return [
        f"{mark} {row.choice.label()}",
        f"{row.bytes / GIB:.1f}",
        f"{row.rollout.seconds:.1f}",
        f"{row.training:.1f}",
        f"{row.publish:.1f}",
        f"{row.step:.1f}",
        f"{row.speed:.0f}",
        row.limit,
    ]
