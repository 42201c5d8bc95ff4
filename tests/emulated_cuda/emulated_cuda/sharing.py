"""CUDA IPC by files in /dev/shm, and untyped storages on the device."""

import os

import torch


def install(lib) -> None:
    storage = torch.UntypedStorage

    def share(self):
        if self.device.type != "cuda":
            raise RuntimeError("_share_cuda_: only available on CUDA")
        path, size = lib.share(self)
        handle = f"{os.getpid()}:{path}".encode()
        return (self.device.index, handle, size, 0, b"counter", 0, b"event", False)

    def new_shared(index, handle, size, offset, *_):
        pid, _, path = bytes(handle).decode().partition(":")
        if int(pid) == os.getpid():
            raise RuntimeError(
                "CUDA error: invalid device context: an IPC handle opens in other processes alone"
                " (emulated)"
            )
        assert offset == 0
        return lib.open_shared(path, size, index).untyped_storage()

    storage._share_cuda_ = share
    storage._new_shared_cuda = staticmethod(new_shared)
    storage._release_ipc_counter_cuda = staticmethod(lambda *_, **__: None)

    plain_resize, plain_new = storage.resize_, storage.__new__

    def new(cls, *args, device=None, **rest):
        if device is None or torch.device(device).type != "cuda":
            return plain_new(cls, *args, **({} if device is None else {"device": device}), **rest)
        torch.cuda._lazy_init()
        size = args[0] if args and isinstance(args[0], int) else len(args[0]) if args else 0
        made = torch.empty(size, dtype=torch.uint8, device=device)
        if args and not isinstance(args[0], int):
            made.copy_(torch.tensor(args[0], dtype=torch.uint8))
        return made.untyped_storage()

    storage.__new__ = staticmethod(new)

    def resize(self, size):
        if self.device.type != "cuda":
            return plain_resize(self, size)
        lib.resize_storage(self, int(size))
        return self

    storage.resize_ = resize
