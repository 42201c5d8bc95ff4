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
        "reward/std": near(0.45, 0.05),
        "response/length": length,
        "response/truncated": near(0.06 - 0.04 * done, 0.2),
        "policy/clip_fraction": clip,
        "policy/ratio_mean": 1 + noise.gauss(0, 2e-4),
        "policy/entropy": near(0.9 - 0.55 * learned, 0.04),
        "policy/loss": noise.gauss(0, 0.01),
        "acr/active_fraction": active,
        "acr/rescued_fraction": 0.12 * near(active, 0.5),
        "rollout/kl_k1": k3 + noise.gauss(0, 0.0006),
        "rollout/kl_k3": k3,
        "rollout/rho_max": 1.5 + math.exp(1.2 * done + abs(noise.gauss(0, 1.3))),
        "rollout/rho_mean": 1 + noise.gauss(0, 1e-3),
        "rollout/ess": 1 - near(0.006 + 0.012 * done, 0.15),
        "rollout/truncated_weight_fraction": near(0.001 + 0.002 * done, 0.3),
        "reference/kl": 0.06 * learned * near(1, 0.1),
        "sampling/kept_fraction": near(0.5, 0.1),
        "sampling/all_right_fraction": near(0.1 + 0.2 * learned, 0.1),
        "sampling/all_wrong_fraction": near(0.4 - 0.2 * learned, 0.1),
        "critic/value_mean": near(0.1 + 0.5 * learned, 0.1),
        "critic/return_mean": near(0.12 + 0.6 * learned, 0.1),
        "critic/explained_variance": near(0.1 + 0.3 * learned, 0.1),
        "critic/loss": near(0.1, 0.1),
        "correction/rejected_fraction": near(0.01, 0.3),
        "correction/banded_fraction": near(0.004, 0.3),
        "train/padding_fraction": near(0.2, 0.1),
        "optimizer/grad_norm": near(0.6, 0.2) * (4 if noise.random() < 0.03 else 1),
        "optimizer/lr": 1e-6,
        "quant/code_flip_rate": near(0.04, 0.06),
        "quant/weight_update": near(3e-8, 0.2),
        "quant/weight_error": near(2.1e-5, 0.002),
        "quant/update_passed": near(1.0, 0.05),
        "quant/update_cosine": near(0.05, 0.1),
        "throughput/rollout_tokens_per_s": 256 * length / rollout / 10,
        "throughput/train_tokens_per_s": 256 * length / train / 10,
        **{f"time/{name}": seconds for name, seconds in phases.items()},
        "time/step": sum(phases.values()) + near(0.05, 0.2),
        "sync/version": step - 1,
        "sync/staleness": 0,
        "sync/quantize_s": near(0.05, 0.1),
        "sync/send_s": near(0.03, 0.1),
        "sync/load_s": near(0.04, 0.1),
        "sync/paused_s": near(0.09, 0.1),
        "fleet/serving": 1 if 3 <= step < 6 else 2,
        "fleet/restarts": 0 if step < 6 else 1,
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
