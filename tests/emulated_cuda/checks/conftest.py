"""Checks that begin with ``EMULATED = {...}`` run on the emulated device, one process per file.

The variables of ``EMULATED`` and EMULATED_CUDA_DEVICES must be there before torch is imported, so
a file's chosen tests run in a second pytest, and each test here repeats what happened to it there.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOM = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOM))

from emulated_cuda.build import CannotBuild, build  # noqa: E402


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not _runs_elsewhere(pyfuncitem.module):
        return None
    results = _results(pyfuncitem, pyfuncitem.module.EMULATED)
    outcome = results.get(pyfuncitem.name, ("failure", results.get("", "the test did not run")))
    if outcome[0] == "skipped":
        pytest.skip(outcome[1])
    if outcome[0]:
        pytest.fail(outcome[1], pytrace=False)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    if request.scope not in ("function", "class", "module"):
        return None
    if not _runs_elsewhere(request.module):
        return None
    fixturedef.cached_result = (False, fixturedef.cache_key(request), None)
    return False  # made there, not here


def _runs_elsewhere(module) -> bool:
    return hasattr(module, "EMULATED") and not os.environ.get("EMULATED_CUDA_DEVICES")


def _results(item, variables: dict[str, str]) -> dict:
    """By test name: what went wrong and how it was told; run once for all tests of the file."""
    known = item.session.__dict__.setdefault("emulated_results", {})
    if item.path in known:
        return known[item.path]
    try:
        build()
    except CannotBuild as error:
        pytest.skip(str(error))
    report = Path(item.config.rootpath / ".pytest_cache" / f"emulated-{os.getpid()}.xml")
    report.parent.mkdir(exist_ok=True)
    chosen = [other.nodeid for other in item.session.items if other.path == item.path]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(
        [*command, f"--junitxml={report}", *chosen],
        cwd=item.config.rootpath,
        env=emulated_environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = {"": done.stdout[-4000:] + done.stderr[-4000:]}
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            bad = [part for part in case if part.tag in ("failure", "error", "skipped")]
            told = ("", "") if not bad else (bad[0].tag, bad[0].text or bad[0].get("message"))
            found[case.get("name")] = told
        report.unlink()
    known[item.path] = found
    return found


def emulated_environment(**variables: str) -> dict[str, str]:
    paths = [str(ROOM), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "EMULATED_CUDA_DEVICES": "2",
        **variables,
    }
