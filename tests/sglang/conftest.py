import pytest

from tests.sglang.engines import PYTHON

REASON = f"{PYTHON} is missing: `make sglang` installs SGLang"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sglang: starts real SGLang servers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/sglang/" in item.path.as_posix():
            item.add_marker(pytest.mark.sglang)
            if not PYTHON.is_file():
                item.add_marker(pytest.mark.skip(reason=REASON))
