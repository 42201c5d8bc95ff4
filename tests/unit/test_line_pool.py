"""A pool goes on where one worker fails, and keeps nobody waiting at its end."""

import os
import resource
import signal

import pytest

from qurl_megatron.kit.errors import Unscored
from qurl_megatron.rewards.workers import Abandoned, WorkerPool
from tests.support.waiting import PATIENCE_S, wait_until

ECHO = """
from qurl_megatron.rewards.worker import serve

serve(lambda: lambda asked: asked, memory_gb=1.0)
"""
STRAY = """
import os
from qurl_megatron.rewards.worker import serve

pipe = os.dup(1)

def answer(asked):
    if asked < 0:
        os.write(pipe, b"8\\n" if asked == -1 else b"0 8\\n")
    return asked

serve(lambda: answer, memory_gb=1.0)
"""
LEAVES_ITS_GROUP = """
import os, time
from qurl_megatron.rewards.worker import serve

def answer(asked):
    os.setpgid(0, os.getpgid(os.getppid()))
    time.sleep(1000)

serve(lambda: answer, memory_gb=1.0)
"""


@pytest.fixture
def pool_of(tmp_path, monkeypatch):
    """A pool whose workers run a module of their own."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    def make(source: str = ECHO) -> WorkerPool:
        (tmp_path / "own_worker.py").write_text(source)
        return WorkerPool("echo", "echo=own", 1, 1.0, "limit_s", PATIENCE_S, module="own_worker")

    return make


def ask(pool: WorkerPool, question: str = "7"):
    return pool.put(question).result(PATIENCE_S)


@pytest.mark.parametrize("stray", ["-1", "-2"])
def test_a_line_that_answers_nothing_costs_the_worker_and_no_question(pool_of, stray):
    with pool_of(STRAY) as pool:
        assert ask(pool) == 7
        first = pool.workers[0].process.pid
        answers = [pool.put(question) for question in (stray, "0", "1", "2")]
        assert answers[0].result(PATIENCE_S) == Unscored("crashes", "2 workers one after the other")
        assert [answer.result(PATIENCE_S) for answer in answers[1:]] == [0, 1, 2]
        assert pool.workers[0].process.pid != first


def test_a_worker_that_leaves_its_group_ends_all_the_same(pool_of):
    with pool_of(LEAVES_ITS_GROUP) as pool:
        answer, worker = pool.put("7"), pool.workers[0].process
        wait_until(lambda: os.getpgid(worker.pid) == os.getpgid(0))
        pool.leave()
        with pytest.raises(Abandoned):
            answer.result(PATIENCE_S)
        assert worker.poll() == -signal.SIGKILL


def test_a_machine_with_no_room_for_another_worker_may_have_some_later(pool_of):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pool_of() as pool:
        assert ask(pool) == 7
        process = pool.workers[0].process
        process.kill()
        wait_until(lambda: process.poll() is not None)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(RuntimeError, match="a worker cannot be started: .*open files"):
                ask(pool)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert ask(pool) == 7


def test_who_asks_a_pool_that_is_left_is_answered_at_once(pool_of):
    with pool_of() as pool:
        assert ask(pool) == 7
        pool.leave()
        with pytest.raises(Abandoned):
            ask(pool)
