"""Who was busy when: one line per span in ``timeline.jsonl``.

    {"lane": "engines", "name": "rollout", "step": 3, "start": 1735689600.50, "end": 1735689604.25}

Times are Unix seconds. A span whose end is its start is an event, such as an engine's death.
``qurl report`` exports the file as ``trace.json``, which ui.perfetto.dev and chrome://tracing open.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from qurl_megatron.kit.clock import now
from qurl_megatron.observe.sinks import LineFile

HALTED = "halted"
"""How events of the lane "guard" begin that a reader of the report must not miss."""

TIMELINE_FILE, TRACE_FILE = "timeline.jsonl", "trace.json"


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that happened in one lane, from ``start`` to ``end``, in Unix seconds."""

    lane: str
    name: str
    step: int
    start: float
    end: float


class Timeline(LineFile[Span]):
    """timeline.jsonl, written from any thread."""

    kind, of = "a span", Span

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        super().__init__(path, resume_step=resume_step)
        self._lock = threading.Lock()
        self.refused: OSError | None = None
        """Why the file has ended. ``add`` does not raise: its callers are busy with other work."""

    def add(self, span: Span) -> None:
        with self._lock:
            if self.refused is None:
                try:
                    self.append(span)
                except OSError as error:
                    self.refused = error

    @contextmanager
    def span(self, lane: str, name: str, step: int) -> Iterator[None]:
        """Record the time of the block, also where it raises."""
        start = now()
        try:
            yield
        finally:
            self.add(Span(lane, name, step, start, now()))

    def event(self, lane: str, name: str, step: int, at: float | None = None) -> None:
        at = now() if at is None else at
        self.add(Span(lane, name, step, at, at))


def overlap(spans: Iterable[Span]) -> float:
    """Return the share of the engines' generating time in which the trainer did other work."""
    edges = []
    for span in spans:
        if (span.lane, span.name == "rollout") in (("engines", True), ("trainer", False)):
            edges += [(span.start, span.lane, 1), (span.end, span.lane, -1)]
    running = {"engines": 0, "trainer": 0}
    before = generating = both = 0.0
    for time, lane, change in sorted(edges):
        if running["engines"]:
            generating += time - before
            if running["trainer"]:
                both += time - before
        running[lane] += change
        before = time
    return both / max(generating, 1e-9)
