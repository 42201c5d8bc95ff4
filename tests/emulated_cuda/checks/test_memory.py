"""memory_allocated, memory_reserved and their kin, by sequences worked out by hand.

The rules are those of CUDA's caching allocator: requests are rounded to 512 bytes; up to 1 MiB they
come from segments of 2 MiB, below 10 MiB from segments of 20 MiB, otherwise from a segment of their
own, rounded to 2 MiB; what is left of a block stays free if it is 512 bytes (small) or more than
1 MiB (large).
"""

import gc
import sys

import pytest
import torch

KiB, MiB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def clean():
    # The traceback of a test that failed holds its tensors.
    for name in ("last_exc", "last_value", "last_traceback"):
        sys.__dict__.pop(name, None)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == torch.cuda.memory_allocated() == 0
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()


def take(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def counts() -> tuple[int, int]:
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def test_small_requests_share_a_segment_of_two_megabytes():
    a, b = take(1), take(513)
    assert counts() == (512 + 1024, 2 * MiB)
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == 514
    c = a[1:]  # a view takes nothing, a result of a kernel does
    c = b + 1
    assert counts() == (512 + 2 * 1024, 2 * MiB)
    del a, b, c
    assert counts() == (0, 2 * MiB)


def test_large_requests_get_segments_of_their_own_and_empty_cache_gives_back_whole_ones():
    a = take(10 * MiB + 1)
    # Nearly 2 MiB are left over, and split off.
    assert counts() == (10 * MiB + 512, 12 * MiB)
    b = take(11 * MiB + 512 * KiB)
    # Half a megabyte is left over and stays with its block.
    assert counts() == (10 * MiB + 512 + 12 * MiB, 24 * MiB)
    c, d = take(5 * MiB), take(5 * MiB)  # they share a segment
    del b, c
    torch.cuda.empty_cache()
    assert counts() == (10 * MiB + 512 + 5 * MiB, 12 * MiB + 20 * MiB)
    free, total = torch.cuda.mem_get_info()
    assert total - free == 32 * MiB
    del a, d


def test_a_full_device_first_loses_its_cache_then_fails():
    torch.cuda.set_per_process_memory_fraction(256 * MiB / torch.cuda.mem_get_info()[1])
    try:
        a = take(150 * MiB)
        del a
        b = take(200 * MiB)  # fits only once the cached segment is gone
        assert counts() == (200 * MiB, 200 * MiB)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 60.00 MiB"):
            take(60 * MiB)
        del b
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_peaks_are_kept_until_reset():
    a = take(30 * MiB)
    del a
    torch.cuda.empty_cache()
    assert torch.cuda.max_memory_allocated() == torch.cuda.max_memory_reserved() == 30 * MiB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.max_memory_reserved() == 0
