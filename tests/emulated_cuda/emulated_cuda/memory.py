"""What ``torch.cuda`` tells about memory: the books of a model of the caching allocator."""

import torch


def install(lib) -> None:
    def snapshot(*_) -> dict:
        return {
            "segments": [
                _segment(device, *segment)
                for device in range(lib.device_count())
                for segment in lib.memory_segments(device)
            ],
            "device_traces": [],
        }

    def empty_cache() -> None:
        for device in range(lib.device_count()):
            lib.release_cached(device)

    c = torch._C
    c._cuda_memoryStats = lib.memory_stats
    c._cuda_resetPeakMemoryStats = lib.reset_peak
    c._cuda_resetAccumulatedMemoryStats = lib.reset_accumulated
    c._cuda_emptyCache = empty_cache
    c._cuda_setMemoryFraction = lib.set_memory_fraction
    c._cuda_memorySnapshot = snapshot
    c._cuda_getAllocatorBackend = lambda: "native"
    torch.cuda.memory._host_allocator = None


def _segment(device: int, address: int, size: int, stream: int, small: bool, blocks: list) -> dict:
    def bytes_in(*states: str) -> int:
        return sum(size for size, _, state in blocks if state in states)

    rows, at = [], address
    for block_size, requested, state in blocks:
        rows.append(
            {"address": at, "size": block_size, "requested_size": requested, "state": state}
        )
        at += block_size
    return {
        "device": device,
        "address": address,
        "total_size": size,
        "allocated_size": bytes_in("active_allocated"),
        "active_size": bytes_in("active_allocated", "active_pending_free"),
        "stream": stream,
        "segment_type": "small" if small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": rows,
    }
