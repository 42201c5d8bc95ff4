"""What ends with a process, and what does not."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.leftovers import Footprint
from tests.support.waiting import PATIENCE_S, wait_until

BEGIN = """
import os, pathlib, signal, subprocess, sys, time
from qurl_megatron.kit.undertaker import bury, spare
def sleeper():
    return subprocess.Popen(["sleep", "600"], start_new_session=True)
folder = pathlib.Path(sys.argv[1])
"""
ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, body: str) -> tuple[int, Footprint]:
    footprint = Footprint()
    env = {**footprint.env, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BEGIN + body, str(tmp_path)]
    done = subprocess.run(command, env=env, timeout=PATIENCE_S)
    return done.returncode, footprint


def only_one(footprint: Footprint) -> str:
    """What stays when the undertaker has done its work; it is ended then."""
    wait_until(lambda: len(footprint.left(seconds=0.0)) <= 1)
    (left,) = footprint.left(seconds=0.0)
    for process in footprint.processes():
        process.kill()
    return left


def test_it_acts_after_an_ordinary_end_too_and_leaves_the_exit_code_alone(tmp_path):
    body = "os.setpgrp(); bury(os.getpid()); subprocess.Popen(['sleep', '600']); sys.exit(7)"
    code, footprint = run(tmp_path, body)
    assert code == 7
    assert footprint.left() == []


def test_what_has_been_spared_and_what_another_has_made_since_stays(tmp_path):
    """A file system gives the number of an inode to the next one at once, where it is free."""
    body = """
made, kept, gone = folder / "made", folder / "kept", folder / "gone"
made.mkdir(), kept.mkdir(), gone.mkdir()
bury(made), bury(kept), spare(kept), bury(gone)
made.rmdir(), made.mkdir(), (made / "somebody's").touch()
child = sleeper()
bury(child.pid), spare(child.pid)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, footprint = run(tmp_path, body)
    assert code == -9
    left = only_one(footprint)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "made"]
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["somebody's"]
    assert "sleep 600" in left


MAPPING = """
mapping = '''
import mmap, sys, time
for path in sys.argv[1:]:
    with open(path, "wb+") as file:
        file.truncate(4096)
        globals()[path] = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
time.sleep(600)
'''
def mapped_by_a_group(*paths):
    child = subprocess.Popen(
        [sys.executable, "-c", mapping, *paths], start_new_session=True, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    return child
"""


def test_what_sglang_shares_in_memory_goes_with_it_and_other_files_stay(tmp_path):
    """By what its processes have mapped, and by name where who had it is gone."""
    mark = f"test-undertaker-{os.getpid()}"
    shared = [Path(f"/dev/shm/sgl_shm_{name}_{mark}") for name in ("mapped", "told", "spared")]
    users = Path(f"/dev/shm/{mark}.safetensors")
    body = f"""
mapped, told, spared, users = map(pathlib.Path, {[*map(str, shared), str(users)]})
told.touch(), spared.touch(), (folder / "users").touch()
bury(told), bury(spared), spare(spared), bury(mapped_by_a_group(mapped, users).pid)
try:
    bury(folder / "users")
except NotADirectoryError:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    try:
        code, footprint = run(tmp_path, MAPPING + body)
        assert code == -9
        assert footprint.left() == []
        assert [path.exists() for path in (*shared, users)] == [False, False, True, True]
        assert (tmp_path / "users").exists()
    finally:
        for path in (*shared, users):
            path.unlink(missing_ok=True)


def test_without_its_undertaker_a_process_goes_on(tmp_path):
    body = """
bury(sleeper().pid)
from qurl_megatron.kit import undertaker
undertaker._own._process.kill()
undertaker._own._process.wait()
bury(sleeper().pid)
sys.exit(5)
"""
    code, footprint = run(tmp_path, body)
    assert code == 5
    assert len(footprint.processes()) == 2
    for process in footprint.processes():
        process.kill()


def test_a_forked_child_that_lives_on_hides_nothing(tmp_path):
    """It holds the other end of the undertaker's standard input."""
    body = """
bury(sleeper().pid)
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, footprint = run(tmp_path, body)
    assert code == -9
    left = only_one(footprint)
    assert "import os, pathlib" in left
