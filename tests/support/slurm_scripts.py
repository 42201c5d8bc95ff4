"""The scripts that ship in slurm/: 14B, 32B and 30B-A3B on nodes of 8 x H100, runs and commands.

``python -m tests.support.slurm_scripts`` writes them again; a test compares with ``rendered``.
"""

from pathlib import Path

from qurl_megatron.cluster.cluster import load_cluster
from qurl_megatron.cluster.submit import command_job, render, training_job
from qurl_megatron.config import load

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "slurm"
CONVERT = "convert --hf models/{0} --out models/{0}-s1.5 --uaq-scale 1.5 --tensor 8"
READY = {
    "train_14b.sbatch": "train launch/recipes/grpo_qwen2.5_14b.toml",
    "train_32b.sbatch": "train launch/recipes/grpo_qwen2.5_32b.toml",
    "train_30b_a3b.sbatch": "train launch/recipes/grpo_qwen3_30b_a3b.toml",
    "convert_14b.sbatch": CONVERT.format("Qwen2.5-14B"),
    "convert_32b.sbatch": CONVERT.format("Qwen2.5-32B"),
    "bench_32b.sbatch": "bench rollout --model Qwen2.5-32B --engine sglang --tensor 8 "
    "--schemes int8 --prompts 64 --samples 8 --mean 2000 --max 16384 --publish 1 "
    "--out runs/bench/rollout_32b",
}
"""Words of each: ``train`` and a recipe, or a command."""


def rendered(name: str) -> str:
    """Return the text of one of ``READY``."""
    words = READY[name].split()
    cluster = load_cluster(FOLDER / "clusters/h100.toml")
    if words[0] == "train":
        return render(training_job(load(ROOT / words[1]), cluster), cluster)
    node_gpus = 0 if words[0] == "convert" else None
    return render(command_job(words, cluster, node_gpus), cluster)


if __name__ == "__main__":
    for script in READY:
        (FOLDER / script).write_text(rendered(script), encoding="utf-8")
        print(f"slurm/{script}")
