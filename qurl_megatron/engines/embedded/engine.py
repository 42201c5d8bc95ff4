"""Continuous batching: sequences join and leave the batch between decode steps.

``step()`` either prefills waiting sequences or decodes one token for every running one. The engine
is synchronous and single-threaded; ``endpoints`` gives it a thread of its own.

The schedule depends on the order of arrival alone: first come, first served, and a waiting sequence
that fits joins before the next decode step. Only prefills of retracted sequences alternate with
decode steps, so that sequences that are back do not stand still until all are.

One HTTP request is one command; sent to an idle engine it gives the same bits every time. Requests
that arrive while others run are batched differently from run to run. Floating-point sums
(attention, norms, the head; not the INT8 products) may then differ in the last bits, and a sampled
token can amplify that.

Shapes: B running sequences, P prompts of one prefill.
"""

import functools
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.engines.embedded import native
from qurl_megatron.engines.embedded.cache import Cache
from qurl_megatron.engines.embedded.decoder import Decoder
from qurl_megatron.engines.embedded.sampling import GREEDY, SamplingState, sample
from qurl_megatron.kit.errors import ConfigError

MAX_ROWS = 512
PREFILL_TOKENS = 16384  # padded prompt tokens of one prefill step, so that activations stay small
RECOMPUTE_TOKENS = 512
"""The same for sequences that continue after an update: those of one step wait for each other and
are padded to the longest. Far fewer tokens at a time would take longer in all."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One response in the making. Results are filled in when it ends."""

    rid: str
    prompt: list[int]
    max_new_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_ids: frozenset[int] = frozenset()
    ended: Future = field(default_factory=Future)  # resolves to itself

    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)  # name, first token beyond it
    finish_reason: dict | None = None
    # [all tokens but the last, prompt included; layers; experts of a token], 1 or 2 bytes each
    experts: bytes = b""

    @property
    def total(self) -> int:
        return len(self.prompt) + self.max_new_tokens


class Rows:
    """State of the running sequences in columns of numbers, with the rows of the cache."""

    @torch.inference_mode()
    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, dtype=dtype, device=device)

        self._vocab = vocab
        self.row = torch.arange(rows, device=device)
        self.length = column(torch.int64)  # prompt and generated tokens
        self.start = column(torch.int64)  # prompt tokens
        self.limit = column(torch.int64)
        self.seed = column(torch.int64)
        self.temperature = column(torch.float32)
        self.greedy = column(torch.bool)
        self.top_p = column(torch.float32)
        self.top_k = column(torch.int64)
        self.stop_ids = torch.full((rows, 1), -1, device=device)

    def join(self, first_row: int, joining: list[Sequence]) -> None:
        width = max(len(sequence.stop_ids) for sequence in joining)
        if width > self.stop_ids.shape[1]:
            wider = self.stop_ids.new_full((len(self.row), width), -1)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        width = self.stop_ids.shape[1]
        columns: dict[str, list] = defaultdict(list)
        for sequence in joining:
            greedy = sequence.temperature < GREEDY
            columns["length"].append(_prefix_length(sequence))
            columns["start"].append(len(sequence.prompt))
            columns["limit"].append(sequence.total)
            columns["seed"].append(sequence.seed)
            columns["temperature"].append(1.0 if greedy else sequence.temperature)
            columns["greedy"].append(greedy)
            columns["top_p"].append(sequence.top_p)
            columns["top_k"].append(sequence.top_k if sequence.top_k > 0 else self._vocab)
            padding = [-1] * (width - len(sequence.stop_ids))
            columns["stop_ids"].append([*sorted(sequence.stop_ids), *padding])
        rows = slice(first_row, first_row + len(joining))
        for name, values in columns.items():
            column = getattr(self, name)
            column[rows] = torch.tensor(values, dtype=column.dtype, device=column.device)

    def move(self, source: int, target: int) -> None:
        for name, column in vars(self).items():
            if isinstance(column, Tensor) and name != "row":
                column[target] = column[source]

    def produced(self, row: int) -> int:
        return int(self.length[row] - self.start[row])

    def sampling(self, rows: slice) -> SamplingState:
        narrowed_B = (self.top_p[rows] < 1) | (self.top_k[rows] < self._vocab)
        return SamplingState(
            temperature_B=self.temperature[rows],
            greedy_B=self.greedy[rows],
            seed_B=self.seed[rows],
            position_B=self.length[rows] - self.start[rows],
            top_p_B=self.top_p[rows],
            top_k_B=self.top_k[rows],
            any_sampled=not bool(self.greedy[rows].all()),
            any_filtered=bool(narrowed_B.any()),
        )


class Engine:
    """A decoder, its cache, the queue and the batch. Not thread-safe."""

    def __init__(self, decoder: Decoder, cache_gb: float = 2.0, max_rows: int = MAX_ROWS) -> None:
        self.decoder = decoder
        self.cache = Cache(decoder.arch, decoder.dtype, decoder.device, cache_gb, max_rows)
        if self.cache.capacity == 0:
            raise ConfigError(f"a cache of {cache_gb} GiB holds not even one block of tokens")
        self.version = "default"
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.paused = False
        self.generated = 0
        self._recomputed = False  # by the latest step
        self._batch = Rows(max_rows, decoder.arch.vocab, decoder.device)

    @property
    def decode_step(self) -> str:
        """Return "native", or why torch computes the decode steps."""
        return native.refusal(self.decoder) or "native"

    def add(self, sequences: list[Sequence]) -> None:
        self.waiting.extend(sequences)

    @property
    def busy(self) -> bool:
        """Whether there is something to generate."""
        return not self.paused and bool(self.running or self.waiting)

    @torch.inference_mode()
    def step(self) -> None:
        """Prefill waiting sequences that fit, or else decode one token for every running one."""
        joining: list[Sequence] = []
        if not (self._recomputed and self.running):
            joining = self._admit()
        self._recomputed = any(s.output_ids for s in joining)
        if joining:
            self._prefill(joining)
        elif self.running:
            self._decode()

    def abort(self, matches: Callable[[Sequence], bool], message: str) -> None:
        """End matching sequences now, with the tokens they have."""
        chosen = [s for s in self.waiting if matches(s)]
        self.waiting = deque(s for s in self.waiting if not matches(s))
        for row in reversed(range(len(self.running))):
            if matches(self.running[row]):
                chosen.append(self._remove(row))
        for sequence in chosen:
            self._end(sequence, {"type": "abort", "message": message})

    def pause(self, *, retract: bool) -> None:
        """Stop; running sequences go back to the queue (``retract``), or wait where they are."""
        self.paused = True
        if retract:
            self.retract()

    def resume(self) -> None:
        self.paused = False

    def retract(self) -> None:
        """Send the running sequences back to the head of the queue, to be prefilled again.

        The shortest come first: they need the least work, and sorted by length hardly any padding.
        With a decode step after each prefill, they go on long before the longest are prefilled.
        """
        retracted = [self._remove(row) for row in reversed(range(len(self.running)))]
        self.waiting.extendleft(sorted(retracted, key=_prefix_length, reverse=True))

    def rename(self, version: str) -> None:
        """Name the weights from now on; earlier tokens keep the name that they have."""
        for row, sequence in enumerate(self.running):
            _stamp(sequence, self.version, self._batch.produced(row))
        for sequence in self.waiting:
            _stamp(sequence, self.version, len(sequence.output_ids))
        self.version = version

    def _admit(self) -> list[Sequence]:
        """Take waiting sequences, in order, while they fit into the cache and one prefill."""
        if not self.running and self.waiting:
            # Cutting an empty cache is free: do it once, for the longest that waits.
            self.cache.cut(max(s.total for s in self.waiting), live_rows=0)
        joining: list[Sequence] = []
        longest, prompts, previous = 0, 0, None
        while self.waiting:
            sequence = self.waiting[0]
            rows = len(self.running) + len(joining) + 1
            length = max(self.cache.length, sequence.total)
            longest = max(longest, _prefix_length(sequence))
            prompts += not _shares_prefill(previous, sequence)
            limit = RECOMPUTE_TOKENS if sequence.output_ids else PREFILL_TOKENS
            if rows > self.cache.rows_at(length) or (joining and longest * prompts > limit):
                break
            if length > self.cache.length:
                self.cache.cut(length, live_rows=len(self.running))
            joining.append(self.waiting.popleft())
            previous = sequence
        return joining

    def _prefill(self, joining: list[Sequence]) -> None:
        first_row, cache, device = len(self.running), self.cache, self.decoder.device
        self.running += joining
        self._batch.join(first_row, joining)
        # Neighbours with the same prompt share its prefill; ``owner`` is each row's prompt.
        owner, prefixes, prompt_rows = [], [], []
        for offset, sequence in enumerate(joining):
            if offset == 0 or not _shares_prefill(joining[offset - 1], sequence):
                prefixes.append(sequence.prompt + sequence.output_ids)
                prompt_rows.append(first_row + offset)
            owner.append(len(prefixes) - 1)
        length = max(map(len, prefixes))
        cache.reach(first_row, len(joining), length)
        ids_PL = torch.tensor([p + [0] * (length - len(p)) for p in prefixes], device=device)
        rows_P = torch.tensor(prompt_rows, device=device)
        position_T = torch.arange(length, device=device).repeat(len(prefixes))
        experts: list[Tensor] = []
        hidden_TH = self.decoder.forward(
            ids_PL.view(-1), position_T, cache.attend_prefill(rows_P, length), experts
        )
        if experts:
            of_layers = torch.cat(experts, dim=1).view(*ids_PL.shape, -1)
            cache.experts[rows_P, :, :length] = of_layers.transpose(1, 2).to(cache.experts.dtype)
        last_P = torch.tensor([len(p) - 1 for p in prefixes], device=device)
        last_P += torch.arange(len(prefixes), device=device) * length
        cache.tokens[rows_P, :length] = ids_PL
        for row, sequence in enumerate(joining, start=first_row):
            if sequence.output_ids:  # it was retracted, and has log-probs already
                span = slice(len(sequence.prompt), len(sequence.prompt) + len(sequence.output_ids))
                cache.log_probs[row, span] = torch.tensor(sequence.log_probs, device=device)
        owner_B = torch.tensor(owner, device=device)
        target_B = torch.arange(first_row, first_row + len(joining), device=device)
        copied_B = rows_P[owner_B] != target_B
        if copied_B.any():
            cache.spread(rows_P[owner_B][copied_B], target_B[copied_B], length)
        logits_BV = self.decoder.logits(hidden_TH[last_P])[owner_B]
        self._extend(logits_BV, first_row)

    def _decode(self) -> None:
        batch, cache, count = self._batch, self.cache, len(self.running)
        position_B = batch.length[:count] - 1
        ids_B = cache.tokens[batch.row[:count], position_B]
        longest = int(position_B.max()) + 1
        cache.reach(count, 0, longest)
        if self._step is not None:
            hidden_BH = self._step(self.decoder.embedding[ids_B], position_B)
        else:
            attend = cache.attend_decode(position_B, longest)
            experts: list[Tensor] = []
            hidden_BH = self.decoder.forward(ids_B, position_B, attend, experts)
            if experts:
                of_layers = torch.cat(experts, dim=1).to(cache.experts.dtype)
                cache.experts[batch.row[:count], :, position_B] = of_layers
        self._extend(self.decoder.logits(hidden_BH), 0)

    @functools.cached_property
    def _step(self) -> native.NativeStep | None:
        """Made at the first step, when there are weights."""
        return None if native.refusal(self.decoder) else native.NativeStep(self.decoder, self.cache)

    def _extend(self, logits_BV: Tensor, first_row: int) -> None:
        """Sample a token for each row from ``first_row`` on; end the sequences it completes."""
        batch, rows = self._batch, slice(first_row, len(self.running))
        token_B, log_prob_B = sample(logits_BV, batch.sampling(rows))
        self.cache.tokens[batch.row[rows], batch.length[rows]] = token_B
        self.cache.log_probs[batch.row[rows], batch.length[rows]] = log_prob_B
        batch.length[rows] += 1
        self.generated += len(token_B)
        stopped_B = (token_B[:, None] == batch.stop_ids[rows]).any(dim=1)
        broken_B = ~log_prob_B.isfinite()
        ended_B = stopped_B | broken_B | (batch.length[rows] >= batch.limit[rows])
        if not ended_B.any():
            return
        for offset in reversed(ended_B.nonzero()[:, 0].tolist()):
            row = first_row + offset
            if broken_B[offset]:
                batch.length[row] -= 1  # a token drawn from nan means nothing
            sequence = self._remove(row)
            reason: dict[str, Any]
            if broken_B[offset]:
                reason = {"type": "abort", "message": "The model's logits are not finite."}
            elif stopped_B[offset]:
                reason = {"type": "stop", "matched": sequence.output_ids[-1]}
            else:
                reason = {"type": "length", "length": len(sequence.output_ids)}
            self._end(sequence, reason)

    @torch.inference_mode()
    def _remove(self, row: int) -> Sequence:
        """Take a sequence out, with its output; the last row moves into its place."""
        sequence = self.running[row]
        written = slice(len(sequence.prompt), int(self._batch.length[row]))
        sequence.output_ids = self.cache.tokens[row, written].tolist()
        sequence.log_probs = self.cache.log_probs[row, written].tolist()
        computed = self.cache.experts[row, :, : max(0, written.stop - 1)]
        sequence.experts = computed.t().contiguous().cpu().numpy().tobytes()
        last = len(self.running) - 1
        if row != last:
            length = int(self._batch.length[last])
            self.cache.spread(torch.tensor([last]), torch.tensor([row]), length)
            self._batch.move(last, row)
            self.running[row] = self.running[last]
        self.running.pop()
        return sequence

    def _end(self, sequence: Sequence, reason: dict) -> None:
        _stamp(sequence, self.version, len(sequence.output_ids))
        sequence.finish_reason = reason
        if not sequence.ended.done():  # nobody waits for it any more
            sequence.ended.set_result(sequence)


def _prefix_length(sequence: Sequence) -> int:
    return len(sequence.prompt) + len(sequence.output_ids)


def _shares_prefill(previous: Sequence | None, sequence: Sequence) -> bool:
    return (
        previous is not None
        and not previous.output_ids
        and not sequence.output_ids
        and previous.prompt == sequence.prompt
    )


def _stamp(sequence: Sequence, version: str, end: int) -> None:
    """Record ``version`` for the tokens before ``end`` that have none yet."""
    if end > (sequence.versions[-1][1] if sequence.versions else 0):
        sequence.versions.append((version, end))
