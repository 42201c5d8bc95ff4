"""The benchmarks of ``qurl bench`` and their options; argparse alone, since every help reads them.

A benchmark is a module of ``qurl_megatron.bench`` with ``run(options) -> list[Case]``. It is
imported when it is asked for, and raises ConfigError with the reason where it cannot be run.
"""

import argparse
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurl_megatron.errors import ConfigError
from qurl_megatron.schemes import SCHEMES


@dataclass(frozen=True)
class BenchRow:
    """What a benchmark measures, and its options."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    repeats: int = 10  # ten show a slowdown of a tenth through noise of a few percent
    model: str = ""  # default of --model; "" has no such option
    schemes: tuple[str, ...] = ()  # those it can take; all by default


def add_benchmarks(command: argparse.ArgumentParser) -> None:
    """Give ``qurl bench`` a subcommand for each row, and for each name of ``REMOVED``."""
    names = command.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, row in BENCHMARKS.items():
        parser = names.add_parser(name, help=row.help, description=f"Measure {row.help}.")
        add_shared(parser, row)
        row.add_options(parser)
    for name in REMOVED:  # no help lists them; their options, behind dashes, are words
        removed = names.add_parser(name, add_help=False, prefix_chars="+")
        removed.add_argument("words", nargs="*")


def add_shared(parser: argparse.ArgumentParser, row: BenchRow) -> None:
    if row.model:
        parser.add_argument(
            "--model",
            default=row.model,
            metavar="SHAPE_OR_PATH",
            help=f"a shape (tiny, h1024, 0.5B, ..., 32B), a folder of launch/models, or any folder "
            f"with a config.json; default {row.model}",
        )
    if row.schemes:
        parser.add_argument(
            "--schemes",
            type=_names_of(row.schemes),
            default=list(row.schemes),
            metavar="A,B",
            help=f"default {','.join(row.schemes)}",
        )
    parser.add_argument(
        "--repeats",
        type=_at_least_one,
        default=row.repeats,
        metavar="N",
        help=f"default {row.repeats}",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for BENCHMARK.json; default: only the table",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE.json",
        help="compare with an older record: exit code 0 equal or better, 1 slower, 3 no verdict",
    )


def chosen(names: list[str] | None, known: Collection[str], key: str) -> list[str]:
    """All that are known, or those that were named.

    Raises:
        ConfigError: a name is not known.
    """
    for name in names or ():
        if name not in known:
            raise ConfigError(f"{key} {name} is not known; known: {', '.join(known)}")
    return list(names or known)


def quant_scheme(name: str) -> str:
    """``quant.scheme`` of what --schemes calls bf16 or fp32, the format of what is not quantized,
    or by its own name."""
    return name if name in SCHEMES else "none"


def _names_of(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        given = [name for name in text.split(",") if name]
        if unknown := [name for name in given if name not in known]:
            wrong = ", ".join(unknown)
            raise argparse.ArgumentTypeError(f"{wrong} is not among {', '.join(known)}")
        return given

    return names


def _at_least_one(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError("must be a whole number, 1 or more")
    return int(text)


def _engines(text: str) -> list[str]:
    return text.split(",")


def _rollout(parser: argparse.ArgumentParser) -> None:
    for name, (kind, default, metavar, text) in ROLLOUT.items():
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)
    parser.add_argument(
        "--tensor",
        type=_at_least_one,
        nargs="+",
        default=[1],
        metavar="N",
        help="over how many ranks an SGLang engine is split; default 1",
    )
    parser.add_argument(
        "--protocol",
        choices=["sglang", "openai"],
        default="sglang",
        help="what the engine at a URL speaks; vLLM: openai",
    )


def _clients(text: str) -> int:
    """Return the requests under way at a time; 0: all."""
    match = re.fullmatch(r"closed|concurrency:([1-9]\d*)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"must be closed or concurrency:N, got {text!r}")
    return int(match[1] or 0)


def _publish_every(text: str) -> str:
    match = re.fullmatch(r"half|(\d+)tokens|(\d*\.?\d+)s", text)
    if not match or any(float(number) == 0 for number in match.groups() if number):
        raise argparse.ArgumentTypeError(
            f"must be half, seconds (10s) or tokens (5000tokens), got {text!r}"
        )
    return text


ROLLOUT: Mapping[str, tuple[Callable, Any, str, str]] = {
    "engine": (
        _engines,
        ["embedded"],
        "A,B",
        "embedded, sglang, or the URL of an engine that runs; default embedded",
    ),
    "threads": (int, 0, "N", "threads of each rank; default: all cores"),
    "sglang-python": (
        str,
        "",
        "PATH",
        "Python that has SGLang; default: as rollout.sglang_python finds it",
    ),
    "cache-gb": (float, 2.0, "GIB", "keys and values of an embedded engine; default 2"),
    "clients": (_clients, 0, "HOW", "closed (all at once; the default) or concurrency:N"),
    "prompts": (_at_least_one, 8, "N", "how many; default 8"),
    "samples": (_at_least_one, 4, "N", "responses to each prompt; default 4"),
    "prompt": (_at_least_one, 32, "N", "tokens of each prompt; default 32"),
    "mean": (float, 64, "N", "mean tokens of a response; default 64"),
    "sigma": (
        float,
        1.0,
        "X",
        "spread of the lengths: deviation of their logarithm; default 1",
    ),
    "max": (int, 256, "N", "tokens of the longest response; default 256"),
    "lengths": (
        Path,
        None,
        "RUN_DIR",
        "take the lengths of a run's last step instead; it needs train.save_rollouts=true",
    ),
    "publish-every": (
        _publish_every,
        None,
        "WHEN",
        "half (once, at half of the tokens), 10s or 5000tokens; default: never",
    ),
    "seed": (int, 0, "N", "of the order of lengths, and of prompts; default 0"),
    "timeout": (float, 3600.0, "SECONDS", "give a response up after these; default 3600"),
}
"""Option -> its type, default, placeholder and help."""


def _publish(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine-tp", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--bucket-mb", type=float, default=64.0, metavar="MIB")
    parser.add_argument("--candidates", nargs="+", metavar="TRANSPORT", help="these alone")
    parser.add_argument("--work", type=Path, metavar="DIR", help="a folder on a disk; takes 5 GB")


def _loss(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=8192, metavar="N")
    parser.add_argument("--vocab", type=int, metavar="N", help="default: that of --model")
    parser.add_argument("--tensor", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where it is")
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="threads of each rank; default: its share of the cores",
    )
    parser.add_argument("--only", nargs="+", metavar="WAY", help="measure these ways alone")


def _quantize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=["float32", "bfloat16"],
        default=["float32", "bfloat16"],
        help="of the weights; default: both",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where it is")


def _step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recipe",
        default="launch/recipes/quickstart.toml",
        metavar="FILE.toml",
        help="the recipe to run",
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument(
        "--steps", type=int, default=8, metavar="N", help="steps of one repeat; default 8"
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=[],
        metavar="LAYOUT",
        help="strong and weak scaling over these, beside the smallest of them: tp, pp, dp and "
        "engines, each with a number, e.g. tp1 tp2 dp2 tp2+engines2; default: none. With "
        "--against, the default --repeats finds a phase twice as slow among up to 40 cases; more "
        "cases need more repeats",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="of each training rank and engine on a CPU; default: the cores over the number of "
        "ranks, so more ranks get no more hardware; 1 for scaling",
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="where run folders lie meanwhile")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


BENCHMARKS = {
    "rollout": BenchRow(
        "engines under a load with long-tailed, grouped responses",
        _rollout,
        model="h1024",
        schemes=("bf16", "int8", "fp8", "fp32"),
    ),
    "step": BenchRow(
        "seconds of a whole RL step, with rollouts in turn and ahead, and its scaling",
        _step,
        # Of a case a step and five phases are compared: 18 figures by default, some 60 with
        # --layouts. Eight repeats cannot show that one of more than 64 is worse, nine of 243.
        repeats=9,
    ),
    "publish": BenchRow(
        "publishing a version to a real SGLang engine, by transport",
        _publish,
        model="0.5B",
        schemes=("int8", "fp8", "bf16"),
    ),
    "loss": BenchRow(
        "time and memory of log-probs, entropy and the ACR objective", _loss, model="0.5B"
    ),
    "quantize": BenchRow(
        "quantizing one layer's weights, beside a copy of the bytes",
        _quantize,
        model="0.5B",
        schemes=("int8", "fp8"),
    ),
}
"""By name, what decides purchases first; so stand the help and the page of results."""

REMOVED = {
    "all": "run the benchmarks that you want one by one",
    "decode": "qurl bench rollout --engine embedded measures the same engine with its server",
    "convert": "time the tools of checkpoints_tools themselves",
    "scale": "qurl bench step measures what the leading rank does as part of a step",
    "versions": "qurl rescore RUN_DIR STEP holds a fresh engine against what a step recorded",
}
"""Benchmarks that there are no more -> what to do instead."""
