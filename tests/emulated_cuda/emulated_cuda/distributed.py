"""The NCCL backend of ``torch.distributed``, and counts of its use."""

import collections
import functools
import inspect
from datetime import timedelta

import torch

NCCL_VERSION = (2, 27, 5)
OBJECT_COLLECTIVES = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)


_objects: collections.Counter[str] = collections.Counter()


def communicators() -> list[str]:
    """All that this process ever made, in order: "0" is of all ranks, "1:3" of a pair."""
    from emulated_cuda import native

    return [key for _, key, _, _ in native().communicators()]


def object_collectives() -> collections.Counter[str]:
    """How often each function pickled Python objects onto NCCL: a host wait on every rank."""
    return _objects.copy()


def install(lib) -> None:
    from torch.distributed import distributed_c10d as c10d

    _offer_nccl(lib, c10d)
    for name in OBJECT_COLLECTIVES:
        _count(c10d, name)


def _offer_nccl(lib, c10d) -> None:
    from torch.distributed import constants

    lib.ProcessGroupNCCL.__module__ = c10d.__name__
    for module in (c10d, torch.distributed, torch._C._distributed_c10d):
        module.ProcessGroupNCCL = lib.ProcessGroupNCCL
    if "ProcessGroupNCCL" not in c10d.__all__:
        c10d.__all__.append("ProcessGroupNCCL")
    c10d._NCCL_AVAILABLE = True
    timeout = timedelta(minutes=10)
    torch._C._distributed_c10d._DEFAULT_PG_NCCL_TIMEOUT = timeout
    constants.default_pg_nccl_timeout = c10d.default_pg_nccl_timeout = timeout
    torch.cuda.nccl.version = lambda: NCCL_VERSION
    torch.cuda.nccl.is_available = lambda *_: True


def _count(c10d, name: str) -> None:
    plain = getattr(c10d, name)
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def counted(*args, **named):
        given = signature.bind(*args, **named).arguments
        if _goes_by_nccl(c10d, given.get("group"), given.get("device")):
            _objects[name] += 1
        return plain(*args, **named)

    for module in (c10d, torch.distributed):
        setattr(module, name, counted)


def _goes_by_nccl(c10d, group, device) -> bool:
    """Torch pickles into tensors on the group's own device: the CPU where it has one for it."""
    if not c10d.is_initialized() or c10d._rank_not_in_group(group):
        return False
    return torch.device(device or c10d._get_object_coll_device(group)).type == "cuda"
