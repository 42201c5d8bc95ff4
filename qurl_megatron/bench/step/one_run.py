"""One run of a recipe, in a process of its own, and what its usual step took."""

import os
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.bench.energy import Meter
from qurl_megatron.errors import ConfigError
from qurl_megatron.observe.history import History
from qurl_megatron.observe.hours import accepted
from qurl_megatron.observe.sinks import METRICS_FILE, read_metrics
from qurl_megatron.observe.timeline import overlap, read_timeline

PHASES = ("rollout", "reward", "score", "train", "publish")
FIRST = 2  # steps that do not count: they wait for engines and caches


@dataclass(frozen=True, kw_only=True)
class Usual:
    """Medians over the steps that count."""

    seconds: dict[str, float]  # by phase, and "step"
    engines: float  # seconds of a step during which engines generate, waited for or not
    overlap: float  # share of them that lies behind other work
    length: float  # tokens of a response
    accepted: float  # responses that a step trains on, mean
    joules: float | None = None  # of a step, mean; None: the machine does not report them
    no_joules: str = ""  # why, where a counter failed during the run


def train(recipe: str, overrides: Sequence[str], *, threads: int) -> None:
    """
    Args:
        threads: of each rank; 0: its share of the cores.

    Raises:
        ConfigError: it failed; with what it said last.
    """
    command = [sys.executable, "-m", "qurl_megatron.cli", "train", recipe]
    command += ["train.eval_prompts=0", "checkpoint.every=0", *overrides]
    env = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    if done.returncode:
        lines = done.stdout.strip().splitlines()
        why = lines[-1] if lines else f"exit code {done.returncode}"
        raise ConfigError(f"bench step: {recipe} failed: {why}")


def read_run(run_dir: Path, meter: Meter | None = None) -> Usual:
    """
    Raises:
        ConfigError: it has no step that counts.
    """
    records = read_metrics(run_dir / METRICS_FILE)
    history = History(records)

    def counted(metric: str) -> list[float]:
        if metric not in history:
            return []
        steps, values = history.series(metric)
        return values[steps > FIRST].tolist()

    if not counted("time/step"):
        raise ConfigError(f"{run_dir}: no step after step {FIRST}; give more --steps")
    spans = [span for span in read_timeline(run_dir / "timeline.jsonl") if span.step > FIRST]
    generating = [s.end - s.start for s in spans if (s.lane, s.name) == ("engines", "rollout")]
    ends = {r.step: r.time for r in records if "time/step" in r.metrics and r.step >= FIRST}
    start, end = ends.get(FIRST), ends[max(ends)]
    joules = meter.between(start, end) if meter and start else None
    counts = [r for r in records if "time/step" in r.metrics and r.step > FIRST]
    recipe = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
    return Usual(
        seconds={
            name: statistics.median(found)
            for name in ("step", *PHASES)
            if (found := counted(f"time/{name}"))
        },
        engines=statistics.median(generating) if generating else 0.0,
        overlap=overlap(spans),
        length=statistics.median(counted("response/length")),
        accepted=accepted(counts, recipe) / len(counts),
        joules=None if joules is None else joules / (len(ends) - 1),
        no_joules=meter.failed if meter else "",
    )
