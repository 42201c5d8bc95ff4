"""Run folders as ``qurl slurm submit`` leaves them."""

import json
from pathlib import Path

from qurl_megatron.cluster import folder
from qurl_megatron.cluster.cluster import ClusterConfig
from qurl_megatron.config import load
from tests.support.slurm_scripts import ROOT

QUICK = ROOT / "launch/recipes/quickstart.toml"


def submitted(run_dir: Path, *overrides: str, cluster: ClusterConfig | None = None) -> Path:
    """Return a run folder with the quickstart of seven steps, and an empty script."""
    words = ["train.steps=7", *overrides, f"train.run_dir={json.dumps(str(run_dir))}"]
    folder.write(load(QUICK, words), cluster or ClusterConfig(), "")
    return run_dir
