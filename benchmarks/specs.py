"""Transformer Engine's layers and Adam beside Megatron's local layers and torch's, on one GPU.

Both learn from the same made-up responses, in processes of their own: the local one imports nothing
of Transformer Engine. Losses and gradients are set side by side, step by step; then each run goes
back to its checkpoint, takes the last step again, and should arrive at the same weights.

    python -m benchmarks.specs --out DIR
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness import measure as record_of
from benchmarks.harness import parser_of
from qurl_megatron.bench.command import count
from qurl_megatron.bench.record import Case, Figure, progress
from qurl_megatron.bench.rollout_engines import config_of, model_folder
from qurl_megatron.config.env import FUSED
from qurl_megatron.kit.errors import ConfigError

SPECS = ("transformer_engine", "local")
APART = 0.05
"""Relative difference of gradient norms that BF16 does not explain; an estimate."""


def parser() -> argparse.ArgumentParser:
    options = parser_of("specs", __doc__)
    add = options.add_argument
    add("--tokens", type=count, default=4096, metavar="N", help="of one pass; default 4096")
    add("--steps", type=count, default=4, metavar="N", help="default 4")
    add("--stand-in", action="store_true", help="the tests' stand-in for Transformer Engine")
    add("--worker", nargs=2, metavar=("SPEC", "FOLDER"), help=argparse.SUPPRESS)
    return options


def run(options: argparse.Namespace) -> list[Case]:
    """Return a case per spec.

    Raises:
        ConfigError: a process failed; it says why above.
    """
    measured = {}
    with tempfile.TemporaryDirectory(prefix="bench-specs-") as work:
        model_folder(options.model, Path(work), empty=False)  # of random weights
        for spec in SPECS:
            progress(f"training with {spec}")
            command = [sys.executable, "-m", "benchmarks.specs", *sys.argv[1:]]
            code = subprocess.run([*command, "--worker", spec, work]).returncode
            if code:
                raise ConfigError(f"bench specs: {spec} left with code {code}; it says why above")
            measured[spec] = json.loads(Path(work, f"{spec}.json").read_text(encoding="utf-8"))
    return [case_of(spec, measured[spec], measured["local"], options) for spec in SPECS]


def train(spec: str, folder: Path, options: argparse.Namespace) -> None:
    """Train on a single rank in this process, and write the measurements."""
    if spec == "local":
        for name in FUSED:
            sys.modules[name] = None  # type: ignore[assignment]  # imports of it fail
    elif options.stand_in:
        import_module("tests.support.transformer_engine").install()
    import torch

    from benchmarks.alone import alone, made_up, recipe
    from qurl_megatron.actor.policy import Policy
    from qurl_megatron.observe.metrics import Timer, values
    from qurl_megatron.training import checkpoint
    from qurl_megatron.training.state import TrainState
    from qurl_megatron.training.step import improve

    config = recipe(folder / "model", options.tokens)
    samples = made_up(config, config_of(options.model)["vocab_size"])
    run_dir, steps = folder / spec, []
    with alone(folder / f"meet-{spec}") as ranks:
        policy = Policy.build(config.model, config.parallel, config.optimizer, ranks)
        torch.cuda.reset_peak_memory_stats()
        at_rest = torch.cuda.memory_allocated()

        def learn(step: int) -> dict[str, Any]:
            start = time.perf_counter()
            metrics, _ = improve(policy, samples, config, step=step, timer=Timer())
            torch.cuda.synchronize()
            return values(metrics) | {"seconds": time.perf_counter() - start}

        for step in range(1, options.steps + 1):
            if step == options.steps:
                saved = checkpoint.save(run_dir, policy, TrainState(step=step - 1), keep=1)
            steps.append(learn(step))
        peak = torch.cuda.max_memory_allocated() - at_rest
        final = [parameter.detach().cpu() for parameter in policy.gpt.parameters()]
        checkpoint.load(saved, policy)
        learn(options.steps)
        pairs = list(zip(policy.gpt.parameters(), final, strict=True))
        off = max((now.detach().cpu() - then).abs().max().item() for now, then in pairs)
        layers = {type(module).__name__ for module in policy.gpt.modules()}
        optimizer = type(policy.optimizer.chained_optimizers[0].optimizer)
    measured = {
        "steps": steps,
        "off": off,
        "peak": peak,
        "layers": sorted(name for name in layers if "Linear" in name or "Attention" in name),
        "optimizer": f"{optimizer.__module__}.{optimizer.__name__}",
    }
    (folder / f"{spec}.json").write_text(json.dumps(measured), encoding="utf-8")


def case_of(
    spec: str, measured: dict[str, Any], local: dict[str, Any], options: argparse.Namespace
) -> Case:
    """Return seconds and memory, and how far gradient norms lie from those of the local spec."""
    differences = []
    for step, beside in zip(measured["steps"], local["steps"], strict=True):
        norm, local_norm = step["optimizer/grad_norm"], beside["optimizer/grad_norm"]
        differences.append(abs(norm - local_norm) / max(abs(local_norm), 1e-9))
    figures = {
        "a step": ("s", [step["seconds"] for step in measured["steps"][1:]]),
        "peak above rest": ("GiB", [measured["peak"] / (1 << 30)]),
        "gradient norm beside local": ("relative", differences),
        "weights after resuming": ("largest difference", [measured["off"]]),
    }
    keys = ("policy/entropy", "policy/loss", "optimizer/grad_norm")
    steps = [{key: step.get(key) for key in keys} for step in measured["steps"]]
    return Case(
        name=spec + (" (stand-in)" if options.stand_in and spec != "local" else ""),
        keys={"model": options.model, "tokens": options.tokens, "spec": spec},
        figures=[
            Figure(name=name, unit=unit, better="lower", repeats=repeats)
            for name, (unit, repeats) in figures.items()
        ],
        reasons=["far from local"] if max(differences) > APART else [],
        notes={
            "layers": measured["layers"],
            "optimizer": measured["optimizer"],
            "steps": steps,
            "resumes bit for bit": measured["off"] == 0,
        },
    )


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        spec, folder = options.worker
        train(spec, Path(folder), options)
        return 0
    return record_of("specs", options, run)


if __name__ == "__main__":
    sys.exit(main())
