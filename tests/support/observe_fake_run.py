"""A run that never happened, with the shapes real ones have: noise, drift, spikes, gaps."""

import json
import math
import random
from pathlib import Path

CONFIG = """\
[model]
path = "checkpoints/qwen2.5-0.5b"

[quant]
scheme = "int8"
uaq_scale = 1.5

[algo]
objective = "acr"
cap = 2.0

[train]
steps = {steps}
"""


def fake_metrics(step: int, steps: int, noise: random.Random) -> dict[str, float]:
    """What the training loop logs after update ``step``."""
    done = step / steps

    def near(value: float, spread: float) -> float:
        return value * math.exp(spread * noise.gauss(0, 1))

    rollout, train = near(1.3, 0.1), near(0.7, 0.05)
    length = near(28 + 14 * done, 0.05)
    k3 = near(0.002 + 0.004 * done**2, 0.12)
    clip = near(0.002 + 0.002 * done, 0.3)
    active = near(0.0012 + 0.002 * done, 0.3)
    learned = 1 - math.exp(-3 * done)
    phases = {
        "rollout": rollout,
        "reward": near(0.04, 0.2),
        "score": near(0.25, 0.08),
        "train": train,
        "publish": near(0.12, 0.15),
    }
    return {
        "reward/mean": min(1.0, max(0.0, 0.12 + 0.62 * learned + noise.gauss(0, 0.035))),
        "response/length": length,
        "policy/clip_fraction": clip,
        "policy/entropy": near(0.9 - 0.55 * learned, 0.04),
        "acr/active_fraction": active,
        "acr/rescued_fraction": 0.12 * near(active, 0.5),
        "acr/gradient_share": 0.2 * near(active, 0.5),
        "rollout/kl_k3": k3,
        "rollout/rho_max": 1.5 + math.exp(1.2 * done + abs(noise.gauss(0, 1.3))),
        "rollout/truncated_weight_fraction": near(0.001 + 0.002 * done, 0.3),
        "sampling/kept_fraction": near(0.5, 0.1),
        "train/padding_fraction": near(0.2, 0.1),
        "optimizer/grad_norm": near(0.6, 0.2) * (4 if noise.random() < 0.03 else 1),
        "quant/code_flip_rate": near(0.04, 0.06),
        "quant/weight_update": near(3e-8, 0.2),
        "quant/weight_error": near(2.1e-5, 0.002),
        "throughput/rollout_tokens_per_s": 256 * length / rollout / 10,
        "throughput/train_tokens_per_s": 256 * length / train / 10,
        **{f"time/{name}": seconds for name, seconds in phases.items()},
        "time/step": sum(phases.values()) + near(0.05, 0.2),
    }


def write_fake_run(
    run_dir: Path, steps: int = 60, *, planned: int | None = None, eval_every: int = 10
) -> Path:
    """metrics.jsonl and config.toml of a run of ``steps`` steps, out of ``planned``."""
    run_dir.mkdir(parents=True, exist_ok=True)
    noise = random.Random(0)
    planned = planned or steps
    started = 1_767_261_600.0
    lines = [{"step": 0, "time": started, "metrics": {"eval/accuracy": 0.11}}]
    for step in range(1, steps + 1):
        metrics = fake_metrics(step, planned, noise)
        if eval_every and step % eval_every == 0:
            metrics["eval/accuracy"] = min(1.0, metrics["reward/mean"] + 0.06)
        lines.append({"step": step, "time": started + 2.5 * step, "metrics": metrics})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text)
    (run_dir / "config.toml").write_text(CONFIG.format(steps=planned))
    return run_dir
