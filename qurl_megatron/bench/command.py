"""``qurl bench WHAT``: run a benchmark, show its table, keep its record, compare it with another.

DIR/WHAT.json is the record (``bench.record``).
"""

import argparse
import shlex
import sys
from importlib import import_module

from qurl_megatron.bench import environment
from qurl_megatron.bench.against import compare
from qurl_megatron.bench.machine_limits import limits
from qurl_megatron.bench.options import REMOVED
from qurl_megatron.bench.record import BenchRecord, Case, read
from qurl_megatron.kit.errors import ConfigError


def bench(options: argparse.Namespace) -> int:
    """Return the exit code: 0, or the verdict of ``--against``.

    Raises:
        ConfigError: there is no such benchmark any more, or it cannot be run here.
    """
    name = options.benchmark
    if name in REMOVED:
        raise ConfigError(f"there is no qurl bench {name} any more; {REMOVED[name]}")
    # Before minutes of measuring, not after them.
    old = read(options.against) if options.against else None
    record = measure(name, options)
    print(record.table(), end="")
    verdict = compare(old, record) if old else None
    if verdict:
        print(f"\nagainst {options.against}:\n{verdict.text()}", end="")
    if options.out:  # last: a folder that cannot be written must not cost the verdict
        path = options.out / f"{name}.json"
        record.write(path)
        print(path)
    return verdict.exit_code if verdict else 0


def measure(name: str, options: argparse.Namespace) -> BenchRecord:
    """Run one benchmark.

    Raises:
        ConfigError: it cannot be run here, or with these options.
    """
    started = environment.started()
    before = environment.environment()
    cases: list[Case] = import_module(f"qurl_megatron.bench.{name}").run(options)
    return BenchRecord(
        benchmark=name,
        command=shlex.join(["qurl", *sys.argv[1:]]),
        started=started,
        environment={
            **before,
            "load_after": environment.load(),
            "limits": limits(getattr(options, "device", None) or "cpu"),
        },
        cases=cases,
    )
