"""What ``torch.cuda`` tells about memory."""

import torch


def install(lib) -> None:
    def stats(device: int) -> dict:
        current, peak, reserved, count = lib.memory(device)
        row = {"current": current, "peak": peak, "allocated": 0, "freed": 0}
        held = {"current": reserved, "peak": reserved, "allocated": 0, "freed": 0}
        pools = ("all", "small_pool", "large_pool")
        return {
            "allocated_bytes": dict.fromkeys(pools, row),
            "requested_bytes": dict.fromkeys(pools, row),
            "active_bytes": dict.fromkeys(pools, row),
            "reserved_bytes": dict.fromkeys(pools, held),
            "inactive_split_bytes": dict.fromkeys(pools, held),
            "allocation": dict.fromkeys(pools, {**row, "allocated": count}),
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    c = torch._C
    c._cuda_memoryStats = stats
    c._cuda_resetPeakMemoryStats = lib.reset_peak
    c._cuda_resetAccumulatedMemoryStats = lambda device: None
    c._cuda_emptyCache = lib.empty_cache
    c._cuda_setMemoryFraction = lambda fraction, device: None
    c._cuda_memorySnapshot = lambda *_: {"segments": [], "device_traces": []}
    c._cuda_getAllocatorBackend = lambda: "native"
    torch.cuda.memory._host_allocator = None
