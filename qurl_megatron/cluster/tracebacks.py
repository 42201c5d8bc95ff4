"""Tracebacks as logs have them: Python's, and the last words of the interpreter and of C++.

A log may have many, with lines of other threads before them and a time at the head of a line, as
SGLang writes them. Chained exceptions are one traceback, whose last line says what was raised.
"""

import contextlib
import re
from dataclasses import dataclass
from datetime import datetime

from qurl_megatron.observe.samples import SAID

HEAD = re.compile(r"Traceback \(most recent call last\):")
LAST_WORDS = re.compile(r"Fatal Python error: |terminate called after throwing an instance of ")
CHAINED = re.compile(r"(The above exception was the direct cause|During handling of the above) ")
TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
RAISED = re.compile(r"[A-Za-z_][\w.]*(: |$)")
LEAVING = ("KeyboardInterrupt", "SystemExit", "CancelledError")
"""What a process raises that was asked to leave."""


@dataclass(frozen=True)
class LoggedTraceback:
    """One traceback of a log."""

    said: str  # its last line, such as "RuntimeError: CUDA out of memory"
    text: str
    time: float | None  # Unix seconds; None where the log does not tell


def tracebacks(log: str) -> list[LoggedTraceback]:
    """In the order of the log, without those of processes that were asked to leave."""
    lines, logged, at = log.splitlines(), [], 0
    while at < len(lines):
        end = None
        if HEAD.search(lines[at]) and not SAID.match(lines[at]):  # else a model wrote it
            end, last_line = _whole(lines, at)
        elif LAST_WORDS.match(lines[at]):
            end = _indented(lines, at)
            last_line = " ".join(line.strip() for line in lines[at:end][:2])
        if end is None:
            at += 1
            continue
        if not last_line.rpartition(".")[2].startswith(LEAVING):
            logged.append(LoggedTraceback(last_line, "\n".join(lines[at:end]), _time(lines[at])))
        at = end
    return logged


def _whole(lines: list[str], at: int) -> tuple[int, str]:
    """Where the traceback that begins at a line ends, exceptions behind it included, and what it
    says last."""
    last = _indented(lines, at)
    last_line = (
        lines[last].strip() if last < len(lines) and RAISED.match(lines[last]) else "cut off"
    )
    end = min(last + 1, len(lines))
    further = next((i for i in range(end, min(end + 4, len(lines))) if lines[i].strip()), None)
    if further is not None and CHAINED.match(lines[further]):
        for i in range(further + 1, min(further + 3, len(lines))):
            if HEAD.search(lines[i]):
                return _whole(lines, i)
    return end, last_line


def _indented(lines: list[str], at: int) -> int:
    """The first line behind ``at`` that is not part of it."""
    at += 1
    while at < len(lines) and lines[at][:1] in (" ", "\t"):
        at += 1
    return at


def _time(line: str) -> float | None:
    match = TIME.search(line)
    with contextlib.suppress(ValueError, OverflowError):  # it looks like a time, and is none
        return datetime.fromisoformat(match[0]).timestamp() if match else None
    return None
