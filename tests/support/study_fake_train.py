"""``qurl train`` and ``qurl eval`` as a study sees them, without a model: metrics, log, exit code.

The run directory is ROOT/out/runs/CELL. It adds its calls to ROOT/calls.jsonl; a second signal ends
it unsaved. ROOT/behaviour.json has its orders, by cell:

    "fail_at": step     fail before this step
    "hold_at": step     after this step wait for a signal
    "meet": number      wait until there have been so many calls, and a moment longer
    "checkpoint": true  leave one at the end, for ``eval``
    "right": share      of the answers that ``eval`` finds right; without, it fails
"""

import argparse
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from tests.support.waiting import wait_until

ACCURACY = {"bf16": 0.75, "acr": 0.5}
MAKING_S = 0.3
MOMENT_S = 0.5


def main() -> int:
    return evaluate() if sys.argv[1] == "eval" else train()


def evaluate() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--run", "--out"):
        parser.add_argument(name, type=Path)
    options, given = parser.parse_known_args(sys.argv[2:])
    root, cell = options.run.parents[2], options.run.name
    asked = [json.loads(line) for line in Path(given[0]).read_text().splitlines()]
    with (root / "calls.jsonl").open("a") as file:
        file.write(json.dumps({"cell": cell, "asked": asked, "given": given[1:]}) + "\n")
    orders = json.loads((root / "behaviour.json").read_text()).get(cell, {})
    if "right" not in orders:
        print("qurl: no engine could be started", file=sys.stderr)
        return 2
    score = {"held_out": {"greedy": {"accuracy": orders["right"]}}}
    (options.out / "results.json").write_text(json.dumps({"benchmarks": score}))
    return 0


def train() -> int:
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: stop.append(number))
    _, _, *overrides = sys.argv[1:]
    given = dict(override.split("=", 1) for override in overrides)
    run_dir = Path(given["train.run_dir"])
    root = run_dir.parents[2]
    model = Path(given.get("model.path", root / "model"))
    makes_model = not model.exists()
    if makes_model:
        time.sleep(MAKING_S)
        model.mkdir()  # an error where another made it meanwhile
    orders = root / "behaviour.json"
    orders = json.loads(orders.read_text()).get(run_dir.name, {}) if orders.exists() else {}
    metrics = run_dir / "metrics.jsonl"
    run_dir.mkdir(parents=True, exist_ok=True)
    first = 1 + len(metrics.read_text().splitlines()) if metrics.exists() else 1
    calls = root / "calls.jsonl"
    call = {"cell": run_dir.name, "first": first, "makes_model": makes_model}
    call["omp"] = os.environ.get("OMP_NUM_THREADS")
    with calls.open("a") as file:
        file.write(json.dumps(call) + "\n")
    if "meet" in orders:
        wait_until(lambda: len(calls.read_text().splitlines()) >= orders["meet"])
        time.sleep(MOMENT_S)
    steps = int(given["train.steps"])
    for step in range(first, steps + 1):
        if step == orders.get("fail_at"):
            print(f"step {step - 1} done\nqurl: the disk is full", file=sys.stderr)
            return 2
        measured = {
            "reward/mean": 0.1 * step,
            "rollout/kl_k3": 0.01 * step,
            "rollout/rho_max": 2.0 * step,
            "policy/clip_fraction": 0.25,
            "quant/code_flip_rate": 0.125,
            "quant/weight_update": 2e-6,
            "quant/weight_error": 1e-3,
            "time/step": 9.0 if step == 1 else float(step),
        }
        if step == steps:
            method, seed = re.split("[-,]", run_dir.name)[0], int(given["train.seed"])
            measured["eval/accuracy"] = ACCURACY[method] + 0.01 * seed
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step, "time": 1.0, "metrics": measured}) + "\n")
        if step == orders.get("hold_at"):
            wait_until(lambda: bool(stop))
        if stop:
            time.sleep(MOMENT_S)
            print("saved" if len(stop) == 1 else "killed")
            return 128 + stop[0]
    if orders.get("checkpoint"):
        newest = run_dir / f"checkpoints/step_{steps:06d}"
        newest.mkdir(parents=True, exist_ok=True)
        (newest / "state.json").write_text("{}")
        (newest / "hf").mkdir(exist_ok=True)
        (newest / "weights").write_text("large")
    return 0


if __name__ == "__main__":
    sys.exit(main())
