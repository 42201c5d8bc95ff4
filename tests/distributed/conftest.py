"""What one process makes of a tiny model, for comparison with many."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def alone(tmp_path_factory) -> Callable[..., tuple[Path, dict]]:
    """(family, backend, algo...) -> a checkpoint, and what ``train_twice`` finds without any split;
    computed once."""
    from qurl_megatron.testing.models import tiny_checkpoint
    from tests.distributed.test_policy import recipe, run

    @cache
    def find(family: str, backend: str = "gloo", **algo) -> tuple[Path, dict]:
        folder = tmp_path_factory.mktemp("alone")
        checkpoint = tiny_checkpoint(folder / "model", family)
        return checkpoint, run(folder, backend, recipe(checkpoint, {}, **algo), "alone")

    return find
