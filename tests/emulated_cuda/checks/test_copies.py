"""Copies that do not block the host are late where CUDA's may be, and fresh memory is NaN."""

import pytest
import torch


def pinned():
    return torch.zeros(4, pin_memory=True)


def test_the_host_finds_the_bytes_after_it_has_waited_for_the_copy():
    x, host = torch.ones(4, device="cuda"), pinned()
    assert host.is_pinned() and not torch.zeros(4).is_pinned()
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
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="emulated CUDA: race"):
        torch.empty(4, device="cuda").copy_(host, non_blocking=True)
    torch.cuda.synchronize()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fresh_memory_is_not_a_number(dtype):
    assert torch.empty(100, device="cuda", dtype=dtype).isnan().all()
