"""Seconds and memory of the converters, beside a plain copy of their output and beside peers.

``python -m qurl_megatron.bench.convert --peers /tmp/peers --out docs/results/convert_cpu.json``

Every conversion is a process of its own, started as a user starts it, so start-up counts; what a
tiny model takes is given apart. Candidates take turns, and ratios are medians over the turns. The
input is in the page cache, and what earlier runs wrote is on the disk before the next one starts.

Peers are used where they are found: mbridge loads the model into Megatron's modules and saves them
with Megatron's own writer; llm-compressor quantizes Hugging Face files without a model. Neither
hashes nor syncs what it writes. The converters do both; --no-checksums leaves the hashing out.
``--peers`` names a folder for them alone, filled by ``pip install --target``.
"""

import argparse
import hashlib
import itertools
import json
import os
import platform
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

from qurl_megatron.bench.random_model import SIZES

# No torch up here: the peak memory of a child starts from what its parent has.

ROOT = Path(__file__).parents[2]
PEERS = ("mbridge", "llmcompressor", "compressed_tensors")
MIB = 1 << 20

COPY = "cp -r --reflink=never $1 $2"
SYNC = "find $2 -type f -exec sync {} +"
# Python's SHA-256, which the converters use too: that of coreutils takes twice as long here.
DIGEST = "import hashlib, sys; [hashlib.file_digest(open(x, 'rb'), 'sha256') for x in sys.argv[1:]]"
HASH = f'find $2 -type f -exec $0 -c "{DIGEST}" {{}} +'
COPIES = {
    "cp": COPY,
    "cp+sync": f"{COPY} && {SYNC}",
    "cp+sync+sha256": f"{COPY} && {SYNC} && {HASH}",
}


@dataclass(frozen=True)
class Task:
    """One conversion. HF and MEGATRON stand for folders; the one to write follows in the end."""

    ours: str  # a tool and its arguments
    peer: str | None = None  # a package
    peer_command: str = ""  # a module of bench.peers and its arguments


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

    def interpreter(self) -> dict:
        """What a process takes that imports torch and ends."""
        command = [sys.executable, "-c", "import torch"]
        return figures([self.child(command) for _ in range(self.runs)])

    def conversions(self, size: str, tasks: Iterable[str], *, copies: bool = False) -> dict:
        """Figures and ratios of some conversions of one model, by task.

        Args:
            copies: time plain copies of what was written, and runs without checksums, too.
        """
        self.child(self.command(f"-m qurl_megatron.bench.random_model {size}", "HF"))
        self.child(self.command("checkpoints_tools/hf_to_megatron.py --hf HF --out", "MEGATRON"))
        results = {}
        for name in tasks:
            candidates = self.candidates(TASKS[name], copies)
            runs: dict[str, list[dict]] = {who: [] for who in candidates}
            for _ in range(self.runs):
                for who, command in candidates.items():
                    runs[who].append(self.child(command, writes=Path(command[-1])))
            results[name] = {who: figures(these) for who, these in runs.items()}
            results[name]["seconds_over"] = seconds_over(runs)
            print(size, name, results[name]["seconds_over"], file=sys.stderr, flush=True)
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
            module = f"-m qurl_megatron.bench.peers.{task.peer_command}"
            found[task.peer] = self.command(module, "theirs")
        if copies:
            words = [sys.executable, str(self.work / "ours"), str(self.work / "copy")]
            found |= {name: ["sh", "-c", script, *words] for name, script in COPIES.items()}
        return found

    def command(self, words: str, out: str) -> list[str]:
        folders = {name: str(self.work / name) for name in ("HF", "MEGATRON")}
        return [sys.executable, *(folders.get(w, w) for w in words.split()), str(self.work / out)]

    def child(self, command: list[str], writes: Path | None = None) -> dict:
        """Seconds, memory and bytes of one process.

        Raises:
            RuntimeError: it failed; with what it said.
        """
        if writes:
            shutil.rmtree(writes, ignore_errors=True)
        os.sync()
        load = os.getloadavg()[0]
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
                raise RuntimeError(f"{command} failed: {said.read().decode()[-2000:]}")
        files = [path for path in writes.rglob("*") if path.is_file()] if writes else []
        return {
            "seconds": round(seconds, 3),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
            "peak_mib": round(usage.ru_maxrss * 1024 / MIB, 1),
            "bytes": sum(path.stat().st_size for path in files),
            "load_before": round(load, 2),
        }


def figures(runs: list[dict]) -> dict:
    """What a candidate's runs come to."""
    seconds = statistics.median(run["seconds"] for run in runs)
    return {
        "seconds_min": min(run["seconds"] for run in runs),
        "seconds_median": seconds,
        "cpu_seconds_median": statistics.median(run["cpu_seconds"] for run in runs),
        "peak_mib": max(run["peak_mib"] for run in runs),
        "bytes": runs[0]["bytes"],
        "mb_per_s_median": round(runs[0]["bytes"] / 1e6 / seconds, 1),
        "runs": runs,
    }


def seconds_over(runs: dict[str, list[dict]]) -> dict[str, float]:
    """How many times as long ours takes as each other candidate: median of runs next in time."""
    pairs = itertools.product(("ours", "ours --no-checksums"), runs)
    return {
        f"{ours} / {who}": round(
            statistics.median(
                a["seconds"] / b["seconds"] for a, b in zip(runs[ours], runs[who], strict=True)
            ),
            3,
        )
        for ours, who in pairs
        if ours in runs and not who.startswith("ours")
    }


def add_beyond(tasks: dict, startup: dict, torch: dict) -> dict:
    """Add what converters take beyond what a tiny model takes, and beyond ``import torch``."""
    for name, found in tasks.items():
        for who in found.keys() - COPIES.keys() - {"seconds_over"}:
            tiny = startup[name][who.removesuffix(" --no-checksums")]["seconds_median"]
            own = found[who]
            own["seconds_beyond_startup"] = round(own["seconds_median"] - tiny, 3)
            own["peak_mib_beyond_torch"] = round(own["peak_mib"] - torch["peak_mib"], 1)
    return tasks


def version(package: str, path: list[str]) -> str | None:
    """Of the package that would be imported; None where there is none."""
    found = PathFinder.find_spec(package, path)
    installed = metadata.distributions(name=package.replace("_", "-"), path=path)
    return next((each.version for each in installed), "unknown") if found else None


def machine(work: Path) -> dict:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")
    data, start = bytes(64 << 20), time.perf_counter()
    hashlib.sha256(data).digest()
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "disk_free_gb": round(shutil.disk_usage(work).free / 1e9),
        "sha256_mb_per_s_one_thread": round(len(data) / 1e6 / (time.perf_counter() - start)),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--work", type=Path, help="folder on the disk to measure; 15 GB are used")
    parser.add_argument("--peers", type=Path, help="folder with packages for the peers alone")
    parser.add_argument("--compared", choices=SIZES, default="0.5B", help="size for everything")
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=["0.1B", "0.5B", "1.5B"])
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.work, prefix="bench-convert-") as folder:
        bench = Bench(Path(folder), options.peers, options.runs)
        for name in (name for name, found in bench.peers.items() if not found):
            print(f"{name} is not installed: the benchmark goes on without it", file=sys.stderr)
        own = ("torch", "megatron-core", "safetensors", "transformers")
        report = {
            "machine": machine(bench.work),
            "versions": {name: metadata.version(name) for name in own} | bench.peers,
            "import_torch": bench.interpreter(),
        }
        torch = report["import_torch"]
        startup = report["startup"] = bench.conversions("tiny", TASKS)
        compared = bench.conversions(options.compared, TASKS, copies=True)
        report["compared"] = {"size": options.compared, **add_beyond(compared, startup, torch)}
        report["growth"] = {
            size: add_beyond(bench.conversions(size, GROWTH), startup, torch)
            for size in options.sizes
        }
    text = json.dumps(report, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
