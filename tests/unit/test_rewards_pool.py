"""The pool survives what models write."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from qurl_megatron.config import RewardConfig
from qurl_megatron.rewards import RewardPool
from tests.waiting import wait_until

TOWER = ("$9^{9^{9^{9^{9}}}}$", "10^{10^{10^{10}}}")  # math-verify alone needs 6 s to give up


@pytest.fixture(scope="module")
def pool():
    with RewardPool(RewardConfig(kind="math", workers=2, timeout_s=3.0)) as pool:
        yield pool


def pids(pool: RewardPool) -> list[int]:
    return [worker.process.pid for worker in pool._workers]


def settle(pool: RewardPool) -> None:
    """Wait until replaced workers have started, too."""
    while not all(worker.ready for worker in pool._workers):
        pool.score([("1", "1")])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_scores_come_back_in_order_however_many_workers_there_are(pool):
    pairs = [(f"\\boxed{{{i}}}", str(i if i % 3 else i + 1)) for i in range(30)]
    assert pool.score(pairs) == [float(i % 3 != 0) for i in range(30)]
    assert pool.score([]) == []


def test_a_power_tower_is_wrong_after_the_timeout_and_its_worker_is_replaced(pool):
    before, count = set(pids(pool)), pool.timeouts
    scores = pool.score([("\\boxed{4}", "4"), TOWER, ("\\boxed{5}", "5"), TOWER])
    assert scores == [1.0, 0.0, 1.0, 0.0]
    assert pool.timeouts == count + 1  # the same pair twice is checked once
    gone = before - set(pids(pool))
    assert len(gone) == 1 and not any(map(alive, gone))
    assert pool.score([("\\boxed{6}", "6")] * 3) == [1.0] * 3


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{123456789!^{12345}}",
        "\\boxed{" + "\\frac{" * 500 + "1" + "}{2}" * 500 + "}",
        "\\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
        "\ud800\x00\uffff \\boxed{",
        "\\boxed{\u0663\u200d\U0001f525}",
        "9" * 100_000,
        "{" * 100_000,
        "\\boxed{10^{10^{10}}}",
        "$" * 99_999,
        "\n\r\x1b[2J ready",
    ],
    ids=range(10),
)
def test_no_text_raises_or_stalls(pool, text):
    timeouts = pool.timeouts
    assert pool.score([(text, "17"), ("\\boxed{17}", "17")]) == [0.0, 1.0]
    assert pool.timeouts - timeouts <= 1


def test_killing_idle_workers_costs_no_answer(pool):
    settle(pool)
    crashes = pool.crashes
    for pid in pids(pool):
        os.kill(pid, signal.SIGKILL)
    pairs = [(f"\\boxed{{{i}}}", str(i)) for i in range(6)]
    assert pool.score(pairs) == [1.0] * 6
    assert pool.crashes == crashes


def test_a_replacement_may_be_killed_while_it_starts(pool):
    settle(pool)
    pool._workers = [worker.replaced() for worker in pool._workers]
    for pid in pids(pool):
        os.kill(pid, signal.SIGKILL)
    assert pool.score([("\\boxed{7}", "7"), ("\\boxed{8}", "7")]) == [1.0, 0.0]


def test_workers_that_never_start_end_the_call(pool, monkeypatch):
    monkeypatch.setattr("qurl_megatron.rewards.pool.WORKER", "qurl_megatron.rewards.nowhere")
    with (
        RewardPool(RewardConfig(kind="math", workers=1)) as broken,
        pytest.raises(RuntimeError, match="a reward worker ended while starting; see stderr"),
    ):
        broken.score([("1", "1")])


def kill_busy(pool: RewardPool, pair: tuple[str, str], times: int) -> threading.Thread:
    """Kill the first workers that have this check under way."""

    def kill() -> None:
        killed: set[int] = set()
        while len(killed) < times:
            for worker in list(pool._workers):
                if worker.pair == pair and worker.process.pid not in killed:
                    os.kill(worker.process.pid, signal.SIGKILL)
                    killed.add(worker.process.pid)
            time.sleep(0.005)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("times,expected", [(1, [1.0, 1.0]), (2, [0.0, 1.0])])
def test_a_check_whose_worker_is_killed_is_checked_again_once(pool, times, expected):
    settle(pool)
    crashes = pool.crashes
    # A tenth of a second, and right; each case its own, for workers remember.
    slow = ("\\boxed{2^{1.0}" + "+ 1" * (60 + times) + "}", str(62 + times))
    killer = kill_busy(pool, slow, times)
    assert pool.score([slow, ("\\boxed{5}", "5")]) == expected
    killer.join()
    assert pool.crashes == crashes + times - 1


def test_a_stopped_worker_is_a_timeout_however_long_the_text(pool):
    settle(pool)
    timeouts, first = pool.timeouts, pids(pool)[0]
    os.kill(first, signal.SIGSTOP)
    assert pool.score([("x" * 200_000, "1"), ("\\boxed{3}", "3")])[1] == 1.0
    assert pool.timeouts == timeouts + 1 and not alive(first)


def test_workers_ignore_ctrl_c_and_import_no_torch(pool):
    settle(pool)
    before = pids(pool)
    for pid in before:
        os.kill(pid, signal.SIGINT)
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    time.sleep(0.1)
    assert pool.score([("\\boxed{8}", "8"), ("\\boxed{9}", "9")]) == [1.0, 1.0]
    assert pids(pool) == before


def test_an_interrupted_call_leaves_no_check_under_way(pool, monkeypatch):
    wait = pool._wait

    def interrupted():
        monkeypatch.setattr(pool, "_wait", wait)
        raise KeyboardInterrupt

    settle(pool)
    monkeypatch.setattr(pool, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.score([("\\boxed{1}", "1"), ("\\boxed{2}", "2")])
    assert not any(worker.pair for worker in pool._workers)
    assert pool.score([("\\boxed{1}", "7"), ("\\boxed{2}", "7")]) == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["last_number", "exact"])
def test_cheap_kinds_start_no_process(kind):
    with RewardPool(RewardConfig(kind=kind, workers=2)) as pool:
        assert pool.score([("12", "12"), ("13", "12")]) == [1.0, 0.0]
        assert pids(pool) == []


def test_leaving_the_pool_ends_its_workers():
    with RewardPool(RewardConfig(kind="math")) as pool:
        before = pids(pool)
        assert all(map(alive, before))
    assert not any(map(alive, before))


TRAINER = """
import os, signal, sys, threading, time
from qurl_megatron.config import RewardConfig
from qurl_megatron.rewards import RewardPool
from tests.unit.test_rewards_pool import TOWER, pids, settle
pool = RewardPool(RewardConfig(kind="math", workers=3, timeout_s=1000)).__enter__()
settle(pool)
os.kill(pids(pool)[1], signal.SIGSTOP)
threading.Thread(target=pool.score, args=([TOWER],), daemon=True).start()
print(*pids(pool), flush=True)
time.sleep(600)
"""


def test_workers_end_with_a_trainer_that_is_killed_idle_busy_or_stopped():
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE)
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(workers) == 3
    trainer.kill()
    trainer.communicate()
    wait_until(lambda: not any(map(alive, workers)))
