"""The NCCL backend of ``torch.distributed``, and gloo with CUDA tensors."""

import os
import types
from datetime import timedelta

import torch


def install(lib) -> None:
    from torch.distributed import constants
    from torch.distributed import distributed_c10d as c10d

    class _IsNccl(type):
        def __instancecheck__(cls, other) -> bool:
            return isinstance(other, torch._C._distributed_c10d.Backend) and (
                type(other) is torch._C._distributed_c10d.Backend and other.name() == "nccl"
            )

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = timedelta(minutes=10)
            self.global_ranks_in_group, self.group_name = [], ""
            self.split_from, self.split_color = None, None
            self.config = types.SimpleNamespace()
            self.backend = "nccl"

    class ProcessGroupNCCL(metaclass=_IsNccl):
        def __new__(cls, store, rank, size, options=None):
            options = options or Options()
            if isinstance(options, timedelta):
                options, given = Options(), options
                options._timeout = given
            # NCCL connects when first used; gloo here, and in its own time.
            gloo_options = torch._C._distributed_c10d.ProcessGroupGloo._Options()
            gloo_options._timeout = min(options._timeout, timedelta(days=1))
            gloo_options._devices = [
                c10d.ProcessGroupGloo.create_device(
                    hostname=os.environ.get("EMULATED_NCCL_HOST", "127.0.0.1")
                )
            ]
            inner = c10d.ProcessGroupGloo(
                torch._C._distributed_c10d.PrefixStore("emulated-nccl", store),
                rank,
                size,
                gloo_options,
            )
            return lib.make_nccl(inner, rank, size, options._timeout.total_seconds(), True)

    # A gloo group of a CUDA build takes CUDA tensors too; this one crashes over them.
    group = torch._C._distributed_c10d.ProcessGroup
    register = group._register_backend

    def register_backend(self, device, kind, backend=None):
        if device.type != "cuda" or kind != group.BackendType.GLOO or backend is None:
            return register(self, device, kind, backend)
        # Under a type of its own: of one type, a group keeps the first backend for all devices.
        both = lib.make_nccl(backend, self.rank(), self.size(), 1800.0, False)
        return register(self, device, group.BackendType.CUSTOM, both)

    group._register_backend = register_backend
    ProcessGroupNCCL.Options = Options
    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    torch.distributed.ProcessGroupNCCL = ProcessGroupNCCL
    torch._C._distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    torch._C._distributed_c10d._DEFAULT_PG_NCCL_TIMEOUT = timedelta(minutes=10)
    constants.default_pg_nccl_timeout = c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    torch.cuda.nccl.version = lambda: (2, 27, 5)
    torch.cuda.nccl.is_available = lambda *_: True
