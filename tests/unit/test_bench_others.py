"""Real processes, and a record of what the kernel says of others."""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest

from qurl_megatron.bench import others
from qurl_megatron.bench.others import Others
from tests.waiting import wait_until

Times = namedtuple("Times", "user system children_user children_system")
SPINS = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True); input()"


class Machine:
    """Its processes by number, as psutil tells them."""

    def __init__(self, monkeypatch) -> None:
        self.processes: dict[int, dict] = {}
        self.now = 0.0
        iterate = lambda _: [SimpleNamespace(pid=p, info=i) for p, i in self.processes.items()]  # noqa: E731
        monkeypatch.setattr(others, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(others, "psutil", SimpleNamespace(process_iter=iterate))
        monkeypatch.setattr(others.os, "sched_getaffinity", lambda _: {0, 2})  # 1 is offline
        self.set(os.getpid(), parent=50)

    def set(self, pid: int, seconds=0.0, children=0.0, parent=1, name="a", cores=(0, 2)) -> None:
        self.processes[pid] = {
            "pid": pid,
            "ppid": parent,
            "name": name,
            "create_time": float(pid),
            "cpu_times": Times(seconds, 0.0, children, 0.0),
            "cpu_affinity": list(cores),
        }


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def share(machine: Machine, then) -> float:
    watch = Others()
    machine.now += 10.0
    then()
    return watch.share()


def test_what_a_stranger_used_is_a_share_of_our_two_cores(machine):
    machine.set(70, seconds=100.0)
    assert share(machine, lambda: machine.set(70, seconds=104.0)) == pytest.approx(0.2)


def test_what_strangers_dead_children_used_counts_but_not_what_they_used_before(machine):
    machine.set(70)
    machine.set(71, seconds=100.0, parent=70)

    def then() -> None:
        del machine.processes[71]  # after another two seconds
        machine.set(70, children=102.0 + 1.0)  # and one of a child that nobody saw

    assert share(machine, then) == pytest.approx(0.15)


def test_our_children_the_kernels_threads_and_processes_of_other_cores_are_no_others(machine):
    def then() -> None:
        machine.set(80, seconds=5.0, parent=os.getpid())
        machine.set(81, seconds=5.0, parent=80)
        machine.set(2, name="kthreadd", parent=0)
        machine.set(90, seconds=5.0, parent=2)
        machine.set(91, seconds=5.0, cores=(1, 3))

    assert share(machine, then) == 0.0


def test_orphans_of_ours_that_the_first_process_buries_are_no_others(machine):
    machine.set(1, children=100.0, parent=0)
    machine.set(80, seconds=50.0, parent=os.getpid())

    def then() -> None:
        del machine.processes[80]
        machine.set(1, children=200.0, parent=0)

    assert share(machine, then) == 0.0


def test_real_processes_are_seen_and_ours_are_not(monkeypatch):
    def spin(watch: Others) -> float:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", SPINS], **pipes) as child:
            child.stdout.readline()
            found = watch._look()
            child.communicate(b"\n")
        return next((it.seconds for key, it in found.items() if key[0] == child.pid), 0.0)

    watch = Others()
    assert spin(watch) == 0.0
    watch._roots = set()  # as if this test were somebody else's
    assert spin(watch) >= 0.35
    time.sleep(0.01)
    assert watch.share() > 0


ORPHAN = """
import subprocess, sys
worker = [sys.executable, "-c", sys.argv[1]]
subprocess.Popen(worker, start_new_session=True)
sys.stdin.read()
"""


def test_what_outlives_a_child_of_ours_is_no_other():
    """As SGLang's scheduler does the server that started it, for the time of its dying."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", ORPHAN, SPINS]
    with Others() as watch, subprocess.Popen(command, **pipes) as server:
        server.stdout.readline()  # the worker has used what it uses, and waits for a line
        (worker,) = psutil.Process(server.pid).children()
        server.kill()
        server.wait()
        seen, parent = {number for number, _ in watch._look()}, worker.ppid()
        worker.kill()
        worker.wait()
    assert parent == os.getpid() and worker.pid not in seen
    assert not others._adopts()  # once nobody watches


LEFT = """
import subprocess, sys
reads = [sys.executable, "-c", "import sys; sys.stdin.read()"]
print(subprocess.Popen(reads, start_new_session=True).pid, flush=True)
"""


def test_orphans_that_have_ended_are_buried_and_exit_codes_are_left_to_who_waits_for_them():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with Others():
        with subprocess.Popen([sys.executable, "-c", LEFT], **pipes) as server:
            orphan = int(server.stdout.readline())
        child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
        process = multiprocessing.get_context("fork").Process(target=os._exit, args=(8,))
        process.start()
        for pid in (orphan, child.pid, process.pid):
            wait_until(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert not psutil.pid_exists(orphan)
    assert child.wait() == 7
    process.join()
    assert process.exitcode == 8


def test_an_engine_at_a_local_url_is_ours_and_one_elsewhere_is_not_looked_for(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert others._listeners([f"http://127.0.0.1:{port}", "http://far:80"]) == {os.getpid()}
    monkeypatch.setattr(psutil, "net_connections", lambda _: pytest.fail("asked"))
    assert others._listeners(["http://far:80", "http://localhost:abc"]) == set()
