"""Devices as ``torch.cuda`` asks for them: count, current, properties, memory, and the bad fork."""

import hashlib
import logging
import os
import types
import uuid

import torch

NAME = "NVIDIA H100 80GB HBM3 (emulated)"
CAPABILITY = (9, 0)


def install(lib) -> None:
    forked = False

    def in_child() -> None:
        nonlocal forked
        forked = torch.cuda._initialized
        if forked:
            lib.require_init()

    os.register_at_fork(after_in_child=in_child)
    torch.cuda._is_in_bad_fork = lambda: forked

    def init() -> None:
        if not lib.device_count():
            raise RuntimeError("No CUDA GPUs are available")
        lib.mark_initialized()
        torch.cuda.default_generators = tuple(
            lib.default_generator(i) for i in range(lib.device_count())
        )
        torch.cuda._get_device_properties = lambda i: _properties(lib, i)

    def exchange(device: int) -> int:
        before = lib.current_device()
        if device >= 0:
            lib.set_device(device)
        return before

    def empty_cache() -> None:
        for device in range(lib.device_count()):
            lib.release_cached(device)

    c = torch._C
    c._has_cuda = True
    c._cuda_init = init
    c._cuda_getDeviceCount = lib.device_count
    c._cuda_getDevice = lib.current_device
    c._cuda_setDevice = lib.set_device
    c._cuda_exchangeDevice = c._cuda_maybeExchangeDevice = exchange
    c._cuda_isInBadFork = lambda: forked
    c._cuda_getCompiledVersion = lambda: 12080
    c._cuda_getArchFlags = lambda: "sm_80 sm_90"
    c._cuda_isCurrentStreamCapturing = lambda: False
    c._host_emptyCache = lambda: None
    c._cuda_ipc_collect = lambda: None
    c._cuda_memoryStats = lib.memory_stats
    c._cuda_resetPeakMemoryStats = lib.reset_peak
    c._cuda_resetAccumulatedMemoryStats = lib.reset_accumulated
    c._cuda_emptyCache = empty_cache
    c._cuda_setMemoryFraction = lib.set_memory_fraction
    c._cuda_getAllocatorBackend = lambda: "native"
    torch.cuda.memory._host_allocator = None
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = exchange
    torch.cuda._cudart = types.SimpleNamespace(
        cudaError=types.SimpleNamespace(success=0),
        cudaGetErrorString=lambda code: str(code),
        cudaMemGetInfo=lambda device: (
            lib.memory_total() - lib.memory_reserved(device),
            lib.memory_total(),
        ),
    )
    torch.cuda.device_count = lib.device_count
    torch.cuda._CudaDeviceProperties = types.SimpleNamespace
    torch.version.cuda = "12.8"
    # A CUDA build brings Triton, and its absence is told on standard error.
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)


def _properties(lib, index: int) -> types.SimpleNamespace:
    physical = lib.visible()[index]
    digest = hashlib.md5(f"emulated GPU {physical}".encode()).digest()
    return types.SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=lib.memory_total(),
        multi_processor_count=132,
        uuid=uuid.UUID(bytes=digest),
    )
