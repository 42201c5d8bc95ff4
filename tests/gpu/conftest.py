"""Runs on real GPUs with real SGLang servers, skipped where there is too little of either."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

NEEDED = 4  # GPUs: two for ranks, two for engines; a test marked gpus(n) needs n


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            gpus = item.get_closest_marker("gpus")
            if reason := _missing(gpus.args[0] if gpus else NEEDED):
                item.add_marker(pytest.mark.skip(reason=reason))


def _missing(needed: int) -> str:
    """Why a run cannot be made here; "" where it can."""
    if torch.cuda.device_count() < needed:
        return f"{torch.cuda.device_count()} GPUs are visible, and {needed} are needed"
    if not (os.environ.get("SGLANG_PYTHON") or importlib.util.find_spec("sglang")):
        return "SGLang is not installed here; name the Python that has it in SGLANG_PYTHON"
    return ""
