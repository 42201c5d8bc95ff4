"""Checkpoints without copies: tensors go to and from the files one at a time, where they lie.

Each data-parallel rank owns a run of a distributed optimizer's flat buffer: of a parameter, some
elements in row-major order. A checkpoint holds masters and moments in the parameters' own shapes,
so that any layout can load them. For that Megatron gathers whole buffers, two or three times over
on the GPU and five to eight in host memory. But a run of elements *is* a few boxes of its tensor:
part of a row, whole rows, part of a row. With ``in_place`` each rank writes its own boxes and reads
them where they lie, under the keys of Megatron's format "fully_reshardable". Nothing is gathered or
copied.
"""

import math
import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor, nn

from qurl_megatron.actor.trained import optimizer_parts
from qurl_megatron.checkpoints.integrity import FileSum
from qurl_megatron.tensors.slice import Slice


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Slice]:
    """Cut elements [start, stop) of a row-major tensor into boxes, in the elements' order.

    >>> [(box.starts, box.sizes) for box in boxes((3, 4), 2, 9)]
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [Slice((start,), (stop - start,))]
    row = math.prod(shape[1:])
    slices: list[Slice] = []
    while start < stop:
        index, within = divmod(start, row)
        rows = (stop - start) // row
        if within == 0 and rows:
            slices.append(Slice.along(shape, 0, index, index + rows))
            start += rows * row
            continue
        end = min(row, within + stop - start)
        for box in boxes(shape[1:], within, end):
            slices.append(Slice((index, *box.starts), (1, *box.sizes)))
        start += end - within
    return slices


def in_place(optimizer: Any) -> None:
    """Have a Megatron optimizer's distributed parts read and write their state where it lies."""
    for part in optimizer_parts(optimizer):
        if hasattr(part, "sharded_param_state_fully_reshardable"):
            part.sharded_param_state_fully_reshardable = partial(_state_of, part)
            # The memory behind the boxes is filled by the time this is called.
            part.load_parameter_state_from_fully_reshardable = lambda _loaded: None


def _state_of(
    part: Any, model: dict[str, Any], is_loading: bool = False, metadata: Any = None
) -> dict[str, ShardedTensor]:
    """Return the state of one distributed optimizer; replaces its own method."""
    places = {
        place.data: place
        for place in nested_values(model)
        if isinstance(place, ShardedTensor | ShardedTensorFactory)
    }
    state: dict[str, ShardedTensor] = {}
    for parameter in part.model_param_gbuf_map:
        owned = part._get_model_param_range_map(parameter)["param"]
        tensors = part._get_main_param_and_optimizer_states(parameter)
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            flat = tensors[kind].detach().view(-1)
            for box in _owned(places[parameter], parameter, owned.start, owned.end, flat):
                box.key = f"optimizer.state.{kind}.{box.key}"
                state[f"{box.key}:{box.global_offset}"] = box
    return state


def _owned(
    place: ShardedTensor | ShardedTensorFactory,
    parameter: nn.Parameter,
    start: int,
    stop: int,
    flat: Tensor,
) -> Iterator[ShardedTensor]:
    """Yield elements [start, stop) of a parameter as boxes of its tensors, viewing ``flat``.

    Args:
        place: where the parameter lies in the model's checkpoint; a factory cuts it into several
            tensors, such as the halves of a gated MLP.
        flat: the elements' values.
    """
    for piece in place.build() if isinstance(place, ShardedTensorFactory) else [place]:
        assert piece.data.is_contiguous(), f"{piece.key} is cut across its rows"
        first = piece.data.storage_offset() - parameter.storage_offset()
        begin, end = max(start - first, 0), min(stop - first, piece.data.numel())
        for box in boxes(piece.local_shape or (1,), begin, end):
            count = box.elements
            offset = first + begin - start
            begin += count
            # Layers and experts are leading axes of the whole tensor that a parameter lacks.
            leading = piece.prepend_axis_num
            origin = piece.global_offset
            sizes = (*(1 for _ in range(leading)), *box.sizes)
            yield replace(
                piece,
                data=flat[offset : offset + count].view(sizes),
                dtype=flat.dtype,
                local_shape=sizes,
                global_offset=(
                    *origin[:leading],
                    *(a + b for a, b in zip(origin[leading:], box.starts, strict=True)),
                ),
                axis_fragmentations=None,  # boxes of any size
                prepend_axis_num=0,
                replica_id=(*piece.replica_id[:2], 0),  # data ranks have no copies of it
            )


class OneTensorAtATime(TorchDistSaveShardedStrategy):
    """Megatron's own writer, without copying all that a rank saves into host memory first."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sums: dict[str, FileSum] = {}  # of the files this rank has written, by name
        self.failure: Exception | None = None

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, **strategy: Any
    ) -> AsyncRequest:
        # Megatron would start a process that serves such a queue to writers in other processes.
        filesystem_async._results_queue = queue.Queue()
        # Megatron-Core 0.19 says which of its two ways it wants, its own; before there was one.
        request = super().async_save(sharded_state_dict, checkpoint_dir, **strategy)
        if request.async_fn is None:  # nothing to write on this rank
            return request
        transforms, *_ = request.async_fn.args
        return request._replace(
            async_fn=partial(self._write, transforms),
            async_fn_args=request.async_fn_args,
            preload_fn=None,
        )

    def _write(self, transforms: list, _rank: int, files: list, written: Any) -> None:
        """Write this rank's files, and put the results that Megatron expects into ``written``."""
        results: dict[int, Any] = {}  # lists, or exceptions
        for index, (path, name, (objects, tensors)) in enumerate(files):
            # Megatron writes in processes of its own, and talks to them over these two queues.
            outcome: queue.Queue[Any] = queue.Queue()
            busy: queue.Queue[int] = queue.Queue()
            busy.put(index)
            staged = ((item, tensor.cpu()) for item, tensor in tensors)
            summed = [_Summed(transform) for transform in transforms]  # none before torch 2.7
            FileSystemWriterAsync.write_preloaded_data(
                summed, index, (path, name, (objects, staged)), outcome, busy, use_fsync=True
            )
            _, results[index] = outcome.get()
            if isinstance(results[index], Exception):
                self.failure = results[index]
                return written.put(results[index])
            for transform in summed:
                self.sums[name] = transform.done(Path(path))
        written.put(results)


class _Summed:
    """Computes the checksum of a file that torch writes: items, one behind the other."""

    def __init__(self, transforms: Any) -> None:
        """Checksum each item after torch's own transforms."""
        self._transforms = transforms
        self._digest, self._bytes = xxhash.xxh3_128(), 0

    def transform_save_stream(self, item: Any, stream: Any) -> Any:
        self._stream = stream
        return self._transforms.transform_save_stream(item, self)

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._bytes += memoryview(data).nbytes
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()

    def done(self, path: Path) -> FileSum:
        assert self._bytes == path.stat().st_size, f"{path} was not written in one pass"
        return FileSum(self._bytes, self._digest.hexdigest())
