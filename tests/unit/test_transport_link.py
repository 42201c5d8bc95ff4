"""The NCCL side of a link, on a scripted backend: what it is asked, and that no wait is endless."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from qurl_megatron.wire import group
from qurl_megatron.wire.group import Link, LinkError, unwatched, within
from tests.support.waiting import PATIENCE_S


class Work:
    def is_completed(self) -> bool:
        return False


class Backend:
    """Records calls; ``broken`` refuses to send, ``stuck`` never comes back from an abort."""

    def __init__(self, *, broken: bool = False, stuck: bool = False) -> None:
        self.calls: list = []
        self.broken, self.stuck = broken, stuck

    def send(self, tensors, rank, tag):
        self.calls.append(("send", rank))
        if self.broken:
            raise RuntimeError("NCCL error: remote process exited")

    def recv(self, tensors, rank, tag):
        self.calls.append(("recv", rank))

    def _start_coalescing(self):
        self.calls.append("start")

    def _end_coalescing(self):
        self.calls.append("end")
        return Work()

    def abort(self):
        self.calls.append("abort")
        if self.stuck:
            threading.Event().wait()


def nccl_link(backend: Backend) -> Link:
    return Link("a/1", backend, torch.device("cuda", 0), 2)


def test_what_goes_to_several_ranks_goes_in_one_group_of_calls():
    backend = Backend()
    works = nccl_link(backend).send([(2, torch.zeros(1)), (3, torch.zeros(1))], 0)
    assert backend.calls == ["start", ("send", 2), ("send", 3), "end"] and len(works) == 1
    assert nccl_link(backend).send([], 0) == []


def test_a_group_of_calls_is_closed_where_one_of_them_fails():
    backend = Backend(broken=True)
    with pytest.raises(RuntimeError, match="remote process exited"):
        nccl_link(backend).send([(2, torch.zeros(1)), (3, torch.zeros(1))], 0)
    assert backend.calls == ["start", ("send", 2), "end"]


def test_what_never_comes_is_given_up_at_the_deadline(monkeypatch):
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(group, "time", clock)
    with pytest.raises(LinkError, match="timed out"):
        nccl_link(Backend()).receive([(0, torch.zeros(1))], 0, 7.0)
    assert sum(waits) == pytest.approx(7.0, abs=0.01)


def test_an_abort_that_does_not_come_back_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(group, "ABORT_S", 0.0)
    backend = Backend(stuck=True)
    nccl_link(backend).abort()
    assert backend.calls == ["abort"]


def test_a_call_without_a_deadline_gets_one_and_is_undone_when_it_comes_back_late():
    released, undone = threading.Event(), threading.Event()
    with pytest.raises(LinkError, match=r"not done within 0.0 s"):
        within(0.0, released.wait, late=undone.set)
    assert not undone.is_set()
    released.set()
    assert undone.wait(PATIENCE_S)
    assert within(PATIENCE_S, lambda: 7, late=undone.set) == 7
    with pytest.raises(KeyError):
        within(PATIENCE_S, lambda: {}["none"])


@pytest.mark.parametrize("before", [None, "1"])
def test_groups_are_made_without_a_watchdog_and_leave_the_environment_as_it_was(
    before, monkeypatch
):
    monkeypatch.delenv(group.WATCHDOG, raising=False)
    if before is not None:
        monkeypatch.setenv(group.WATCHDOG, before)
    with unwatched():
        assert os.environ[group.WATCHDOG] == "0"
    assert os.environ.get(group.WATCHDOG) == before
