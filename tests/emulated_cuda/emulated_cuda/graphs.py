"""CUDA graphs: a capture records operators and refuses to wait, a replay calls them again.

As on a GPU, what is captured has not run: memory from outside is put back as it was, and results
are full of ones (NaN) until the first replay, which reads and writes the same addresses. Memory
that a capture takes is kept as long as its graph; on a GPU the pool hands some of it out twice.
"""

import weakref
from itertools import count

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

ERROR = 2  # of set_sync_debug_mode
_capturing: list["CUDAGraph"] = []
_handles = count(1)
_members: dict[tuple, weakref.WeakSet] = {}  # of pools that have had any


def install(lib) -> None:
    CUDAGraph.lib = lib
    waits = torch._C._cuda_synchronize

    def synchronize() -> None:
        _refuse_while_capturing("torch.cuda.synchronize")
        waits()

    c = torch._C
    c._cuda_synchronize = synchronize
    c._cuda_isCurrentStreamCapturing = lambda: bool(_capturing)
    c._host_emptyCache = lambda: None
    torch.cuda.is_current_stream_capturing = lambda: bool(_capturing)
    graphs = torch.cuda.graphs
    graphs.is_current_stream_capturing = torch.cuda.is_current_stream_capturing
    torch.cuda.CUDAGraph = graphs.CUDAGraph = CUDAGraph
    torch.cuda.graph_pool_handle = graphs.graph_pool_handle = lambda: (0, next(_handles))


class CUDAGraph:
    """What torch's own does; in its ``graph``, it is captured."""

    lib = None

    def __init__(self, keep_graph: bool = False) -> None:
        self._recorder: _Recorder | None = None
        self._pool: tuple = ()

    def capture_begin(self, pool=None, capture_error_mode="global", check_input_liveness=False):
        _refuse_while_capturing("a second capture")
        if torch.cuda.current_stream() == torch.cuda.default_stream():
            raise RuntimeError("CUDA graphs must be captured on a non-default stream (emulated)")
        self._pool = (0, next(_handles)) if pool is None else pool
        if self._pool in _members and not len(_members[self._pool]):
            raise RuntimeError(f"all graphs of memory pool {self._pool} are gone (emulated)")
        self._recorder = _Recorder()
        self._mode_before = self.lib.sync_debug_mode()
        self.lib.set_sync_debug_mode(ERROR)
        self._recorder.__enter__()
        _capturing.append(self)

    def capture_end(self) -> None:
        _capturing.remove(self)
        self._recorder.__exit__(None, None, None)
        self.lib.set_sync_debug_mode(self._mode_before)
        self._recorder.undo()
        # What the operators touched here counts as done: a GPU has not run them.
        self.lib.device_synchronize(self.lib.current_device())
        _members.setdefault(self._pool, weakref.WeakSet()).add(self)

    def replay(self) -> None:
        if self._recorder is None:
            raise RuntimeError("this graph has not been captured (emulated)")
        self._recorder.replay()

    def reset(self) -> None:
        self._recorder = None

    def pool(self) -> tuple:
        return self._pool


class _Recorder(TorchDispatchMode):
    """Operators on device memory, in order, with the memory they were called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []
        self.own: dict[int, torch.Tensor] = {}  # by address: storages made since the beginning
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # others, and what they held

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = _on_device((args, kwargs))
        for tensor in _written(function, args, kwargs):
            self._remember(tensor)
        result = function(*args, **kwargs)
        made = _on_device(result)
        if given or made:
            for tensor in made:
                if _address(tensor) not in {_address(one) for one in given}:
                    self.own[_address(tensor)] = tensor
            self.calls.append((function, args, kwargs, made))
        return result

    def _remember(self, tensor: torch.Tensor) -> None:
        address = _address(tensor)
        if tensor.is_cuda and address not in self.own and address not in self.before:
            held = _bytes(tensor)
            self.before[address] = held, held.clone()

    def undo(self) -> None:
        with torch.inference_mode():
            for held, old in self.before.values():
                held.copy_(old)
            for tensor in self.own.values():
                _bytes(tensor).fill_(255)
        self.before.clear()

    def replay(self) -> None:
        with torch.inference_mode():
            for function, args, kwargs, kept in self.calls:
                for old, new in zip(kept, _on_device(function(*args, **kwargs)), strict=True):
                    if _address(old) != _address(new):
                        old.copy_(new)


def _refuse_while_capturing(what: str) -> None:
    if _capturing:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what} (emulated)")


def _written(function, args, kwargs) -> list[torch.Tensor]:
    names = function._schema.arguments
    found = []
    for argument, value in [
        *zip(names, args, strict=False),
        *((argument, kwargs[argument.name]) for argument in names if argument.name in kwargs),
    ]:
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _on_device(value)
    return found


def _on_device(values) -> list[torch.Tensor]:
    return [x for x in tree_flatten(values)[0] if isinstance(x, torch.Tensor) and x.is_cuda]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All of its storage."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())
