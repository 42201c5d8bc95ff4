"""What one process makes of a tiny model, for comparison with many."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.ranks import BACKENDS


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request) -> str:
    """gloo; on a machine with GPUs nccl as well, so that every body runs on both."""
    return request.param


@pytest.fixture
def qwen2(tmp_path) -> Path:
    """A tiny checkpoint of this family."""
    from tests.support.models import tiny_checkpoint

    return tiny_checkpoint(tmp_path / "model", "qwen2")


@pytest.fixture(scope="session")
def alone(tmp_path_factory, backend) -> Callable[..., tuple[Path, dict]]:
    """(family, algo...) -> a checkpoint, and what ``train_twice`` finds without any split;
    computed once for each backend."""
    from tests.support.models import tiny_checkpoint
    from tests.support.policies import recipe, run

    @cache
    def find(family: str, **algo) -> tuple[Path, dict]:
        folder = tmp_path_factory.mktemp("alone")
        checkpoint = tiny_checkpoint(folder / "model", family)
        return checkpoint, run(folder, backend, recipe(checkpoint, {}, **algo), "alone")

    return find
