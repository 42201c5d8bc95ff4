from pathlib import Path

import pytest

from benchmarks.network import CannotMake, network
from qurl_megatron.config import load
from qurl_megatron.training.warmstart import warmstart
from tests.support.runs import RECIPE


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    try:
        with network(tmp_path_factory.mktemp("network"), "train1", "train2", "train3") as made:
            yield made
    except CannotMake as error:
        pytest.skip(f"no network namespaces can be made here ({error}); they need root on Linux")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("run")
    path = root / "recipe.toml"
    path.write_text(RECIPE.format(root=root))
    config = load(path, ["warmstart.steps=2", "warmstart.layers=6"])  # two and three stages
    warmstart(root / "model", config.data, config.warmstart, log=lambda line: None)
    return path
