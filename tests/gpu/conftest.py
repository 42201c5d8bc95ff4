"""Runs on real GPUs with real SGLang servers, skipped where there is too little of either."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

NEEDED = 4  # GPUs: two for ranks, two for engines


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engines",
        choices=["sglang", "embedded"],
        default="sglang",
        help="embedded: a rehearsal of the runs in tests/gpu on a machine without SGLang",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = _missing(config.getoption("--engines"))
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _missing(engines: str) -> str:
    """Why the runs cannot be made here; "" where they can."""
    if torch.cuda.device_count() < NEEDED:
        return f"{torch.cuda.device_count()} GPUs are visible, and {NEEDED} are needed"
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
