"""Copies that do not block the host are late where CUDA's may be."""

import pytest
import torch

EMULATED = {"EMULATED_CUDA_POISON": "1"}
RACE = "emulated CUDA: race"


def pinned(n=4):
    return torch.zeros(n, pin_memory=True)


def test_pinned_memory_is_pinned_and_other_memory_is_not():
    assert pinned().is_pinned() and torch.ones(3).pin_memory().is_pinned()
    assert not torch.zeros(4).is_pinned() and pinned()[1:].is_pinned()


def test_the_host_finds_the_bytes_after_it_has_waited():
    x, host = torch.ones(4, device="cuda"), pinned()
    host.copy_(x, non_blocking=True)
    assert host.isnan().all()
    torch.cuda.synchronize()
    assert host.tolist() == [1, 1, 1, 1]


def test_an_event_before_the_copy_is_not_enough():
    x, host = torch.ones(4, device="cuda"), pinned()
    early = torch.cuda.current_stream().record_event()
    host.copy_(x, non_blocking=True)
    early.synchronize()
    assert host.isnan().all()
    torch.cuda.current_stream().record_event().synchronize()
    assert host.tolist() == [1, 1, 1, 1]


def test_a_source_that_changes_too_early_shows_on_the_device():
    host, x = pinned().fill_(1), torch.empty(4, device="cuda")
    x.copy_(host, non_blocking=True)
    host.fill_(7)
    assert x.tolist() == [7, 7, 7, 7]


def test_the_way_back_on_another_stream_needs_an_edge():
    x, host, side = torch.ones(4, device="cuda"), pinned(), torch.cuda.Stream()
    torch.cuda.synchronize()
    host.copy_(x, non_blocking=True)
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match=RACE):
        torch.empty(4, device="cuda").copy_(host, non_blocking=True)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_pageable_memory_is_there_at_once(non_blocking):
    x = torch.ones(4, device="cuda")
    host = torch.zeros(4)
    assert host.copy_(x, non_blocking=non_blocking).tolist() == [1, 1, 1, 1]
    host.fill_(2)
    x.copy_(host, non_blocking=non_blocking)
    host.zero_()
    assert x.tolist() == [2, 2, 2, 2]


def test_to_the_cpu_without_blocking_is_late_because_torch_pins_the_result():
    host = torch.ones(4, device="cuda").to("cpu", non_blocking=True)
    assert host.is_pinned() and host.isnan().all()
    torch.cuda.synchronize()
    assert host.tolist() == [1, 1, 1, 1]


def test_fresh_memory_is_not_a_number():
    assert torch.empty(100, device="cuda").isnan().all()
    assert torch.empty(100, device="cuda", dtype=torch.bfloat16).isnan().all()
    assert torch.empty_like(torch.ones(3, device="cuda")).isnan().all()
