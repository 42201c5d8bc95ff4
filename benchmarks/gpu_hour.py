"""Measure and test on one GPU for 25 minutes, the most worth knowing first.

    make gpu-hour SGLANG_PYTHON=/path/to/sglang/bin/python

Each part is a command with a time limit, and leaves OUT/PART.json: its state, why it failed, what
it measured, with which versions. A part that fails stops no other. Started again, parts that are
done are skipped, those that were never tried come first, and failed ones are tried again. Where the
time left is less than a part's limit, it waits for the next start.

Without a GPU this is a rehearsal: torch finds an emulated one (tests/emulated_cuda), shapes are
tiny, engines are embedded ones. It shows that the commands run, and measures nothing.
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu_hour_machine import emulated, memory_in_use, settle, versions
from benchmarks.gpu_hour_parts import PARTS, Part
from benchmarks.harness import read
from qurl_megatron.bench.record import SCHEMA, commit, gpus
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.undertaker import bury, spare

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
DONE = ("done", "rehearsed")

say = partial(print, flush=True)


@dataclass(frozen=True)
class Hour:
    """Runs parts, and keeps a record of each."""

    out: Path
    sglang: str  # the Python that has it; "": none
    env: dict[str, str]
    rehearsal: bool
    facts: dict[str, Any]  # that every record gets

    def go(self, parts: Sequence[Part], until: float) -> dict[str, dict[str, Any]]:
        """Run what is not done and fits; return the records of all parts that have one.

        Args:
            until: on ``time.monotonic``.
        """
        records = {part.name: self.record(part.name) for part in parts}
        used_before = memory_in_use()
        # Stable: by worth among those that were never tried, and among those that failed.
        for part in sorted(parts, key=lambda part: "state" in records[part.name]):
            record = records[part.name]
            if record.get("state") in DONE:
                say(f"{part.name}: {record['state']} before, at {record['commit']}")
            elif time.monotonic() + self.allowed(part) > until:
                say(f"{part.name}: may take {part.seconds} s; start again for it")
            else:
                records[part.name] = self.run(part)
                settle(used_before)
        return {name: record for name, record in records.items() if record}

    def allowed(self, part: Part) -> int:
        """Return the seconds a part may take; nothing is fast where several tests run at once."""
        return part.seconds * (5 if self.rehearsal else 1)

    def record(self, name: str) -> dict[str, Any]:
        path = self.out / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def run(self, part: Part) -> dict[str, Any]:
        """Run a part, and keep its record."""
        start, folder = time.monotonic(), self.out / part.name
        log_path = self.out / f"{part.name}.log"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        texts = part.rehearsal if self.rehearsal else part.commands
        commands = [self.command(text, folder) for text in texts]
        state, reason = "not rehearsed" if self.rehearsal else "not run", self.obstacle(part)
        with log_path.open("w") as log:
            if not reason:
                say(f"{part.name}: {' && '.join(map(shlex.join, commands))}")
                state, reason = self.outcome(commands, self.allowed(part), log)
        record = {
            "part": part.name,
            "state": state,
            "reason": reason,
            "seconds": round(time.monotonic() - start, 1),
            "allowed": part.seconds,
            "commands": [shlex.join(command) for command in commands],
            "last_line": lines(log_path)[-1],
            "cases": [case for path in sorted(folder.glob("*.json")) for case in cases_in(path)],
            **self.facts,
        }
        text = json.dumps(record, indent=1) + "\n"
        (self.out / f"{part.name}.json").write_text(text, encoding="utf-8")
        say(f"{part.name}: {state}: {reason or record['last_line']} ({record['seconds']} s)")
        return record

    def command(self, text: str, folder: Path) -> list[str]:
        option = f"--sglang-python {shlex.quote(self.sglang)}" if self.sglang else ""
        key = shlex.quote(f"rollout.sglang_python={self.sglang}")
        program, *words = shlex.split(text.format(out=folder, sglang=option, sglang_key=key))
        module = ["-m", "qurl_megatron.cli"] if program == "qurl" else []
        return [sys.executable, *module, *words]

    def obstacle(self, part: Part) -> str:
        """Return why a part cannot be run here, or ""."""
        if self.rehearsal:
            return part.unrehearsed
        missing = []
        for need in part.needs:
            if not (self.sglang if need == "sglang" else importlib.util.find_spec(need)):
                missing.append(need)
        return f"{' and '.join(missing)}: not installed" if missing else ""

    def outcome(self, commands: list[list[str]], seconds: int, log: TextIO) -> tuple[str, str]:
        """Run commands up to the first that fails; return the state, and the reason."""
        until = time.monotonic() + seconds
        for command in commands:
            ran = subprocess.Popen(
                command, cwd=ROOT, env=self.env, stdout=log, stderr=log, start_new_session=True
            )
            bury(ran.pid)  # where this process is killed, that group is
            try:
                code = ran.wait(max(until - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                return "out of time", f"over {seconds} s; it said: {why(log.name)}"
            finally:
                end(ran)
                spare(ran.pid)
            if code:
                return "failed", f"code {code}: {why(log.name)}"
        return ("rehearsed" if self.rehearsal else "done"), ""


def end(process: subprocess.Popen) -> None:
    """End a process and its group; engines end with it."""
    for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def lines(log: str | Path) -> list[str]:
    """Return the lines of a log that say something; at least one."""
    text = Path(log).read_text(encoding="utf-8", errors="replace")
    return [line.strip()[:500] for line in text.splitlines() if line.strip()] or ["nothing"]


def why(log: str | Path) -> str:
    """Return the line that explains a failure best: our own sentence, or the last."""
    ours = ("qurl:", "benchmarks.", "FAILED", "E  ")
    return next((line for line in reversed(lines(log)) if line.startswith(ours)), lines(log)[-1])


def cases_in(path: Path) -> list[dict[str, Any]]:
    """Return the cases of a benchmark's record, by their medians."""
    if json.loads(path.read_text(encoding="utf-8")).get("schema") != SCHEMA:
        return []
    return [
        {
            "name": case.name,
            "keys": dict(case.keys),
            "figures": {f"{figure.name}, {figure.unit}": figure.median for figure in case.figures},
            "reasons": [case.why(reason) for reason in case.reasons],
            "notes": case.notes,
        }
        for case in read(path).cases
    ]


def ratios(records: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line per shape and load: tokens/s, and each format beside BF16."""
    rates: dict[str, dict[str, float]] = {}
    for name, record in records.items():
        for case in record["cases"]:
            keys, rate = case["keys"], case["figures"].get("tokens/s, 1/s")
            if rate and not case["reasons"] and name.endswith(f"-{keys['scheme']}"):
                load = f"{keys['model']}, {keys['prompts'] * keys['samples']} responses"
                rates.setdefault(load, {})[keys["scheme"]] = rate
    sentences = []
    for load, by_scheme in rates.items():
        base = by_scheme.get("bf16")
        shown = [
            f"{scheme} {rate:,.0f}" + (f" ({rate / base:.2f})" if base else "")
            for scheme, rate in by_scheme.items()
        ]
        sentences.append(f"{load}: tokens/s {', '.join(shown)}")
    return sentences


def publish(hour: Hour, records: dict[str, dict[str, Any]]) -> None:
    """Copy what was measured on a GPU to docs/results, and make docs/performance.md of it."""
    for part, record in records.items():
        if record["state"] not in DONE:
            continue
        for path in sorted((hour.out / part).glob("*.json")):
            name = f"{path.stem}_gpu"
            if part != path.stem:
                name += f"_{part}"
            if cases_in(path):
                shutil.copyfile(path, RESULTS / f"{name}.json")
    text = json.dumps({"parts": list(records.values())}, indent=1) + "\n"
    (RESULTS / "gpu_hour.json").write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "benchmarks.performance"], cwd=ROOT, check=True)


def main() -> int:
    options = parser().parse_args()
    import torch  # late: --help should not wait for it

    rehearsal = not torch.cuda.is_available()
    try:
        env = emulated() if rehearsal else {}
    except ConfigError as error:
        print(f"gpu-hour: {error}", file=sys.stderr)
        return 2
    sglang = options.sglang_python
    if not sglang and importlib.util.find_spec("sglang"):
        sglang = sys.executable
    facts: dict[str, Any] = {
        "rehearsal": rehearsal,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(ROOT),
        "gpus": gpus(),
        "python": platform.python_version(),
        "versions": versions(sglang),
    }
    say("No GPU is here: a rehearsal on an emulated one." if rehearsal else f"On {facts['gpus']}.")
    for line in facts["versions"]["differ"]:
        say(f"not as pinned: {line}")
    out = options.out or ROOT / "runs" / ("gpu-hour-rehearsal" if rehearsal else "gpu-hour")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **env}
    if sglang:
        env["SGLANG_PYTHON"] = sglang  # for tests/gpu
    hour = Hour(out.absolute(), sglang, env, rehearsal, facts)
    parts = [part for part in PARTS if part.name in options.only]
    until = math.inf if rehearsal else time.monotonic() + 60 * options.minutes
    records = hour.go(parts, until)
    for line in ratios(records):
        say(line + " -- of a rehearsal" * rehearsal)
    if not rehearsal:
        publish(hour, records)
    return int(any(record["state"] in ("failed", "out of time") for record in records.values()))


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser("python -m benchmarks.gpu_hour", description=__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    add = options.add_argument
    names = [part.name for part in PARTS]
    add("--only", nargs="+", choices=names, default=names, help="these parts; default: all")
    add("--minutes", type=float, default=25, help="start no part that may end later; default 25")
    add("--out", type=Path, metavar="DIR", help="for records and logs; default runs/gpu-hour")
    python = os.environ.get("SGLANG_PYTHON", "")
    add("--sglang-python", default=python, metavar="PATH", help="default: $SGLANG_PYTHON")
    return options


if __name__ == "__main__":
    sys.exit(main())
