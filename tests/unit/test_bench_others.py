import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from qurl_megatron.bench import others
from qurl_megatron.bench.others import Others

WORKS = (
    "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); sys.stdin.read()"
)
REST = {"nice": 0, "system": 0, "steal": 0, "iowait": 0, "irq": 0}


@pytest.fixture
def machine(monkeypatch):
    """One of two cores whose kernel says what it is told to; its processes are the real ones."""
    told = [SimpleNamespace(user=0.0, idle=0.0, **REST) for _ in range(2)]
    monkeypatch.setattr(others.psutil, "cpu_times", lambda percpu: told)
    monkeypatch.setattr(others.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(others, "_kernel", list)
    return told


def worker() -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", WORKS], **pipes)


@pytest.mark.parametrize("dead", [False, True])
def test_work_of_our_children_is_ours_while_they_live_and_when_they_are_dead(machine, dead):
    watch = Others()
    with worker() as child:
        child.stdout.readline()  # 0.3 s of work are done
        if dead:
            child.communicate()
        machine[0].user, machine[1].idle = 1.0, 1.0
        assert watch.share() < (1.0 - 0.28) / 2  # the kernel counts in hundredths
        if not dead:
            child.communicate()


def test_all_that_our_processes_did_not_do_was_done_by_others(machine):
    watch = Others()
    machine[0].user, machine[0].steal, machine[1].idle = 50.0, 20.0, 30.0
    assert watch.share() == pytest.approx(0.7, abs=0.01)


def test_nothing_is_used_by_others_where_ours_did_it_all(machine):
    watch = Others()
    start = time.process_time()
    while time.process_time() < start + 0.1:
        pass
    machine[0].user, machine[1].idle = 0.05, 0.05  # the kernel counts in steps, and may be late
    assert watch.share() == 0.0


def test_an_engine_at_a_local_url_is_ours_and_one_elsewhere_is_not_looked_for(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = others._listeners([f"http://127.0.0.1:{port}", "http://far:80"])
        assert found == psutil.Process()
        assert others._spent([found, psutil.Process()]) == pytest.approx(
            others._spent([found]), abs=0.05
        )
    monkeypatch.setattr(others.psutil, "net_connections", lambda _: pytest.fail("asked"))
    assert others._listeners(["http://far:80"]) == []
