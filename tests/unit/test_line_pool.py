"""The pool goes on where one worker cannot be started, and keeps nobody waiting at its end."""

import os
import resource
import signal

import pytest

from qurl_megatron.kit.errors import Unscored
from qurl_megatron.rewards.line_pool import Abandoned, LinePool
from tests.support.waiting import PATIENCE_S, wait_until

ECHO = """
import json, pathlib, sys, time
from qurl_megatron.rewards.line_pool import serve

gate = json.loads(sys.argv[1])["gate"]
while gate and not pathlib.Path(gate).exists():
    time.sleep(0.01)
serve(lambda: (None, lambda asked: asked), memory_gb=1.0)
"""


@pytest.fixture
def pool_of(tmp_path, monkeypatch):
    """A pool whose workers answer what they are asked, once there is a file called "open"."""
    (tmp_path / "own_echo.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    def make(workers: int, *, closed: bool = False) -> LinePool:
        task = {"gate": str(tmp_path / "open") if closed else ""}
        return LinePool("own_echo", task, workers, called="an echo", limit_key="limit_s")

    return make


def echo(pool: LinePool) -> int:
    return pool.put("7", PATIENCE_S, int).result(PATIENCE_S)


STRAY = """
import os, time
from qurl_megatron.rewards.line_pool import serve

pipe = os.dup(1)

def answer(asked):
    if asked < 0:
        os.write(pipe, b"8\\n" if asked == -1 else b"0 8\\n")
        time.sleep(0.2)
    return asked

serve(lambda: (None, answer), memory_gb=1.0)
"""


@pytest.mark.parametrize("stray", ["-1", "-2"])
def test_a_line_that_answers_nothing_costs_the_worker_and_no_question(pool_of, tmp_path, stray):
    (tmp_path / "own_echo.py").write_text(STRAY)
    with pool_of(1) as pool:
        assert echo(pool) == 7
        first = pool.seats[0].worker.process.pid
        answers = [pool.put(line, PATIENCE_S, _number) for line in (stray, "0", "1", "2")]
        assert answers[0].result(PATIENCE_S) == Unscored("crashes", "2 workers one after the other")
        assert [answer.result(PATIENCE_S) for answer in answers[1:]] == [0, 1, 2]
        assert pool.seats[0].worker.process.pid != first


def _number(said: object) -> int:
    if type(said) is not int:
        raise ValueError(said)
    return said


LEAVES_ITS_GROUP = """
import os, time
from qurl_megatron.rewards.line_pool import serve

def answer(asked):
    os.setpgid(0, os.getpgid(os.getppid()))
    time.sleep(1000)

serve(lambda: (None, answer), memory_gb=1.0)
"""


def test_a_worker_that_leaves_its_group_ends_all_the_same(pool_of, tmp_path):
    (tmp_path / "own_echo.py").write_text(LEAVES_ITS_GROUP)
    with pool_of(1) as pool:
        pool.await_start()
        assert pool.put("7", 1.0, int).result(PATIENCE_S) == Unscored("timeouts", "limit_s=1")


def test_a_worker_that_cannot_start_fails_the_pool_only_where_no_other_can(pool_of, tmp_path):
    def killed(number: int) -> bool:
        seat = pool.seats[number]
        if worker := seat.worker:
            worker.process.send_signal(signal.SIGKILL)
        return seat in pool.failed

    with pool_of(2, closed=True) as pool:
        wait_until(lambda: killed(0))
        assert not pool.started.done()
        (tmp_path / "open").touch()
        pool.await_start()
        assert [echo(pool) for _ in range(4)] == [7] * 4
    (tmp_path / "open").unlink()
    with pool_of(2, closed=True) as pool:
        for number in (0, 1):
            wait_until(lambda number=number: killed(number))
        with pytest.raises(RuntimeError, match="^an echo ended while starting; see stderr$"):
            pool.await_start()


def test_a_machine_with_no_room_for_another_worker_may_have_some_later(pool_of):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pool_of(1) as pool:
        assert echo(pool) == 7
        pool.seats[0].worker.process.send_signal(signal.SIGKILL)
        wait_until(pool.seats[0].worker.dead)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(RuntimeError, match="an echo cannot be started: .*open files"):
                echo(pool)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert echo(pool) == 7


def test_who_asks_a_pool_that_is_left_is_answered_at_once_and_it_may_be_entered_again(pool_of):
    with pool_of(1) as pool:
        assert echo(pool) == 7
        pool.leave()
        assert isinstance(pool.put("7", PATIENCE_S, int).exception(timeout=0), Abandoned)
    with pool:
        assert echo(pool) == 7
