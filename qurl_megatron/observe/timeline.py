"""Who was busy when: one line per span in ``timeline.jsonl``, drawn as lanes in the report.

    {"lane": "engines", "name": "rollout", "step": 3, "start": 1735689600.50, "end": 1735689604.25}

Times are unix seconds. A span whose end is its start is an event, such as an engine's death.
"""

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from qurl_megatron.kit.clock import now
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.growing import Growing

HALTED, FALL_BACK = "halted", "falling back to "
"""How events of the lane "guard" begin that a reader of the report must not miss."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that happened in one lane, from ``start`` to ``end``."""

    lane: str
    name: str
    step: int
    start: float  # unix seconds
    end: float


class Timeline:
    """Appends spans to a file, from any thread."""

    def __init__(self, path: Path | str, *, resume_step: int = 0) -> None:
        """Open ``path`` for appending.

        Args:
            resume_step: the first step that will be done again; its spans and later ones are
                dropped. 0 starts an empty file.
        """
        path = Path(path)
        kept = [span for span in read_timeline(path) if span.step < resume_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(map(_line, kept)))
        self._file = Growing(path)
        self._lock = threading.Lock()
        self.refused: OSError | None = None
        """Why the file has ended; who adds a span is in the middle of something else."""

    def add(self, span: Span) -> None:
        with self._lock:
            if self.refused is None:
                try:
                    self._file.write(_line(span).encode())
                except OSError as error:
                    self.refused = error

    @contextmanager
    def span(self, lane: str, name: str, step: int) -> Iterator[None]:
        """The block's time as a span, also where it raises."""
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


def read_timeline(path: Path | str) -> list[Span]:
    """The spans of a run in the order they ended; none where there is no file.

    Raises:
        ConfigError: a line, other than a cut last one, is not a span.
    """
    path = Path(path)
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    spans = []
    for number, line in enumerate(lines, 1):
        try:
            span = Span(**json.loads(line))
            start, end = float(span.start), float(span.end)  # raises where they are no numbers
            spans.append(Span(str(span.lane), str(span.name), int(span.step), start, end))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            if number < len(lines):
                raise ConfigError(f"{path}, line {number}: not a span ({error})") from None
    return spans


def overlap(spans: Iterable[Span]) -> float:
    """Share of the engines' generating time during which the trainer did something else."""
    spans = list(spans)
    busy = _union([s for s in spans if s.lane == "engines" and s.name == "rollout"])
    working = _union([s for s in spans if s.lane == "trainer" and s.name != "rollout"])
    both = sum(max(0.0, min(e1, e2) - max(s1, s2)) for s1, e1 in busy for s2, e2 in working)
    total = sum(end - start for start, end in busy)
    return both / total if total else 0.0


def _union(spans: Sequence[Span]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted((s.start, s.end) for s in spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _line(span: Span) -> str:
    return json.dumps(asdict(span)) + "\n"
