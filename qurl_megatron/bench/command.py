"""``qurl bench WHAT``: run a benchmark, show its table and keep its record, DIR/WHAT.json."""

import argparse
from importlib import import_module

from qurl_megatron.bench.record import recorded


def bench(options: argparse.Namespace) -> int:
    """Measure, and return the exit code.

    Raises:
        ConfigError: the benchmark cannot be run here, or with these options.
    """
    run = import_module(f"qurl_megatron.bench.{options.benchmark}").run
    record = recorded(options.benchmark, "qurl", lambda: run(options))
    record.keep(options.out)
    return 0
