"""Runs on real GPUs with real SGLang servers, skipped where there is too little of either."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

NEEDED = 4  # GPUs: two for ranks, two for engines; a test marked gpus(n) needs n


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engines",
        choices=["sglang", "embedded"],
        default="sglang",
        help="embedded: a rehearsal of the runs in tests/gpu on a machine without SGLang",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            gpus = item.get_closest_marker("gpus")
            needed = gpus.args[0] if gpus else NEEDED
            if reason := _missing(config.getoption("--engines"), needed):
                item.add_marker(pytest.mark.skip(reason=reason))


def _missing(engines: str, needed: int) -> str:
    """Why a run cannot be made here; "" where it can."""
    if torch.cuda.device_count() < needed:
        return f"{torch.cuda.device_count()} GPUs are visible, and {needed} are needed"
    given = os.environ.get("SGLANG_PYTHON") or importlib.util.find_spec("sglang")
    if engines == "sglang" and not given:
        return "SGLang is not installed here; name the Python that has it in SGLANG_PYTHON"
    return ""


@pytest.fixture(scope="session")
def engine_options(pytestconfig: pytest.Config) -> list[str]:
    """What the recipes of this folder say about their engines."""
    kind = pytestconfig.getoption("--engines")
    python = os.environ.get("SGLANG_PYTHON", "")
    return [f"rollout.backend={kind}", *([f"rollout.sglang_python={python}"] if python else [])]
