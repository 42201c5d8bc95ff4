"""One request followed token by token, from the engine's thread to an event loop.

The engine leaves each token in lists that only it appends to, and wakes the loop once for whatever
has come since the loop last looked, in whichever request. It never waits: a reader that is slow
finds several tokens in its next piece.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass

from qurl_megatron.engines.embedded.engine import Sequence
from qurl_megatron.engines.embedded.text_codec import GrowingText, TextCodec


@dataclass(frozen=True)
class Style:
    """What a client wants to read of a sequence."""

    log_probs: bool = False
    token_texts: bool = False  # the text of every single token, beside its log-prob
    skip_special: bool = True  # leave special tokens out of the text
    trim_stop: bool = True  # leave the token that ended the response out of the text


@dataclass(frozen=True)
class StreamProgress:
    """A sequence as far as it has come, and how much of that its reader knew before."""

    sequence: Sequence
    ids: list[int]
    log_probs: list[list] | None  # [log-prob, id, text or None] per token, where they are wanted
    version: str | None
    finish_reason: dict | None
    text: str
    known_tokens: int = 0
    known_text: int = 0


class Reader:
    """Sees one sequence grow."""

    def __init__(self, sequence: Sequence, style: Style, codec: TextCodec | None) -> None:
        self._sequence, self._style, self._codec = sequence, style, codec
        self._growing = (
            None if codec is None else GrowingText(codec, skip_special=style.skip_special)
        )
        self._triples: list[list] = []
        self._known_tokens = self._known_text = 0

    def whole(self) -> StreamProgress:
        """The sequence, which has ended."""
        sequence, text = self._sequence, ""
        if self._codec is not None:
            ids = self._spelled(sequence.output_ids, sequence.finish_reason)
            text = self._codec.decode(ids, skip_special=self._style.skip_special)
        return self._progress(sequence.output_ids, sequence.log_probs, sequence.finish_reason, text)

    def advance(self, tap: "Tap") -> StreamProgress:
        """The sequence as it is now, ended or not."""
        sequence = self._sequence
        finish = sequence.finish_reason  # set after the results, so they are read after it
        ids, log_probs = sequence.output_ids, sequence.log_probs
        if finish is None:
            ids, log_probs = tap.ids[: tap.ready], tap.log_probs
        text = ""
        if self._growing is not None:
            text = self._growing.grow(self._spelled(ids, finish), last=finish is not None)
        return self._progress(ids, log_probs, finish, text, tap.version)

    def _progress(
        self,
        ids: list[int],
        log_probs: list[float],
        finish: dict | None,
        text: str,
        version: str | None = None,
    ) -> StreamProgress:
        if self._style.log_probs:
            new = slice(len(self._triples), len(ids))
            pairs = zip(log_probs[new], ids[new], strict=True)
            self._triples += [[value, token, self._token_text(token)] for value, token in pairs]
        if finish is not None:
            versions = self._sequence.versions
            version = versions[-1][0] if versions else None
        known_tokens, known_text = self._known_tokens, self._known_text
        self._known_tokens, self._known_text = len(ids), len(text)
        triples = self._triples if self._style.log_probs else None
        return StreamProgress(
            self._sequence, ids, triples, version, finish, text, known_tokens, known_text
        )

    def _token_text(self, token: int) -> str | None:
        if self._codec is None or not self._style.token_texts:
            return None
        return self._codec.decode([token], skip_special=False)

    def _spelled(self, ids: list[int], finish: dict | None) -> list[int]:
        """Those that the text is made of."""
        stopped = finish is not None and finish["type"] == "stop"
        return ids[:-1] if stopped and self._style.trim_stop else ids


class Tap:
    """What the engine leaves of one sequence, and how much of it is to be reported."""

    def __init__(self, index: int, interval: int, stream: "Stream") -> None:
        self.index = index
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.version: str | None = None
        self.ready = 0
        self._interval, self._stream = interval, stream

    def token(self, token: int, log_prob: float, version: str) -> None:
        self.ids.append(token)
        self.log_probs.append(log_prob)
        # As SGLang: the first token at once, then whenever there are enough.
        if self.ready == 0 or len(self.ids) - self.ready >= self._interval:
            self.version, self.ready = version, len(self.ids)
            self._stream.tell(self.index)

    def ended(self) -> None:
        self._stream.tell(self.index)


class Bell:
    """Wakes the readers of one event loop, all that a step of the engine has news for at once.

    Waking a loop from another thread is a system call, several times as dear as an event's text.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung: deque[asyncio.Event] = deque()
        self._ringing = False

    def ring(self, reader: asyncio.Event) -> None:
        """Called by the engine's thread."""
        self._rung.append(reader)
        if not self._ringing:
            self._ringing = True
            # A closed loop means that the server has left, and nobody reads any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._ringing = False  # before looking: what comes from here on rings again
        while self._rung:
            self._rung.popleft().set()


class Stream:
    """The sequences of one request, followed by an event loop."""

    def __init__(
        self,
        sequences: list[Sequence],
        styles: list[Style],
        codec: TextCodec | None,
        interval: int,
        bell: Bell,
    ) -> None:
        """
        Args:
            styles: one per sequence.
            interval: tokens per piece; the first comes alone, the last with what is left.
            bell: of the event loop.
        """
        self._bell = bell
        self._wake = asyncio.Event()
        self._fresh: deque[int] = deque()
        self._taps = [Tap(index, interval, self) for index in range(len(sequences))]
        pairs = zip(sequences, styles, strict=True)
        self._readers = [Reader(sequence, style, codec) for sequence, style in pairs]
        for sequence, tap in zip(sequences, self._taps, strict=True):
            sequence.listener = tap

    def tell(self, index: int) -> None:
        """Called by the engine: there is something new about sequence ``index``."""
        self._fresh.append(index)
        self._bell.ring(self._wake)

    async def pieces(self, finished: Future) -> AsyncIterator[tuple[int, StreamProgress]]:
        """Index and progress of a sequence, whenever there is some, until all have ended.

        Args:
            finished: of the engine; what it raises is raised here.
        """
        finished.add_done_callback(lambda _: self._bell.ring(self._wake))
        left = set(range(len(self._readers)))
        while left:
            await self._wake.wait()
            self._wake.clear()  # before looking: what comes from here on wakes again
            fresh = dict.fromkeys(self._fresh.popleft() for _ in range(len(self._fresh)))
            for index in fresh:
                if index in left:  # its last token and its end may have come separately
                    progress = self._readers[index].advance(self._taps[index])
                    if progress.finish_reason is not None:
                        left.remove(index)
                    yield index, progress
            if left and finished.done() and not self._fresh:
                finished.result()
