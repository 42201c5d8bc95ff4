"""``qurl``: one subcommand per task; heavy imports wait until the command is known."""

import argparse
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qurl_megatron import __version__
from qurl_megatron.bench.command import add_benchmarks, bench
from qurl_megatron.checkpoints import commands as checkpoints
from qurl_megatron.cluster.actions import add_actions, slurm
from qurl_megatron.config.arguments import Parser, add_recipe, parse
from qurl_megatron.engines.starting import add_serve_options, serve
from qurl_megatron.evaluation.eval_plan import add_options, evaluate
from qurl_megatron.evaluation.study_plan import add_study_options, study
from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.kit.terminal import terminal
from qurl_megatron.plan.command import add_plan_options, plan

if TYPE_CHECKING:
    from qurl_megatron.config import RunConfig


def main(argv: list[str] | None = None) -> int:
    with terminal(lasting=False) as output:
        arguments = parse(_parser(), argv)
        output.lasting = arguments.command in LASTING
        try:
            if output.lasting:
                _allow_open_files()
            return arguments.run(arguments)
        except (ConfigError, PermissionError) as error:
            print(f"qurl: {printable(str(error))}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:  # before there are ranks, which save first
            return 130


def _allow_open_files() -> None:
    """Raise the soft limit on open files: engines, workers and their pipes take some hundred."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def train(arguments: argparse.Namespace) -> int:
    """Train a policy with quantized rollouts; resumes where the run directory left off."""
    from qurl_megatron.config import load

    # Changes of a fork name no folder: the run to fork is the recipe's, or train.run_dir.
    named_by = None if arguments.fork is None else ()
    config = load(arguments.recipe, arguments.overrides, named_by=named_by)
    from qurl_megatron.training.start import start

    return start(config, arguments.fork)


def show(arguments: argparse.Namespace) -> int:
    """Print a recipe or that of a run's folder, resolved, or with --env what is installed and what
    it changes, or with --dry-run what each rank would keep in memory."""
    if arguments.env:
        from qurl_megatron.config.env import describe

        print(describe())
        if not arguments.recipe:
            return 0
    if not arguments.recipe:
        raise ConfigError("qurl show needs a recipe, or --env")
    from qurl_megatron.config import load, to_toml

    recipe = arguments.recipe
    if recipe.is_dir():
        from qurl_megatron.training.state import RECIPE

        recipe = recipe / RECIPE
        if not recipe.is_file():
            raise ConfigError(
                f"{arguments.recipe} holds no {RECIPE}; name a recipe, or the folder of a run"
            )
    config = load(recipe, arguments.overrides)
    if arguments.dry_run:
        return _dry_run(config, arguments)
    print(to_toml(config))
    return 0


def _dry_run(config: "RunConfig", arguments: argparse.Namespace) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about kernels it does not find
        from qurl_megatron.plan.footprint import footprint, render
        from qurl_megatron.training.shapes import find_models
        from qurl_megatron.training.start import look_over

        models = find_models(config, arguments.config)
        mistakes, data = look_over(config, models.policy)
        for mistake in mistakes:
            print(f"qurl: {mistake}", file=sys.stderr, flush=True)
        print(render(footprint(config, models, gpu_gib=arguments.gpu_gib)), flush=True)
    if data:
        print("\n".join(["data", *(f"  {line}" for line in data)]))
    return 2 if mistakes else 0


def report(arguments: argparse.Namespace) -> int:
    """Write RUN_DIR/report.html, one self-contained page with the pictures of a run."""
    from qurl_megatron.observe.report import write_report

    print(printable(str(write_report(arguments.run_dir))))
    return 0


def samples(arguments: argparse.Namespace) -> int:
    """Print prompts and responses that a run has kept, with rewards and advantages."""
    from qurl_megatron.observe.samples import as_text, say, select

    examples = select(
        arguments.run_dir,
        step=arguments.step,
        worst=arguments.worst,
        best=arguments.best,
        prompt=arguments.prompt,
    )
    say("\n\n".join(map(as_text, examples)))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="qurl",
        description="Reinforcement learning of LLMs with quantized rollouts, on Megatron-Core.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (run, add) in COMMANDS.items():
        summary = (run.__doc__ or "").partition("\n\n")[0]
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(run=run)
        add(command)
    return parser


def _train_options(command: argparse.ArgumentParser) -> None:
    add_recipe(command)
    command.add_argument(
        "--fork",
        type=Path,
        metavar="NEW_RUN_DIR",
        help="go on there from the newest checkpoint of the recipe's run, with settings that may "
        "not change in the run itself",
    )


def _show_options(command: argparse.ArgumentParser) -> None:
    add_recipe(command, nargs="?")
    command.add_argument(
        "--env", action="store_true", help="what is installed, and what it changes"
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="build the run without weights, on no GPU, and print the memory of each rank",
    )
    command.add_argument(
        "--config",
        type=Path,
        metavar="DIR",
        help="the model's config.json, or its folder, for --dry-run; default: where model.path is",
    )
    command.add_argument(
        "--gpu-gib", type=float, default=80, help="memory of a GPU, for --dry-run; default 80"
    )


def _report_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", type=Path, help="train.run_dir of the run")


def _samples_options(command: argparse.ArgumentParser) -> None:
    _report_options(command)
    command.add_argument(
        "--step", type=int, metavar="N", help="default the newest; with --prompt, all of them"
    )
    command.add_argument("--worst", type=int, metavar="N", help="the N lowest rewards")
    command.add_argument("--best", type=int, metavar="N", help="the N highest rewards")
    command.add_argument(
        "--prompt", default="", metavar="TEXT", help="of prompts that contain this text"
    )


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], Callable[..., None]]] = {
    "train": (train, _train_options),
    "show": (show, _show_options),
    "report": (report, _report_options),
    "samples": (samples, _samples_options),
    "plan": (plan, add_plan_options),
    "study": (study, add_study_options),
    "eval": (evaluate, add_options),
    "convert": (checkpoints.convert, checkpoints.add_convert_options),
    "export": (checkpoints.export, checkpoints.add_export_options),
    "quantize": (checkpoints.quantize, checkpoints.add_quantize_options),
    "inspect": (checkpoints.inspect_checkpoint, checkpoints.add_inspect_options),
    "diff": (checkpoints.diff, checkpoints.add_diff_options),
    "serve": (serve, add_serve_options),
    "bench": (bench, add_benchmarks),
    "slurm": (slurm, add_actions),
}
"""Each command: its function, whose docstring is the help, and the function that adds its options.
The modules that they stand in are light."""

OPEN_FILES = 65536
LASTING = ("train", "study", "eval", "serve")
"""Commands that go on without a terminal: their work is more than their output."""


if __name__ == "__main__":
    sys.exit(main())
