"""``qurl``: one subcommand per task; heavy imports wait until the command is known."""

import argparse
import os
import resource
import sys
import warnings
from pathlib import Path

from qurl_megatron import __version__
from qurl_megatron.checkpoints import commands as checkpoints
from qurl_megatron.config.arguments import Parser, parse
from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.kit.shipped import shipped
from qurl_megatron.kit.terminal import terminal
from qurl_megatron.schemes import ROLLOUT


def main(argv: list[str] | None = None) -> int:
    with terminal(lasting=False) as output:
        arguments = parse(_parser(), argv)
        output.lasting = arguments.run in LASTING
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
    """Raise the soft limit on open files; engines, workers and their pipes take some hundred.

    Raises:
        ConfigError: the hard limit is lower than that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < FEWEST_FILES:
        raise ConfigError(
            f"no more than {limit} files may be open here (ulimit -Hn); raise that to "
            f"{FEWEST_FILES} or more"
        )


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
    if arguments.dry_run:
        return _dry_run(arguments)
    if arguments.recipe:
        from qurl_megatron.config import load, to_toml
        from qurl_megatron.training.shapes import check_layout

        config = load(_recipe(arguments.recipe), arguments.overrides)
        check_layout(config)
        print(to_toml(config))
    elif not arguments.env:
        raise ConfigError("qurl show needs a recipe, or --env")
    return 0


def _dry_run(arguments: argparse.Namespace) -> int:
    if not arguments.recipe:
        raise ConfigError("qurl show --dry-run needs a recipe")
    from qurl_megatron.config import load

    config = load(_recipe(arguments.recipe), arguments.overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about kernels it does not find
        from qurl_megatron.plan.footprint import footprint, render
        from qurl_megatron.training.shapes import find_models
        from qurl_megatron.training.start import look_over

        inputs = look_over(config, arguments.config)
        for mistake in inputs.mistakes:
            print(f"qurl: {mistake}", file=sys.stderr, flush=True)
        models = find_models(config, arguments.config)
        print(render(footprint(config, models, gpu_gib=arguments.gpu_gib)), flush=True)
    if inputs.data:
        print("\n".join(["data", *(f"  {line}" for line in inputs.data)]))
    return 2 if inputs.mistakes else 0


def _recipe(given: Path) -> Path:
    """A recipe, or the recipe of the run whose folder is given.

    Raises:
        ConfigError: the folder is not a run's.
    """
    from qurl_megatron.training.state import RECIPE

    if not given.is_dir():
        return given
    if not (given / RECIPE).is_file():
        raise ConfigError(f"{given} holds no {RECIPE}; name a recipe, or the folder of a run")
    return given / RECIPE


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


def plan(arguments: argparse.Namespace) -> int:
    """Predict memory and step time of every layout of N GPUs, and where more stop helping."""
    from qurl_megatron.plan.command import plan as run

    return run(arguments)


def study(arguments: argparse.Namespace) -> int:
    """Run a grid of methods, schemes and seeds of one recipe, and draw its tables and pictures."""
    from qurl_megatron.evaluation.study import main as run

    return run(
        arguments.study,
        arguments.out,
        jobs=arguments.jobs,
        only=arguments.only,
        mode=arguments.mode,
        overrides=arguments.overrides,
    )


def evaluate(arguments: argparse.Namespace) -> int:
    """Measure accuracy on benchmark files: Avg@1 (greedy) and Avg@k, with confidence intervals."""
    from qurl_megatron.evaluation.evaluate import evaluate as run

    if arguments.run_dir:
        return run(arguments, _settings_of(arguments.run_dir, arguments.step))
    if arguments.before or arguments.step is not None:
        option = "--before" if arguments.before else "--step"
        raise ConfigError(f"{option} is for the checkpoints of a run; name it with --run RUN_DIR")
    return run(arguments)


def _settings_of(run_dir: Path, step: int | None):
    """An evaluation's settings from a run's recipe, and its checkpoint.

    Args:
        step: the checkpoint's; None: the newest.
    """
    from qurl_megatron.config import load
    from qurl_megatron.evaluation.eval_plan import Defaults
    from qurl_megatron.training.state import RECIPE, checkpoints

    by_step = {int(path.name.removeprefix("step_")): path for path in checkpoints(run_dir)}
    if not run_dir.is_dir():
        raise ConfigError(
            f"--run {run_dir} does not exist; name the folder of a run, its train.run_dir"
        )
    if not by_step or not (run_dir / RECIPE).is_file():
        raise ConfigError(
            f"--run {run_dir} holds no checkpoint of a run; name the train.run_dir of one that has "
            "saved a step"
        )
    if step is not None and step not in by_step:
        raise ConfigError(
            f"--step {step}: {run_dir} has no checkpoint of that step; it has those of steps "
            f"{', '.join(map(str, by_step))}"
        )
    chosen = by_step[max(by_step) if step is None else step]
    config = load(run_dir / RECIPE)
    return Defaults(
        run=run_dir,
        model=chosen,
        start=Path(config.model.path),
        prompt_key=config.data.prompt_key,
        answer_key=config.data.answer_key,
        scheme=config.quant.scheme,
        dtype=config.model.dtype,
        chat=config.data.chat,
        top_p=1.0,  # the recipe's policy, all of it
        rollout=config.rollout,
        reward=config.reward,
    )


def serve(arguments: argparse.Namespace) -> int:
    """Serve a model with the embedded engine, by SGLang's /generate; an API key that requests
    must bring is taken from QURL_API_KEY."""
    from qurl_megatron.engines.embedded.endpoints import serve as run
    from qurl_megatron.engines.starting import API_KEY, given_key

    port, api_key = arguments.port, given_key(os.environ)
    if port is None:
        port = 0 if arguments.port_file else 30000
    if api_key is None and arguments.host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(
            f"--host {arguments.host} without a key: whoever reaches it could load weights into "
            f"this engine; set {API_KEY} here and where requests come from, or leave --host out"
        )
    run(
        arguments.model_dir,
        scheme=arguments.scheme,
        dtype=arguments.dtype,
        host=arguments.host,
        port=port,
        port_file=arguments.port_file,
        threads=arguments.threads,
        cache_gb=arguments.cache_gb,
        exit_with_stdin=arguments.exit_with_stdin,
        api_key=api_key,
    )
    # Who ends an engine waits for it, and taking torch apart takes half a second.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def fleet(arguments: argparse.Namespace) -> int:
    """Look at the engines of a run."""
    from qurl_megatron.fleet.fleet_status import show as run

    return run(arguments.urls, api_key_file=arguments.api_key_file)


def bench(arguments: argparse.Namespace) -> int:
    """Measure a part of the system beside its limit, and compare it with an older measurement."""
    from qurl_megatron.bench.command import bench as run

    return run(arguments)


def slurm(arguments: argparse.Namespace) -> int:
    """Turn a recipe into a batch job, and look after it."""
    from qurl_megatron.cluster.actions import run

    return run(arguments)


def _parser() -> Parser:
    parser = Parser(
        prog="qurl",
        description="Reinforcement learning of LLMs with quantized rollouts, on Megatron-Core.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (run, add_options) in COMMANDS.items():
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        add_options(command)
    return parser


def _recipe_options(command: argparse.ArgumentParser, nargs: str | None = None) -> None:
    command.add_argument(
        "recipe",
        type=lambda text: shipped(text, "launch/recipes"),
        nargs=nargs,
        help="TOML recipe, or the name of one that ships, such as quickstart",
    )
    command.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="e.g. quant.scheme=fp8",
    )


def _train_options(command: argparse.ArgumentParser) -> None:
    _recipe_options(command)
    command.add_argument(
        "--fork",
        type=Path,
        metavar="NEW_RUN_DIR",
        help="go on there from the newest checkpoint of the recipe's run, with settings that may "
        "not change in the run itself",
    )


def _show_options(command: argparse.ArgumentParser) -> None:
    _recipe_options(command, nargs="?")
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


def _plan_options(command: argparse.ArgumentParser) -> None:
    _recipe_options(command)
    command.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs in all")
    command.add_argument("--gpu", default="h100", help="kind: a100-80, h100, h200 or b200")
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
    command.add_argument("--json", action="store_true", help="every layout, and all numbers")


def _study_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("study", type=Path, help="TOML study file; some ship in launch/studies")
    command.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="of every run, e.g. train.steps=2",
    )
    command.add_argument(
        "--out", type=Path, required=True, help="folder of its runs, tables and pictures"
    )
    command.add_argument("--jobs", type=int, default=1, help="runs at once, sharing the cores")
    command.add_argument(
        "--only", default="*", metavar="PATTERN", help="cells to run or list, e.g. 'acr*-int8-*'"
    )
    modes = command.add_mutually_exclusive_group()
    for name, help in (
        ("status", "only show how far each cell is"),
        ("dry-run", "only print the commands"),
    ):
        value = name.replace("-", "_")
        modes.add_argument(f"--{name}", dest="mode", action="store_const", const=value, help=help)


def _eval_options(command: argparse.ArgumentParser) -> None:
    from qurl_megatron.evaluation.eval_plan import add_options

    add_options(command, ROLLOUT)


def _serve_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("model_dir", type=Path, help="Hugging Face checkpoint folder")
    command.add_argument("--scheme", choices=ROLLOUT, default="int8")
    command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    command.add_argument("--host", default="127.0.0.1")
    command.add_argument("--port", type=int, help="default 30000, or a free one with --port-file")
    command.add_argument(
        "--port-file", type=Path, help="the port is written here once the engine is ready"
    )
    command.add_argument(
        "--threads", type=int, default=0, help="CPU threads; 0 leaves torch's default"
    )
    command.add_argument("--cache-gb", type=float, default=2.0, help="key/value cache, GiB")
    command.add_argument(
        "--exit-with-stdin",
        action="store_true",
        help="leave when standard input closes (set by qurl train)",
    )


def _fleet_options(command: argparse.ArgumentParser) -> None:
    looks = command.add_subparsers(dest="look", required=True, metavar="COMMAND")
    status = looks.add_parser(
        "status", help="a table of versions and queues of embedded and SGLang engines"
    )
    status.add_argument("urls", nargs="+", metavar="URL", help="e.g. http://127.0.0.1:30000")
    status.add_argument(
        "--api-key-file", type=Path, help="file with the engines' key; else QURL_API_KEY is taken"
    )


def _bench_options(command: argparse.ArgumentParser) -> None:
    from qurl_megatron.bench.command import add_benchmarks

    add_benchmarks(command)


def _slurm_options(command: argparse.ArgumentParser) -> None:
    from qurl_megatron.cluster.actions import add_actions

    add_actions(command)


COMMANDS = {
    "train": (train, _train_options),
    "show": (show, _show_options),
    "report": (report, _report_options),
    "samples": (samples, _samples_options),
    "plan": (plan, _plan_options),
    "study": (study, _study_options),
    "eval": (evaluate, _eval_options),
    "convert": (checkpoints.convert, checkpoints.add_convert_options),
    "export": (checkpoints.export, checkpoints.add_export_options),
    "quantize": (checkpoints.quantize, checkpoints.add_quantize_options),
    "inspect": (checkpoints.inspect_checkpoint, checkpoints.add_inspect_options),
    "diff": (checkpoints.diff, checkpoints.add_diff_options),
    "serve": (serve, _serve_options),
    "fleet": (fleet, _fleet_options),
    "bench": (bench, _bench_options),
    "slurm": (slurm, _slurm_options),
}
"""Each command: its function, and the function that adds its options."""

OPEN_FILES, FEWEST_FILES = 65536, 256
LASTING = (train, study, evaluate, serve)
"""They go on without a terminal: their work is more than their output."""


if __name__ == "__main__":
    sys.exit(main())
