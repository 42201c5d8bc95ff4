"""Decode steps of static shape, from token to token, which a GPU replays as CUDA graphs.

A decode step is a thousand short kernels, and at small batches launching them one by one takes
longer than they do. A graph launches all of them in one call, but repeats exactly what was
captured: the same kernels at the same addresses. So a static step reads whatever changes (the rows
that are there, their tokens, lengths, seeds and stop ids, keys and values, the weights) where it
always lies, decides nothing on the host, and has shapes by two numbers alone: rows, and positions
that attention reads. Both are rounded up, so that few steps differ in them.

The rows beyond the running ones are idle: they decode token 0 at position 0 of their own row of the
cache, which nobody owns, and its next owner overwrites it. Positions beyond a row's own are
masked, as in every step. What a sequence draws is what the ordinary step draws for it.

Steps with top_p or top_k (meant for evaluation) are left to the ordinary step: they sort.

Shapes: B rows of a step, running and idle ones.
"""

from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor

from qurl_megatron.engines.embedded.batch_rows import Drawn, Rows
from qurl_megatron.engines.embedded.cache import Cache
from qurl_megatron.engines.embedded.decoder import Decoder
from qurl_megatron.engines.embedded.sampling import sample

ROWS = 8
"""Rows are 1, 2, 4 or, from here on, as in ``rounded_up``. An idle row costs what a running one
does in attention; products of so few rows take as long as those of one."""

POSITIONS = 256
"""Positions are as in ``rounded_up``. Fewer at a time would be read in vain less often, but each
number of them costs a capture, which takes as long as some ten steps."""

MOST_GRAPHS = 256  # then all are dropped: each keeps its list of kernels in the GPU's memory


def rounded_up(number: int, step: int) -> int:
    """To a multiple of ``step``; of numbers above 8 steps, by an eighth at most."""
    step = max(step, 1 << (number - 1).bit_length() >> 4)
    return -(-number // step) * step


def rows_for(count: int) -> int:
    return 1 << (count - 1).bit_length() if count < ROWS else rounded_up(count, ROWS)


class StaticSteps:
    """The static steps of a decoder, a cache and a batch, whose memory never moves."""

    @torch.inference_mode()
    def __init__(self, decoder: Decoder, cache: Cache, batch: Rows) -> None:
        self._decoder, self._cache, self._batch = decoder, cache, batch
        device, most = decoder.device, len(batch.row)
        self._graphs = Graphs(device) if device.type == "cuda" else None
        self._weights = _addresses(decoder)
        self._running = torch.zeros((), dtype=torch.int64, device=device)
        # Results lie outside the graphs' own memory, which the next replay may overwrite.
        kinds = (torch.int64, torch.float32, torch.bool, torch.bool, torch.bool)
        self._drawn = Drawn(*(torch.zeros(most, dtype=kind, device=device) for kind in kinds))
        self._summary = torch.zeros(2, dtype=torch.int64, device=device)
        self.rows_changed()

    @property
    def name(self) -> str:
        return "static, without graphs" if self._graphs is None else "CUDA graphs"

    @property
    def captures(self) -> int:
        """Graphs captured since the start."""
        return 0 if self._graphs is None else self._graphs.captures

    def rows_changed(self) -> None:
        """Sequences have come, gone or changed places."""
        self._longest: int | None = None  # tokens of the longest row
        self._filtered = False

    def look_at_weights(self) -> None:
        """Forget the graphs if weights have moved: they would keep reading the old ones."""
        if self._weights != (now := _addresses(self._decoder)):
            self._weights = now
            if self._graphs is not None:
                self._graphs.drop()

    def serves(self, count: int) -> bool:
        """Whether the next token of rows 0..count-1 can come from a static step."""
        if self._longest is None:
            self._longest = int(self._batch.length[:count].max())
            self._filtered = self._batch.filtered(slice(count))
        return not self._filtered

    def __call__(self, count: int) -> tuple[Drawn, bool]:
        """Decode one token for rows 0..count-1, for which ``serves`` was asked.

        Returns:
            What was drawn, valid until the next step, and whether any sequence ends with it. The
            host waits for the GPU once, to learn that.
        """
        cache = self._cache
        rows = min(rows_for(count), cache.rows)
        assert self._longest is not None
        positions = min(rounded_up(self._longest, POSITIONS), cache.length)
        cache.reach(count, 0, positions)
        self._running.fill_(count)
        step = partial(self._compute, rows, positions)
        if self._graphs is None:
            step()
        else:
            layout = cache.length, self._batch.stop_ids.shape[1]
            self._graphs.run((layout, rows, positions), step)
        any_ended, self._longest = self._summary.tolist()
        return Drawn(*(column[:count] for column in _columns(self._drawn))), bool(any_ended)

    def _compute(self, rows: int, positions: int) -> None:
        """The step itself. Nothing here may wait for the GPU, or depend on what it holds."""
        batch, cache, decoder, these = self._batch, self._cache, self._decoder, slice(rows)
        row_B = batch.row[these]
        idle_B = row_B >= self._running
        length_B = batch.length[these].masked_fill(idle_B, 1)
        position_B = length_B - 1
        ids_B = cache.tokens[row_B, position_B].masked_fill(idle_B, 0)
        attend = cache.attend_decode(position_B, positions)
        logits_BV = decoder.logits(decoder.forward(ids_B, position_B, attend))
        # As if some row sampled: a greedy one takes its best token all the same.
        state = batch.state(these, any_sampled=True, any_filtered=False)
        token_B, log_prob_B = sample(logits_BV, state)
        cache.tokens[row_B, length_B] = token_B
        cache.log_probs[row_B, length_B] = log_prob_B
        batch.length[these] += ~idle_B
        drawn = batch.drawn(these, token_B, log_prob_B)
        drawn.ended_B.masked_fill_(idle_B, False)
        for kept, column_B in zip(_columns(self._drawn), _columns(drawn), strict=True):
            kept[these] = column_B
        self._summary[0] = drawn.ended_B.any()
        self._summary[1] = batch.length[these].masked_fill(idle_B, 0).max()


class Graphs:
    """CUDA graphs by key: a key's work is launched as it is the first time, captured the second.

    The first time stands for the warm-up that PyTorch asks for before a capture, on the stream that
    will capture: libraries make their handles and workspaces then. All share one pool of memory,
    since only one runs at a time and none reads there what another left.
    """

    def __init__(self, device: torch.device) -> None:
        self.captures = 0
        self._stream = torch.cuda.Stream(device)
        self.drop()

    def drop(self) -> None:
        """Forget all; also their pool, which cannot be used again once its last graph is gone."""
        self._replays: dict[Hashable, Callable[[], None] | None] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """
        Args:
            key: of all that decides what ``work`` launches and at which addresses.
        """
        if key not in self._replays:
            if len(self._replays) == MOST_GRAPHS:
                self.drop()
            self._launch(work)
            self._replays[key] = None
            return
        replay = self._replays[key]
        if replay is None:
            replay = self._replays[key] = self._capture(work)
        replay()

    def _launch(self, work: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def _capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads of a server may use CUDA meanwhile: they are not in the graph.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        self.captures += 1
        return graph.replay


def _columns(drawn: Drawn) -> tuple[Tensor, ...]:
    return tuple(vars(drawn).values())


def _addresses(decoder: Decoder) -> list[int]:
    """Of all weights that a step reads."""
    return [tensor.data_ptr() for tensor in decoder.tensors()]
