"""What an engine's processes share in memory goes with them, however they end."""

import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from qurl_megatron.engines.starting import Launch
from qurl_megatron.fleet import process
from qurl_megatron.fleet.process import EngineProcess
from tests.support.disks import fill, small_disk
from tests.support.waiting import PATIENCE_S, wait_until

MAPS = """
import mmap, os, sys, time
path = f"{sys.argv[1]}{os.getpid()}"
with open(path, "wb+") as file:
    file.truncate(4096)
    shared = mmap.mmap(file.fileno(), 4096)
print(path, flush=True)
time.sleep(600)
"""


def mapped(engine: EngineProcess, starts: int = 1) -> Path:
    """What the process of so many starts has mapped, as soon as it has."""
    wait_until(lambda: engine.log.exists() and len(engine.log.read_text().split()) == starts)
    path = Path(engine.log.read_text().split()[-1])
    assert path.exists()
    return path


@pytest.fixture
def engine(tmp_path):
    shared = f"/dev/shm/sgl_shm_test_{os.getpid()}_"
    made = EngineProcess("engine", Launch((sys.executable, "-c", MAPS, shared), {}), tmp_path)
    yield made
    process.stop([made], 0.0)
    for path in Path("/dev/shm").glob(f"{Path(shared).name}*"):
        path.unlink()


@pytest.mark.parametrize("killed", [False, True], ids=["running", "dead since it was seen"])
def test_it_goes_when_the_engine_is_stopped(killed, engine):
    engine.start()
    path = mapped(engine)
    if killed:
        engine.look()
        os.killpg(engine.popen.pid, signal.SIGKILL)
        engine.popen.wait()
    process.stop([engine], PATIENCE_S)
    assert not path.exists()


def test_it_goes_when_the_engine_is_killed_and_started_again(engine):
    engine.start()
    first = mapped(engine)
    engine.kill()
    engine.start()
    assert mapped(engine, 2) != first
    assert not first.exists()


def test_it_goes_when_the_engine_is_stopped_while_it_is_looked_at(engine, monkeypatch):
    engine.start()
    path, shared_by = mapped(engine), process.shared_by
    looking, stopping = threading.Event(), threading.Event()

    def slowly(groups) -> set[str]:
        found = shared_by(groups)
        if not looking.is_set():
            looking.set()
            stopping.wait(PATIENCE_S)
            return found
        return set()

    monkeypatch.setattr(process, "shared_by", slowly)
    look = threading.Thread(target=engine.look)
    look.start()
    assert looking.wait(PATIENCE_S)
    stopping.set()
    process.stop([engine], PATIENCE_S)
    look.join()
    assert not path.exists()


def test_it_goes_when_the_trainer_is_killed_and_the_engine_went_first(engine):
    """An engine ends with its trainer by itself, so that nobody can say what it had mapped."""

    def trainer() -> None:
        engine.start()
        mapped(engine)
        engine.look()
        os.killpg(engine.popen.pid, signal.SIGKILL)
        engine.popen.wait()
        os.kill(os.getpid(), signal.SIGKILL)

    killed = multiprocessing.get_context("fork").Process(target=trainer)
    killed.start()
    killed.join(PATIENCE_S)
    assert killed.exitcode == -signal.SIGKILL
    path = Path(engine.log.read_text().strip())
    wait_until(lambda: not path.exists())


def test_one_that_cannot_write_its_log_names_the_full_disk(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        made = EngineProcess("engine", Launch((sys.executable, "-c", "1 / 0"), {}), disk)
        fill(disk)
        made.start()
        said = made.exited(PATIENCE_S)
        made.end()
    assert said == (
        f"exited with status 1 and could not write {disk}/engine.log: 0 bytes are free on its disk;"
        " free some, or name a folder on another"
    )
