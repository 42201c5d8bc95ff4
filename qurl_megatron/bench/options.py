"""The benchmarks of ``qurl bench`` and their options; argparse alone, since every help reads them.

A benchmark is a module of ``qurl_megatron.bench`` with ``run(options) -> list[Case]``. It is
imported when it is asked for, and raises ConfigError with the reason where it cannot be run.
"""

import argparse
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.schemes import SCHEMES

Option = tuple[str, dict[str, Any]]
"""A name and the arguments of ``add_argument``."""


@dataclass(frozen=True)
class BenchRow:
    """A benchmark and its options."""

    help: str
    options: Sequence[Option]
    repeats: int = 10  # ten show a slowdown of a tenth through noise of a few percent
    model: str = ""  # default of --model; "" has no such option
    schemes: tuple[str, ...] = ()  # those it can take; all by default


def add_benchmarks(command: argparse.ArgumentParser) -> None:
    """Give ``qurl bench`` a subcommand for each row, and for each name of ``REMOVED``."""
    names = command.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, row in BENCHMARKS.items():
        add_options(names.add_parser(name, help=row.help, description=f"Measure {row.help}."), row)
    for name in REMOVED:  # no help lists them; their options, behind dashes, are words
        removed = names.add_parser(name, add_help=False, prefix_chars="+")
        removed.add_argument("words", nargs="*")


def add_options(parser: argparse.ArgumentParser, row: BenchRow) -> None:
    """Add the options of all benchmarks, and then the row's own."""
    options: list[Option] = []
    if row.model:
        text = (
            "a shape (tiny, h1024, 0.5B, ..., 32B), a folder of launch/models, or any folder with "
            "a config.json"
        )
        options.append(_option("--model", str, row.model, "SHAPE_OR_PATH", text))
    if row.schemes:
        text = f"default {','.join(row.schemes)}"
        kind = _names_of(row.schemes)
        options.append(_option("--schemes", kind, list(row.schemes), "A,B", text, shown=""))
    options += [
        _option("--repeats", _count, row.repeats, "N", "how often each case is measured"),
        _option("--out", Path, None, "DIR", "folder for BENCHMARK.json; default: only the table"),
        _option(
            "--against",
            Path,
            None,
            "FILE.json",
            "compare with an older record: exit code 0 equal or better, 1 slower, 3 no verdict",
        ),
    ]
    for name, settings in [*options, *row.options]:
        parser.add_argument(name, **settings)


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
    """Return ``quant.scheme`` for a name of --schemes, where bf16 and fp32 mean "none"."""
    return name if name in SCHEMES else "none"


def _option(
    name: str, kind: Callable, default: Any, metavar: str, text: str, *, shown: str | None = None
) -> Option:
    """
    Args:
        shown: the default as help prints it; None: its value; "": not at all.
    """
    if shown is None:
        shown = "" if default is None else f"{default:g}" if kind is float else f"{default}"
    text += f"; default {shown}" if shown else ""
    return name, {"type": kind, "default": default, "metavar": metavar, "help": text}


def _several(option: Option) -> Option:
    """The option with one value or more."""
    name, settings = option
    return name, {**settings, "nargs": "+"}


def _names_of(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        if unknown := [name for name in chosen if name not in known]:
            wrong = ", ".join(unknown)
            raise argparse.ArgumentTypeError(f"{wrong} is not among {', '.join(known)}")
        return chosen

    return names


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError("must be a whole number, 1 or more")
    return int(text)


def _engines(text: str) -> list[str]:
    return text.split(",")


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


DEVICE: Option = ("--device", {"choices": ["cpu", "cuda"], "help": "default: cuda where it is"})
DTYPES = ["float32", "bfloat16"]

ROLLOUT = [
    _option(
        "--engine",
        _engines,
        ["embedded"],
        "A,B",
        "embedded, sglang, or the URL of an engine that runs",
        shown="embedded",
    ),
    _several(
        _option("--tensor", _count, [1], "N", "ranks of an SGLang engine; default 1", shown="")
    ),
    (
        "--protocol",
        {
            "choices": ["sglang", "openai"],
            "default": "sglang",
            "help": "what the engine at a URL speaks; vLLM: openai",
        },
    ),
    _option("--threads", int, 0, "N", "threads of each rank", shown="all cores"),
    _option("--cache-gb", float, 2.0, "GIB", "keys and values of an embedded engine"),
    _option(
        "--sglang-python",
        str,
        "",
        "PATH",
        "Python that has SGLang",
        shown=".venv-sglang's",
    ),
    _option("--clients", _clients, 0, "HOW", "closed (all at once) or concurrency:N", shown="all"),
    _option("--prompts", _count, 8, "N", "how many"),
    _option("--samples", _count, 4, "N", "responses to each prompt"),
    _option("--prompt", _count, 32, "N", "tokens of each prompt"),
    _option("--mean", float, 64, "N", "mean tokens of a response"),
    _option("--sigma", float, 1.0, "X", "spread of the lengths: deviation of their logarithm"),
    _option("--max", int, 256, "N", "tokens of the longest response"),
    _option(
        "--lengths",
        Path,
        None,
        "RUN_DIR",
        "take the lengths of a run's last step instead; it needs train.save_rollouts=true",
    ),
    _option(
        "--publish-every",
        _publish_every,
        None,
        "WHEN",
        "half (once, at half of the tokens), 10s or 5000tokens; default: never",
    ),
    _option("--seed", int, 0, "N", "of the order of lengths, and of prompts"),
    _option("--timeout", float, 3600.0, "SECONDS", "give a response up after these"),
]

STEP = [
    _option("--recipe", str, "launch/recipes/quickstart.toml", "FILE.toml", "the recipe to run"),
    _several(_option("--staleness", int, [0, 1, 2], "N", "rollout.max_staleness", shown="0 1 2")),
    _option("--steps", int, 8, "N", "steps of one repeat"),
    _several(
        _option(
            "--layouts",
            str,
            [],
            "LAYOUT",
            "strong scaling over these, beside the smallest of them: tp, pp, dp and engines, each "
            "with a number, e.g. tp1 tp2 dp2 tp2+engines2",
            shown="none",
        )
    ),
    _option(
        "--threads",
        int,
        0,
        "N",
        "of each training rank and engine on a CPU; default: the cores over the number of ranks, "
        "so more ranks get no more hardware; 1 for scaling",
        shown="",
    ),
    _option("--work", Path, None, "DIR", "where run folders lie meanwhile"),
    ("overrides", {"nargs": "*", "metavar": "section.key=value"}),
]

PUBLISH = [
    _several(_option("--engine-tp", _count, [1, 2], "N", "ranks of the engine", shown="1 2")),
    _option("--bucket-mb", float, 64.0, "MIB", "sync.bucket_mb"),
    _several(_option("--candidates", str, None, "TRANSPORT", "these alone")),
    _option("--work", Path, None, "DIR", "a folder on a disk; takes 5 GB"),
]

LOSS = [
    _option("--tokens", _count, 8192, "N", "of the batch"),
    _option("--vocab", _count, None, "N", "default: that of --model"),
    _several(_option("--tensor", _count, [1, 2, 4], "N", "ranks that share it", shown="1 2 4")),
    ("--dtype", {"choices": DTYPES, "default": "bfloat16", "help": "of the logits"}),
    DEVICE,
    _option("--threads", int, 0, "N", "threads of each rank", shown="its share of the cores"),
    _several(_option("--only", str, None, "WAY", "measure these ways alone")),
]

QUANTIZE = [
    (
        "--dtype",
        {"choices": DTYPES, "nargs": "+", "default": DTYPES, "help": "weights'; default: both"},
    ),
    DEVICE,
]

BENCHMARKS = {
    "rollout": BenchRow(
        "engines under a load with long-tailed, grouped responses",
        ROLLOUT,
        model="h1024",
        schemes=("bf16", "int8", "fp8", "fp32"),
    ),
    "step": BenchRow(
        "seconds of a whole RL step, with rollouts in turn and ahead, and its scaling",
        STEP,
        # Of a case a step and five phases are compared: 18 figures by default, some 60 with
        # --layouts. Eight repeats cannot show that one of more than 64 is worse, nine of 243.
        repeats=9,
    ),
    "publish": BenchRow(
        "publishing a version to a real SGLang engine, by transport",
        PUBLISH,
        model="0.5B",
        schemes=("int8", "fp8", "bf16"),
    ),
    "loss": BenchRow(
        "time and memory of log-probs, entropy and the ACR objective", LOSS, model="0.5B"
    ),
    "quantize": BenchRow(
        "quantizing one layer's weights, beside a copy of the bytes",
        QUANTIZE,
        model="0.5B",
        schemes=("int8", "fp8"),
    ),
}
"""By name, in the order of the help and of the page of results."""

REMOVED = {
    "all": "run the benchmarks that you want one by one",
    "decode": "qurl bench rollout --engine embedded measures the same engine with its server",
    "convert": "time qurl convert, export and quantize themselves",
    "scale": "qurl bench step measures what the leading rank does as part of a step",
    "versions": "qurl rescore RUN_DIR STEP holds a fresh engine against what a step recorded",
}
"""Benchmarks that are gone, and their replacements."""
