"""``qurl bench BENCHMARK``: measure, show the table and keep the record, DIR/BENCHMARK.json.

Every ``--help`` reads the options, so a benchmark is imported when it runs.
"""

import argparse
from importlib import import_module
from pathlib import Path

SCHEMES = ("bf16", "int8", "fp8")


def bench(options: argparse.Namespace) -> int:
    """Measure a part of the system beside its limit.

    Raises:
        ConfigError: it cannot be run here, or with these options.
    """
    from qurl_megatron.bench.record import recorded

    module = import_module(f"qurl_megatron.bench.{options.benchmark}")
    record = recorded(options.benchmark, "qurl", lambda: module.run(options))
    record.keep(options.out)
    if options.benchmark == "rollout":
        for line in module.ratios(record.cases):
            print(line)
    return 0


def add_benchmarks(command: argparse.ArgumentParser) -> None:
    names = command.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    text = "engines under a load with long-tailed, grouped responses"
    add_rollout(names.add_parser("rollout", help=text, description=f"Measure {text}."))
    text = "seconds of a whole RL step, with other settings of a recipe side by side"
    add_step(names.add_parser("step", help=text, description=f"Measure {text}."))


def add_rollout(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        default="h1024",
        metavar="SHAPE_OR_PATH",
        help="a shape of launch/models (tiny, h1024, Qwen2.5-14B, ...), or any folder with a "
        "config.json; default h1024",
    )
    add("--schemes", choices=SCHEMES, nargs="+", default=list(SCHEMES), help="default: all")
    add(
        "--engine",
        choices=("embedded", "sglang"),
        nargs="+",
        default=["embedded"],
        help="default embedded",
    )
    add(
        "--tensor",
        type=count,
        nargs="+",
        default=[1],
        metavar="N",
        help="ranks of an SGLang engine; default 1",
    )
    add("--sglang-python", default="", metavar="PATH", help="Python that has SGLang")
    add(
        "--cache-gb",
        type=float,
        default=2.0,
        metavar="GIB",
        help="keys and values of an embedded engine; default 2",
    )
    add("--prompts", type=count, nargs="+", default=[8], metavar="N", help="default 8; a load each")
    add("--samples", type=count, default=4, metavar="N", help="responses to each; default 4")
    add("--prompt", type=count, default=32, metavar="N", help="tokens of a prompt; default 32")
    add("--mean", type=float, default=64.0, metavar="N", help="tokens of a response; default 64")
    add("--max", type=count, default=256, metavar="N", help="of the longest one; default 256")
    add(
        "--publish",
        type=count,
        default=0,
        metavar="N",
        help="new weights so many times, evenly over the tokens of a load; default: never",
    )
    _add_common(parser, repeats=10)


def add_step(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--recipe",
        type=Path,
        default=Path("launch/recipes/quickstart.toml"),
        metavar="FILE.toml",
        help="the recipe to run; default: quickstart",
    )
    add(
        "--case",
        action="append",
        default=[],
        metavar='"section.key=value ..."',
        help="one setting to measure, as overrides; give it as often as there are settings. "
        "Default: rollout.max_staleness of 0, 1 and 2",
    )
    add("--steps", type=count, default=8, metavar="N", help="steps of one repeat; default 8")
    _add_common(parser, repeats=9)
    add("overrides", nargs="*", metavar="section.key=value", help="of every case")


def _add_common(parser: argparse.ArgumentParser, *, repeats: int) -> None:
    parser.add_argument(
        "--repeats",
        type=count,
        default=repeats,
        metavar="N",
        help=f"how often each case is measured; default {repeats}",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for BENCHMARK.json; default: only the table"
    )


def count(text: str) -> int:
    """Read a whole number above 0."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError("must be a whole number, 1 or more")
    return int(text)
