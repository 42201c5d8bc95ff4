"""``qurl plan``: the layouts of N GPUs by predicted step time, and where more GPUs stop helping."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from qurl_megatron.config import ParallelConfig, RunConfig, load
from qurl_megatron.config.arguments import add_recipe
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.text import aligned
from qurl_megatron.plan.constants import ASSUMPTIONS, GB, Constants, gpu_of
from qurl_megatron.plan.layouts import overrides
from qurl_megatron.plan.memory import GIB
from qurl_megatron.plan.planner import Planner, Prediction
from qurl_megatron.plan.seconds import Roofline, Workload
from qurl_megatron.schemes import title
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.training.shapes import check_computed, check_division, find_models

HEAD = ("layout", "GiB", "rollout", "train", "publish", "step s", "tokens/s/GPU", "limited by")
COMPARE_HEAD = ("scheme", "best layout", *HEAD[1:6], "x BF16", "range", "limited by")
COMPARED = (
    "x BF16: steps while BF16 makes one. range: each estimate of GPUs and engines by itself",
    "at both ends of what is plausible (plan/constants.py). Lengths are yours (--mean-tokens).",
)
WORDS = ("layout", "scheme", "best layout", "limited by")
SCALING_HEAD = ("GPUs", "best layout", "step s", "tokens/s/GPU", "limited by")
AS_ESTIMATED = "the estimates hold"
CANDIDATES = 300  # of the fastest layouts, one is the fastest under another assumption, too


def add_plan_options(command: argparse.ArgumentParser) -> None:
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
    command.add_argument(
        "--compare",
        type=lambda text: text.split(","),
        metavar="SCHEME,...",
        help="quant.scheme: the best layout of each beside BF16's, e.g. int8,fp8",
    )
    command.add_argument("--top", type=int, default=12, metavar="N", help="rows of the table")
    command.add_argument(
        "--up-to", type=int, default=1024, metavar="N", help="GPUs to simulate; 0: only --gpus"
    )


def plan(arguments: argparse.Namespace) -> int:
    """Predict memory and step time of every layout of N GPUs, and where more stop helping.

    Raises:
        ConfigError: unknown GPU, a recipe that is not for GPUs, a size given that the model
            forbids, or nothing fits.
    """
    if arguments.compare:
        print(compare(arguments), end="")
        return 0
    planner = make_planner(load(arguments.recipe, arguments.overrides), arguments)
    layouts = planner.plan(arguments.gpus)
    print(render(planner, arguments, layouts, planner.scaling(arguments.up_to)), end="")
    return 0


def compare(arguments: argparse.Namespace) -> str:
    """Return a table of the best layout of each scheme, beside BF16's, and how sure it is."""
    recipe = load(arguments.recipe, arguments.overrides)
    rows: list[tuple[str, ...]] = [COMPARE_HEAD]
    bf16: dict[str, float] = {}
    notes, pasted = [], []
    for scheme in dict.fromkeys(["none", *arguments.compare]):
        settings = [*arguments.overrides, f"quant.scheme={scheme}"]
        config = load(arguments.recipe, settings, named_by=arguments.overrides)
        planner = make_planner(config, arguments)
        layouts = planner.plan(arguments.gpus)
        steps = steps_by_assumption(planner, layouts[:CANDIDATES])
        bf16 = bf16 or steps
        ratio = bf16[AS_ESTIMATED] / steps[AS_ESTIMATED]
        ratios = sorted((bf16[words] / steps[words], words) for words in steps)
        (low, slow), (high, fast) = ratios[0], ratios[-1]
        name, ends = title(scheme), ""
        if scheme != "none":
            ends = f"{low:.2f} to {high:.2f}"
            notes.append(f"{name} is {low:.2f} where {slow}, and {high:.2f} where {fast}.")
        best = layouts[0]
        _, *seconds, _, limit = _cells(best, recipe)
        rows.append((name, best.choice.label(), *seconds, f"{ratio:.2f}", ends, limit))
        pasted.append(f"{name}, as overrides: {pasteable(recipe, best.config, arguments)}")
    table = [_heading(planner, arguments), "", *aligned(rows, words=WORDS)]
    return "\n".join([*table, "", *COMPARED, *notes, "", *pasted]) + "\n"


def steps_by_assumption(planner: Planner, layouts: Sequence[Prediction]) -> dict[str, float]:
    """Return the fastest layout's seconds a step under each assumption; first as estimated."""
    steps = {AS_ESTIMATED: layouts[0].step}
    for name, value, words in ASSUMPTIONS:
        roof = replace(planner.roof, constants=replace(Constants(), **{name: value}))
        moved = replace(planner, roof=roof)
        predictions = [moved.predict(layout.choice, own=layout.own) for layout in layouts]
        steps[words] = min(prediction.step for prediction in predictions if prediction)
    return steps


def make_planner(config: RunConfig, arguments: argparse.Namespace) -> Planner:
    """Return a planner of the recipe on the GPUs that the options name."""
    if config.rollout.backend != "sglang":
        raise ConfigError(
            "qurl plan predicts SGLang engines on GPUs, and "
            f"rollout.backend={config.rollout.backend}: set rollout.backend=sglang"
        )
    node = arguments.gpus_per_node
    if min(arguments.gpus, node) < 1:
        raise ConfigError(f"--gpus {arguments.gpus} --gpus-per-node {node} must be 1 or more")
    if arguments.gpus > node and arguments.gpus % node:
        raise ConfigError(
            f"--gpus {arguments.gpus} is no multiple of --gpus-per-node {node}: "
            "whole machines are planned"
        )
    gpu = gpu_of(arguments.gpu, config.quant.scheme)
    if arguments.network_gbps:
        gpu = replace(gpu, network=arguments.network_gbps * GB)
    models = find_models(config, arguments.config)
    check_computed(config, models.policy)
    _refuse_sizes(config, models.policy, arguments.overrides)
    roof = Roofline(gpu=gpu, constants=Constants(), node=node)
    work = workload(config, arguments.mean_tokens, arguments.mean_prompt_tokens)
    return Planner(config, models, roof, work)


def _refuse_sizes(config: RunConfig, arch: Arch, settings: Sequence[str]) -> None:
    """Raise ``ConfigError`` if the model forbids a size from the command line.

    Planned layouts may replace the recipe's own sizes, but must not silently ignore the user's.
    """
    keys = {setting.partition("=")[0] for setting in settings}
    loosest = ParallelConfig(expert=arch.experts.count if arch.experts else 1)
    sizes = {}
    for name in ("tensor", "pipeline", "expert"):
        if f"parallel.{name}" in keys:
            sizes[name] = getattr(config.parallel, name)
    engine_tensor = config.engine_tensor if "rollout.engine_tensor" in keys else 1
    check_division(config, arch, replace(loosest, **sizes), engine_tensor)


def workload(config: RunConfig, mean: float | None, prompt: float | None) -> Workload:
    """Return the work of a step; raise ``ConfigError`` if a length is beyond the recipe's limit.

    Args:
        mean, prompt: mean lengths of responses and prompts; None takes the constants' shares.
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
    top, shown = arguments.top, best_trainers(layouts)
    rows = [*shown[:top], *(layout for layout in shown[top:] if layout.own)]
    settings = pasteable(planner.config, layouts[0].config, arguments)
    text = [
        f"{_heading(planner, arguments)}, {planner.config.quant.scheme} rollouts",
        "",
        *aligned([HEAD, *(_cells(row, planner.config) for row in rows)], words=WORDS),
        "",
        f"{len(layouts)} layouts fit; the best trainer beside each of {len(shown)} sets of engines "
        "is shown; * is the recipe's own, ~ the same scaled.",
        f"Fastest, as overrides: {settings}",
    ]
    if not any(layout.own for layout in layouts):
        text.insert(-1, _why_not_own(planner, arguments.gpus))
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


def _why_not_own(planner: Planner, gpus: int) -> str:
    """Say that the recipe's layout was not planned, and why if its model forbids it."""
    reason = ""
    try:
        check_division(planner.config, planner.models.policy)
    except ConfigError as error:
        reason = f": {error}"
    return f"The recipe's own layout is not among those of {gpus} GPUs{reason or '.'}"


def _heading(planner: Planner, arguments: argparse.Namespace) -> str:
    work = planner.work
    return (
        f"{arguments.gpus} x {arguments.gpu}, {work.responses} responses a step of {work.mean:.0f} "
        f"tokens (at most {work.longest}) after {work.prompt:.0f}, "
        f"max_staleness {planner.config.rollout.max_staleness}"
    )


def pasteable(before: RunConfig, after: RunConfig, arguments: argparse.Namespace) -> str:
    """Return the given overrides, and those that make the layout, quoted for a shell."""
    settings = {}
    for setting in [*arguments.overrides, *overrides(before, after)]:
        settings[setting.partition("=")[0]] = setting
    return shlex.join(settings.values()) or "the recipe as it is"


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
        f"{row.train.seconds:.1f}",
        f"{row.publish:.1f}",
        f"{row.step:.1f}",
        f"{row.speed:.0f}",
        row.limit,
    ]
