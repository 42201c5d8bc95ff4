"""``qurl bench WHAT``: run a benchmark, show its table, keep its record, compare it with another.

DIR/WHAT.json    the record (``bench.record``)
DIR/index.html   one page of all records in DIR (``bench.page``)
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from qurl_megatron.bench import environment
from qurl_megatron.bench.against import compare
from qurl_megatron.bench.options import BENCHMARKS, add_shared
from qurl_megatron.bench.others import MOST, Others
from qurl_megatron.bench.record import BenchRecord, Case, read
from qurl_megatron.bench.repeats import progress
from qurl_megatron.errors import ConfigError
from qurl_megatron.planning.machine_limits import limits


def bench(options: argparse.Namespace) -> int:
    """The exit code: 0, or what ``--against`` says.

    Raises:
        ConfigError: it cannot be run here; of ``all``, not one benchmark can.
    """
    if options.benchmark == "all":
        _all(options.out)
        return 0
    # Before minutes of measuring, not after them.
    old = read(options.against) if options.against else None
    record = measure(options.benchmark, options)
    print(record.table(), end="")
    verdict = compare(old, record) if old else None
    if verdict:
        print(f"\nagainst {options.against}:\n{verdict.text()}", end="")
    if options.out:  # last: a folder that cannot be written must not cost the verdict
        print(keep(record, options.out))
    return verdict.exit_code if verdict else 0


def measure(
    name: str, options: argparse.Namespace, words: Sequence[str] | None = None
) -> BenchRecord:
    """Run one benchmark.

    Args:
        words: the command that the record gives, behind ``qurl``; default: that of this process.

    Raises:
        ConfigError: it cannot be run here, or with these options.
    """
    started = environment.started()
    around = environment.environment()
    with Others(url for url in getattr(options, "engine", ()) if "://" in url) as others:
        cases: list[Case] = import_module(f"qurl_megatron.bench.{name}").run(options)
        around |= {"load_after": environment.load(), "others": round(others.share(), 3)}
    if around["others"] > MOST:
        cases = [_beside_another_load(case, around["others"]) for case in cases]
    return BenchRecord(
        benchmark=name,
        command=shlex.join(["qurl", *(sys.argv[1:] if words is None else words)]),
        started=started,
        environment={
            **around,
            "limits": limits(getattr(options, "device", None) or "cpu"),
        },
        cases=cases,
    )


def _beside_another_load(case: Case, others: float) -> Case:
    if not case.figures:
        return case
    reasons = list(dict.fromkeys([*case.reasons, "another load"]))
    return replace(
        case,
        reasons=reasons,
        notes={**case.notes, "another load": f"others used {others:.0%} of the cores"},
    )


def keep(record: BenchRecord, folder: Path) -> Path:
    """Write the record and the page of its folder; returns the page."""
    from qurl_megatron.bench.page import write_page

    record.write(folder / f"{record.benchmark}.json")
    return write_page(folder)


def _all(folder: Path) -> None:
    ran = 0
    for name, row in BENCHMARKS.items():
        if row.short is None:
            progress(f"{name}: left out; it needs a run of yours, see qurl bench {name} --help")
            continue
        parser = argparse.ArgumentParser()
        add_shared(parser, row)
        row.add_options(parser)
        progress(f"{name} {shlex.join(row.short)}")
        try:
            record = measure(name, parser.parse_args(row.short), ["bench", name, *row.short])
        except ConfigError as error:  # the others can be run all the same
            progress(f"{name}: {error}")
            continue
        ran += 1
        print(f"{name}\n{record.table()}")
        print(keep(record, folder))
    if not ran:
        raise ConfigError(
            "not one benchmark could be run here; the lines above say what each needs"
        )
