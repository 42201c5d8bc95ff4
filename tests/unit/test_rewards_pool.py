"""The pool survives what models write."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qurl_megatron.config import RewardConfig
from qurl_megatron.rewards import Item, RewardPool
from qurl_megatron.rewards.workers import WorkerPool, as_line
from tests.support.rewards import causes
from tests.support.waiting import NEVER_S, wait_until

TOWER = ("$9^{9^{9^{9^{9}}}}$", "10^{10^{10^{10}}}")  # math-verify alone needs 6 s to give up


@pytest.fixture(scope="module")
def pool():
    with workers_of(RewardConfig(kind="math", workers=2, timeout_s=3.0)) as pool:
        yield pool


def workers_of(config: RewardConfig) -> WorkerPool:
    workers = RewardPool(config).workers
    assert workers is not None
    return workers


def line(pair: tuple[str, str]) -> str:
    """A text and the answer it should give, as an item."""
    return as_line(vars(Item("", *pair, {})))


def scores(pool: WorkerPool, pairs: list[tuple[str, str]]) -> list[float | str]:
    """The scores; in place of one that is missing, the cause."""
    return causes(pool.answers([line(pair) for pair in pairs], lambda: False))


def pids(pool: WorkerPool) -> list[int]:
    return [worker.process.pid for worker in pool.workers]


def settle(pool: WorkerPool) -> None:
    """Wait until all workers are ready; replaced ones are waited for by who asks them."""

    def ready() -> bool:
        scores(pool, [(f"\\boxed{{{i}}}", "1") for i in range(10)])
        return all(worker.ready for worker in pool.workers)

    wait_until(ready)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_scores_come_back_in_order_however_many_workers_there_are(pool):
    pairs = [(f"\\boxed{{{i}}}", str(i if i % 3 else i + 1)) for i in range(30)]
    assert scores(pool, pairs) == [float(i % 3 != 0) for i in range(30)]
    assert scores(pool, []) == []


def test_a_power_tower_has_no_score_after_the_timeout_and_its_worker_is_replaced(pool):
    before = set(pids(pool))
    found = scores(pool, [("\\boxed{4}", "4"), TOWER, ("\\boxed{5}", "5")])
    assert found == [1.0, "timeouts", 1.0]
    gone = before - set(pids(pool))
    assert gone and not any(map(alive, gone))
    assert scores(pool, [("\\boxed{6}", "6")] * 3) == [1.0] * 3


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{123456789!^{12345}}",
        "\\boxed{" + "\\frac{" * 500 + "1" + "}{2}" * 500 + "}",
        "\\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
        "\ud800\x00\uffff \\boxed{",
        "9" * 100_000,
        "\n\r\x1b[2J ready",
    ],
    ids=range(6),
)
def test_no_text_raises_or_stalls(pool, text):
    found, right = scores(pool, [(text, "17"), ("\\boxed{17}", "17")])
    assert found in (0.0, "timeouts") and right == 1.0


def test_killing_idle_workers_costs_no_answer(pool):
    settle(pool)
    for pid in pids(pool):
        os.kill(pid, signal.SIGKILL)
    pairs = [(f"\\boxed{{{i}}}", str(i)) for i in range(6)]
    assert scores(pool, pairs) == [1.0] * 6


def test_workers_may_be_killed_while_they_start():
    with workers_of(RewardConfig(kind="math", workers=2)) as pool:
        for pid in pids(pool):
            os.kill(pid, signal.SIGKILL)
        assert scores(pool, [("\\boxed{7}", "7"), ("\\boxed{8}", "7")]) == [1.0, 0.0]


@pytest.mark.parametrize(
    "module, start_s, why",
    [("nowhere", NEVER_S, "ended while starting"), ("sleeps", 0.05, "was not ready after 0.05 s")],
)
def test_workers_that_never_start_end_the_call(tmp_path, monkeypatch, module, start_s, why):
    (tmp_path / "sleeps.py").write_text(f"import time; time.sleep({NEVER_S})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken = workers_of(RewardConfig(kind="math", workers=1))
    broken.module, broken.start_s = module, start_s
    with broken, pytest.raises(RuntimeError, match=f"^reward.kind=math: a worker {why}; see"):
        scores(broken, [("1", "1")])


def test_a_stopped_worker_is_a_timeout_however_long_the_text(pool):
    settle(pool)
    stopped = pids(pool)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    assert scores(pool, [("x" * 200_000, "1"), ("\\boxed{3}", "3")]) == ["timeouts"] * 2
    assert not any(map(alive, stopped))


def test_workers_ignore_ctrl_c_and_import_no_torch(pool):
    settle(pool)
    before = pids(pool)
    for pid in before:
        os.kill(pid, signal.SIGINT)
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    assert scores(pool, [("\\boxed{8}", "8"), ("\\boxed{9}", "9")]) == [1.0, 1.0]
    assert pids(pool) == before


@pytest.mark.parametrize("kind", ["last_number", "exact"])
def test_cheap_kinds_start_no_process(kind):
    with RewardPool(RewardConfig(kind=kind, workers=2)) as pool:
        items = [Item("", "12", "12", {}), Item("", "13", "12", {})]
        assert pool.grade(items) == [1.0, 0.0]
        assert pool.workers is None


TRAINER = """
import os, signal, sys, time
from qurl_megatron.config import RewardConfig
from tests.unit.test_rewards_pool import TOWER, line, pids, settle, workers_of
pool = workers_of(RewardConfig(kind="math", workers=3, timeout_s=1000)).__enter__()
settle(pool)
os.kill(pids(pool)[1], signal.SIGSTOP)
pool.put(line(TOWER))
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
