"""Seconds and memory of the converters, beside a plain copy of their output and beside peers.

Every conversion is a process of its own, started as a user starts it, so start-up counts; what a
tiny model takes is noted. Candidates take turns. The input is in the page cache, and what earlier
runs wrote is on the disk before the next one starts. The limit of a converter's seconds is a copy
of what it wrote, with a sync and SHA-256 sums, since it does both; with --no-checksums, a sync.

Peers are used where they are found: mbridge loads the model into Megatron's modules and saves them
with Megatron's own writer; llm-compressor quantizes Hugging Face files without a model. Neither
hashes nor syncs what it writes. The converters do both; --no-checksums leaves the hashing out.
``--peers`` names a folder for them alone, filled by ``pip install --target``.
"""

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from qurl_megatron.bench.peer import ROOT, checkout
from qurl_megatron.bench.random_model import config_of
from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.repeats import Repeats, interleaved, progress
from qurl_megatron.errors import ConfigError

# No torch up here: the peak memory of a child starts from what its parent has.

PEERS = ("mbridge", "llmcompressor", "compressed_tensors")
MIB = 1 << 20

COPY = "cp -r --reflink=never $1 $2"
SYNC = "find $2 -type f -exec sync {} +"
# Python's SHA-256, which the converters use too: that of coreutils takes twice as long here.
DIGEST = "import hashlib, sys; [hashlib.file_digest(open(x, 'rb'), 'sha256') for x in sys.argv[1:]]"
HASH = f'find $2 -type f -exec $0 -c "{DIGEST}" {{}} +'
SYNCED, HASHED = "cp+sync", "cp+sync+sha256"
COPIES = {
    "cp": COPY,
    SYNCED: f"{COPY} && {SYNC}",
    HASHED: f"{COPY} && {SYNC} && {HASH}",
}


@dataclass(frozen=True)
class ConversionRun:
    """What one process took."""

    seconds: float
    cpu_seconds: float
    peak_mib: float
    bytes: int  # written


@dataclass(frozen=True)
class Task:
    """One conversion. HF and MEGATRON stand for folders; the one to write follows in the end."""

    ours: str  # a tool and its arguments
    peer: str | None = None  # a package
    peer_command: str = ""  # a module of benchmarks.peers and its arguments


TASKS = {
    "hf_to_megatron": Task(
        "hf_to_megatron.py --hf HF --out", "mbridge", "through_mbridge to-megatron HF"
    ),
    "hf_to_megatron_s1.5_fp32": Task("hf_to_megatron.py --hf HF --uaq-scale 1.5 --out"),
    "megatron_to_hf": Task(
        "megatron_to_hf.py --ckpt MEGATRON --out",
        "mbridge",
        "through_mbridge to-hf MEGATRON HF",
    ),
    "megatron_to_int8": Task("quantize.py --model MEGATRON --scheme int8 --out"),
    "hf_to_int8": Task(
        "quantize.py --model HF --scheme int8 --out", "llmcompressor", "through_llmcompressor HF"
    ),
}
GROWTH = ("hf_to_megatron", "hf_to_int8")


class Bench:
    """Runs conversions in a folder of its own."""

    def __init__(self, work: Path, peers: Path | None, runs: int) -> None:
        self.work, self.runs = work, runs
        own = [str(peers)] if peers else []
        self.peers = {name: version(name, [*own, *sys.path]) for name in PEERS}
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *own])}

    def conversions(
        self, model: str, tasks: Iterable[str], *, copies: bool = False
    ) -> dict[str, dict[str, Repeats[ConversionRun]]]:
        """Some conversions of one model, by task and by who does it.

        Args:
            copies: time plain copies of what was written, and runs without checksums, too.
        """
        self.child(self.command(f"-m qurl_megatron.bench.random_model {model}", "HF"))
        self.child(self.command("checkpoints_tools/hf_to_megatron.py --hf HF --out", "MEGATRON"))
        results = {}
        for name in tasks:
            candidates = self.candidates(TASKS[name], copies)
            # What is copied is what ours wrote: so ours goes first, and that round does not count.
            calls = {
                who: lambda command=command: self.child(command, writes=Path(command[-1]))
                for who, command in candidates.items()
            }
            calls["ours"]()
            results[name] = interleaved(calls, repeats=self.runs, warm_up=0)
            progress(f"{model} {name}: {statistics.median(results[name]['ours'].seconds):.2f} s")
            for out in {command[-1] for command in candidates.values()}:
                shutil.rmtree(out)
        for folder in self.work.iterdir():
            shutil.rmtree(folder)
        return results

    def candidates(self, task: Task, copies: bool) -> dict[str, list[str]]:
        """Who does the task, and by what command; the folder it writes is its last word."""
        tool, _, rest = f"checkpoints_tools/{task.ours}".partition(" ")
        found = {"ours": self.command(f"{tool} {rest}", "ours")}
        if copies:
            found["ours --no-checksums"] = self.command(f"{tool} --no-checksums {rest}", "fast")
        if task.peer and self.peers[task.peer]:
            module = f"-m benchmarks.peers.{task.peer_command}"
            found[task.peer] = self.command(module, "theirs")
        if copies:
            words = [sys.executable, str(self.work / "ours"), str(self.work / "copy")]
            found |= {name: ["sh", "-c", script, *words] for name, script in COPIES.items()}
        return found

    def command(self, words: str, out: str) -> list[str]:
        folders = {name: str(self.work / name) for name in ("HF", "MEGATRON")}
        return [sys.executable, *(folders.get(w, w) for w in words.split()), str(self.work / out)]

    def child(self, command: list[str], writes: Path | None = None) -> ConversionRun:
        """One process.

        Raises:
            ConfigError: it failed; with what it said last.
        """
        if writes:
            shutil.rmtree(writes, ignore_errors=True)
        os.sync()
        with tempfile.TemporaryFile() as said:
            start = time.perf_counter()
            process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=said, stderr=subprocess.STDOUT
            )
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - start
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines()
                why = lines[-1] if lines else f"code {process.returncode}"
                raise ConfigError(f"bench convert: {shlex.join(command)} failed: {why}")
        files = [path for path in writes.rglob("*") if path.is_file()] if writes else []
        return ConversionRun(
            seconds=seconds,
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            peak_mib=usage.ru_maxrss * 1024 / MIB,
            bytes=sum(path.stat().st_size for path in files),
        )


def cases_of(
    model: str,
    task: str,
    measured: dict[str, Repeats[ConversionRun]],
    startup: dict[str, Repeats[ConversionRun]],
) -> list[Case]:
    """A case for each of who did the task.

    Args:
        startup: the same of a tiny model.
    """
    found = []
    for who, repeats in measured.items():
        runs = repeats.results
        limit, limit_of = _limit(who, measured)
        seconds = statistics.median(run.seconds for run in runs)
        notes: dict[str, Any] = {
            "bytes": runs[0].bytes,
            "mb_per_s": round(runs[0].bytes / 1e6 / seconds, 1),
        }
        if tiny := startup.get(who.removesuffix(" --no-checksums")):
            start_up = statistics.median(run.seconds for run in tiny.results)
            notes["start_up_s"] = round(start_up, 3)
        found.append(
            Case(
                name=f"{model}: {task}, {who}",
                keys={"model": model, "task": task, "who": who},
                figures=[
                    Figure(
                        name="seconds",
                        unit="s",
                        better="lower",
                        repeats=[run.seconds for run in runs],
                        limit=limit,
                        limit_of=limit_of,
                    ),
                    Figure(
                        name="work",
                        unit="CPU s",
                        better="lower",
                        repeats=[run.cpu_seconds for run in runs],
                    ),
                    Figure(
                        name="peak memory",
                        unit="MiB",
                        better="lower",
                        repeats=[run.peak_mib for run in runs],
                    ),
                ],
                yardsticks=repeats.yardsticks,
                reasons=repeats.reasons,
                notes=notes,
            )
        )
    return found


LIMITS = {
    "ours": (HASHED, "a copy, sync and SHA-256"),
    "ours --no-checksums": (SYNCED, "a copy and sync"),
}
"""The copy that does as much, and what it does."""


def _limit(who: str, measured: dict[str, Repeats[ConversionRun]]) -> tuple[float | None, str]:
    copy, does = LIMITS.get(who, ("", ""))
    if copy not in measured:
        return None, ""
    return statistics.median(run.seconds for run in measured[copy].results), does


def version(package: str, path: list[str]) -> str | None:
    """Of the package that would be imported; None where there is none."""
    found = PathFinder.find_spec(package, path)
    installed = metadata.distributions(name=package.replace("_", "-"), path=path)
    return next((each.version for each in installed), "unknown") if found else None


def run(options: argparse.Namespace) -> list[Case]:
    """Everything of ``--model``, then the growth of memory over ``--sizes``."""
    checkout("checkpoints_tools")
    for model in (options.model, *options.sizes):
        config_of(model)
    cases = []
    with tempfile.TemporaryDirectory(dir=options.work, prefix="bench-convert-") as folder:
        bench = Bench(Path(folder), options.peers, options.repeats)
        for name in (name for name, found in bench.peers.items() if not found):
            progress(f"{name} is not installed: the benchmark continues without it")
        startup = bench.conversions("tiny", TASKS)
        wholes = {options.model: (TASKS, True)} | {
            model: (GROWTH, False) for model in options.sizes if model != options.model
        }
        for model, (tasks, copies) in wholes.items():
            for task, measured in bench.conversions(model, tasks, copies=copies).items():
                cases += cases_of(model, task, measured, startup[task])
        for case in cases:
            if peer := bench.peers.get(str(case.keys["who"])):
                case.notes["version"] = peer
    return cases
