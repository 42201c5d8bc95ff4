"""``qurl``: one subcommand per task; heavy imports wait until the command is known."""

import argparse
import os
import sys
from pathlib import Path

from qurl_megatron import __version__
from qurl_megatron.errors import ConfigError

SCHEMES = ("none", "int8", "fp8", "int6", "int5", "int4")  # of rollouts


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except ConfigError as error:
        print(f"qurl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before there are ranks, which save first
        return 130


def train(arguments: argparse.Namespace) -> int:
    """Train a policy with quantized rollouts; resumes where the run directory left off."""
    from qurl_megatron.config import load

    config = load(arguments.recipe, arguments.overrides)
    from qurl_megatron.training.start import start

    return start(config)


def show(arguments: argparse.Namespace) -> int:
    """Print the resolved recipe, or with --env what is installed and what it changes."""
    if arguments.env:
        from qurl_megatron.runtime.env import describe

        print(describe())
    if arguments.recipe:
        from qurl_megatron.config import load, to_toml

        print(to_toml(load(arguments.recipe, arguments.overrides)))
    elif not arguments.env:
        raise ConfigError("qurl show needs a recipe, or --env")
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Write RUN_DIR/report.html, one self-contained page with the pictures of a run."""
    from qurl_megatron.observe.report import write_report

    print(write_report(arguments.run_dir))
    return 0


def serve(arguments: argparse.Namespace) -> int:
    """Serve a model with the embedded engine, over SGLang's HTTP protocol; an API key that requests
    must bring is taken from QURL_API_KEY."""
    from qurl_megatron.rollout.embedded.server import serve as run

    port = arguments.port
    if port is None:
        port = 0 if arguments.port_file else 30000
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
        api_key=os.environ.get("QURL_API_KEY") or None,
    )
    return 0


def fleet(arguments: argparse.Namespace) -> int:
    """Look at the engines of a run."""
    from qurl_megatron.rollout.status import show as run

    return run(arguments.urls, watch_s=arguments.watch, api_key_file=arguments.api_key_file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qurl",
        description="Reinforcement learning of LLMs with quantized rollouts, on Megatron-Core.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(run) -> argparse.ArgumentParser:
        added = commands.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        added.set_defaults(run=run)
        return added

    def recipe(command: argparse.ArgumentParser, nargs: str | None = None) -> None:
        command.add_argument(
            "recipe", type=Path, nargs=nargs, help="TOML recipe; some ship in launch/recipes"
        )
        command.add_argument(
            "overrides", nargs="*", metavar="section.key=value", help="e.g. quant.scheme=fp8"
        )

    recipe(command(train))

    shown = command(show)
    recipe(shown, nargs="?")
    shown.add_argument("--env", action="store_true", help="what is installed, and what it changes")

    command(report).add_argument("run_dir", type=Path, help="train.run_dir of the run")

    served = command(serve)
    served.add_argument("model_dir", type=Path, help="Hugging Face checkpoint folder")
    served.add_argument("--scheme", choices=SCHEMES, default="int8")
    served.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    served.add_argument("--host", default="127.0.0.1")
    served.add_argument("--port", type=int, help="default 30000, or a free one with --port-file")
    served.add_argument(
        "--port-file", type=Path, help="the port is written here once the engine is ready"
    )
    served.add_argument(
        "--threads", type=int, default=0, help="CPU threads; 0 leaves torch's default"
    )
    served.add_argument("--cache-gb", type=float, default=2.0, help="key/value cache, GiB")
    served.add_argument(
        "--exit-with-stdin",
        action="store_true",
        help="leave when standard input closes (set by qurl train)",
    )

    looks = command(fleet).add_subparsers(dest="look", required=True, metavar="LOOK")
    status = looks.add_parser(
        "status", help="a table of versions, queues and speeds of embedded and SGLang engines"
    )
    status.add_argument("urls", nargs="+", metavar="URL", help="e.g. http://127.0.0.1:30000")
    status.add_argument("--watch", type=float, metavar="S", help="again every S seconds")
    status.add_argument(
        "--api-key-file", type=Path, help="file with the engines' key; else QURL_API_KEY is taken"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
