"""Seconds from the call of ``qurl slurm submit`` to the end of the first step, by parts.

    python -m tests.slurm.first_step MODEL [section.key=value ...]

MODEL is a model of the quickstart's (`qurl train launch/recipes/quickstart.toml train.steps=0`).
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.slurm.cluster import cluster
from tests.slurm.conftest import User

WAIT_S = 240.0


def parts(run_dir: Path, called: float, returned: float) -> dict[str, float]:
    """From what a run leaves that has done a step, and when ``submit`` was called and returned."""
    attempt = run_dir / "slurm/attempts/1"
    events = [json.loads(line) for line in (run_dir / "timeline.jsonl").read_text().splitlines()]
    fleet = [event for event in events if event["lane"] == "fleet"]
    first = [one for one in events if one["lane"] == "trainer" and one["step"] == 1]
    ends = {
        "submit": returned,
        "the queue, and the supervisor": json.loads((attempt / "began.json").read_text())[
            "began_at"
        ],
        "examination of the nodes, srun and Python": (attempt / "stack-0.txt").stat().st_mtime,
        "Megatron, the model, the engines": _last(fleet, " started at "),
        "the first version": _last(fleet, " serves version 0"),
        "evaluation": min(event["start"] for event in first),
        "the first step": max(event["end"] for event in first),
    }
    starts = [called, *ends.values()]
    return {name: end - start for (name, end), start in zip(ends.items(), starts, strict=False)}


def _last(fleet: list[dict], word: str) -> float:
    return max(event["end"] for event in fleet if word in event["name"])


def main(model: str, *overrides: str) -> None:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "slurm").mkdir()
        with cluster(folder / "slurm") as slurm:
            user = User(slurm, folder, Path(model).absolute())
            user.describe(examine_s=180)
            called = time.time()
            (job,), run_dir = user.submit("first", "train.steps=2", *overrides)
            returned = time.time()
            slurm.wait(lambda: slurm.state(job) in ("COMPLETED", "FAILED"), WAIT_S)
            found = parts(run_dir, called, returned)
    for part, seconds in found.items():
        print(f"{seconds:6.1f} s  {part}")
    print(f"{sum(found.values()):6.1f} s  in all, at a load of {load:.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
