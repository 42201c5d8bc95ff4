"""The scripts that ship in slurm/: 14B and 32B on nodes of 8 x H100, one for each kind of job.

``python -m qurl_megatron.cluster.ready`` writes them again; a test compares with ``rendered``.
"""

import sys
from pathlib import Path

from qurl_megatron.cluster.cluster import load_cluster
from qurl_megatron.cluster.jobs import tool_job, training_job
from qurl_megatron.cluster.script import render
from qurl_megatron.config import load

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "slurm"

CLUSTER = "slurm/clusters/h100.toml"
READY = {
    "train_14b.sbatch": ("train", "launch/recipes/grpo_qwen2.5_14b.toml"),
    "train_32b.sbatch": ("train", "launch/recipes/grpo_qwen2.5_32b.toml"),
    "convert_14b.sbatch": (
        "convert",
        *("hf_to_megatron", "--hf", "models/Qwen2.5-14B", "--out", "models/Qwen2.5-14B-s1.5"),
        *("--uaq-scale", "1.5", "--tensor", "8"),
    ),
    "convert_32b.sbatch": (
        "convert",
        *("hf_to_megatron", "--hf", "models/Qwen2.5-32B", "--out", "models/Qwen2.5-32B-s1.5"),
        *("--uaq-scale", "1.5", "--tensor", "8"),
    ),
    "bench_14b.sbatch": (
        "bench",
        *("loss", "--device", "cuda", "--tokens", "20480", "--vocab", "152064"),
        *("--tensor", "2", "4", "8", "--out", "runs/bench/loss_14b"),
    ),
    "bench_32b.sbatch": (
        "bench",
        *("rollout", "--model", "32B", "--engine", "sglang", "--tensor", "8", "--schemes", "int8"),
        *("--prompts", "64", "--samples", "8", "--mean", "2000", "--max", "16384"),
        *("--publish-every", "half", "--out", "runs/bench/rollout_32b"),
    ),
}
"""Kind and words of each: a recipe, or a command."""


def rendered(name: str) -> str:
    """The text of one of ``READY``."""
    kind, *words = READY[name]
    cluster = load_cluster(ROOT / CLUSTER)
    if kind == "train":
        return render(training_job(load(ROOT / words[0]), cluster), cluster)
    return render(tool_job(kind, words, cluster), cluster)


def main() -> int:
    for name in READY:
        (FOLDER / name).write_text(rendered(name), encoding="utf-8")
        print(FOLDER.name + "/" + name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
