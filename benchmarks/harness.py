"""Shared by the benchmarks of this folder: options, the record of a run, and reading it back."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from benchmarks.machine_limits import limits
from qurl_megatron.bench.command import count
from qurl_megatron.bench.record import SCHEMA, BenchRecord, Case, recorded
from qurl_megatron.kit.errors import ConfigError, reading


def parser_of(
    name: str, description: str, *, model: str = "Qwen2.5-0.5B-Instruct"
) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks.

    Args:
        name: of the module.
        description: its docstring.
        model: default of --model.
    """
    parser = argparse.ArgumentParser(f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--model", default=model, help=f"a shape or a folder; default {model}")
    parser.add_argument("--repeats", type=count, default=10, metavar="N", help="default 10")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"folder for {name}.json")
    return parser


def measure(
    name: str, options: argparse.Namespace, run: Callable[[argparse.Namespace], list[Case]]
) -> int:
    """Run a benchmark, show its table and keep its record; return the exit code."""
    device = getattr(options, "device", None) or "cpu"
    try:
        record = recorded(
            name,
            f"python -m benchmarks.{name}",
            lambda: run(options),
            lambda: {"limits": limits(device)},
        )
        record.keep(options.out)
    except ConfigError as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return 2
    return 0


def read(path: Path) -> BenchRecord:
    """Read a record back.

    Raises:
        ConfigError: the file is missing, or is not a record of this schema.
    """
    try:
        with reading(path):
            text = path.read_text(encoding="utf-8")
        record = TypeAdapter(BenchRecord).validate_json(text, strict=True)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give a benchmark's record") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} is no benchmark's record: {place} {first['msg']}") from None
    if record.schema != SCHEMA:
        raise ConfigError(f"{path} has schema {record.schema}, and not {SCHEMA}: measure it again")
    return record
