"""Who was busy when: one line per span in ``timeline.jsonl``.

    {"lane": "engines", "name": "rollout", "step": 3, "start": 1735689600.50, "end": 1735689604.25}

Times are Unix seconds. A span whose end is its start is an event, such as an engine's death.
``qurl report`` exports the file as ``trace.json``, which ui.perfetto.dev and chrome://tracing open.
"""

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from qurl_megatron.kit.clock import now
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.observe.lines import Growing, keep_lines, read_lines

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


class Timeline:
    """Appends spans to a file, from any thread."""

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        """Open ``path`` for appending.

        Args:
            resume_step: the first step that will be done again; its spans and later ones are
                dropped. 0 starts an empty file.
        """
        keep_lines(path, _parse, "a span", lambda span: span.step < resume_step)
        self._file = Growing(path)
        self._lock = threading.Lock()
        self.refused: OSError | None = None
        """Why the file has ended. ``add`` does not raise: its callers are busy with other work."""

    def add(self, span: Span) -> None:
        line = json.dumps(msgspec.structs.asdict(span)) + "\n"
        with self._lock:
            if self.refused is None:
                try:
                    self._file.write(line.encode())
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

    def close(self) -> None:
        self._file.close()


def read_timeline(path: Path) -> list[Span]:
    """Return the spans of a run in the order they ended; none where there is no file.

    Raises:
        ConfigError: a line, other than a torn last one, is not a span.
    """
    return read_lines(path, _parse, "a span")


def overlap(spans: Iterable[Span]) -> float:
    """Return the share of the engines' generating time in which the trainer did other work."""
    generating, working = [], []
    for span in spans:
        if span.lane == "engines" and span.name == "rollout":
            generating.append(span)
        elif span.lane == "trainer" and span.name != "rollout":
            working.append(span)
    busy = _union(generating)
    total = sum(end - start for start, end in busy)
    if not total:
        return 0.0
    both = 0.0
    for work_start, work_end in _union(working):
        for start, end in busy:
            both += max(0.0, min(end, work_end) - max(start, work_start))
    return both / total


def write_trace(spans: Sequence[Span], path: Path) -> None:
    """Write spans in the Trace Event format: a process for each lane, times in microseconds.

    Spans are asynchronous events, since batches in flight overlap within the engines' lane.
    """
    lanes = list(dict.fromkeys(span.lane for span in spans))
    events: list[dict[str, Any]] = []
    for lane_id, lane in enumerate(lanes):
        events.append({"ph": "M", "name": "process_name", "pid": lane_id, "args": {"name": lane}})
    for number, span in enumerate(spans):
        event = {
            "name": span.name,
            "cat": span.lane,
            "pid": lanes.index(span.lane),
            "tid": 0,
            "args": {"step": span.step},
        }
        start, end = round(1e6 * span.start), round(1e6 * span.end)
        if end > start:
            events.append({**event, "ph": "b", "id": number, "ts": start})
            events.append({**event, "ph": "e", "id": number, "ts": end})
        else:
            events.append({**event, "ph": "i", "s": "p", "ts": start})
    write_whole(path, json.dumps({"traceEvents": events}) + "\n")


def _union(spans: Sequence[Span]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _parse(line: str) -> Span:
    return msgspec.convert(json.loads(line), Span)
