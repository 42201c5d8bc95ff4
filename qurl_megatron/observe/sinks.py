"""Where metrics go. The JSONL file is the truth; TensorBoard and W&B are views of it.

One object a line: ``{"step": 12, "time": 1735689600.5, "metrics": {"reward/mean": 0.41}}``.
JSON has no NaN or infinity, so these are the strings "NaN", "Infinity" and "-Infinity", which
``float()`` and JavaScript's ``Number()`` read back.
"""

import json
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qurl_megatron.errors import ConfigError
from qurl_megatron.observe.clock import now
from qurl_megatron.observe.growing import Growing


class Sink(Protocol):
    """Takes the metrics of one step; several calls for one step add to each other."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Record:
    """One line of metrics.jsonl. A value that was logged as null reads back as NaN."""

    step: int
    time: float  # unix seconds
    metrics: dict[str, float]


class JsonlSink:
    """Appends one line per call: a crash loses at most the line in flight."""

    def __init__(self, path: Path | str, resume_step: int | None = None) -> None:
        """Open ``path`` for appending.

        Args:
            path: the file; its folder is made if needed.
            resume_step: the first step that will be written again. Lines of this step and later
                come from updates that the checkpoint does not know, and are dropped; 0 starts an
                empty file. None keeps every line.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = math.inf if resume_step is None else resume_step
        self.last_step = _rewrite(path, kept) if path.exists() else None
        """Of the lines that were there already."""
        self._file = Growing(path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: _to_json(float(value)) for name, value in metrics.items()}
        record = {"step": step, "time": round(now(), 3), "metrics": numbers}
        self._file.write((json.dumps(record, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars for TensorBoard; steps from ``resume_step`` on replace those logged before.

    Written by this thread: TensorBoard's own writer has one that dies of a full disk.
    """

    def __init__(self, dir: Path | str, resume_step: int | None = None) -> None:
        # A second to import.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._proto, self._summary = event_pb2, summary_pb2
        folder = Path(dir)
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(now()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = Growing(folder / name)
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=resume_step, session_log=start)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        value = self._summary.Summary.Value
        values = [value(tag=name, simple_value=float(v)) for name, v in metrics.items()]
        self._write(step=step, summary=self._summary.Summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        event = self._proto.Event(wall_time=now(), **fields)
        self._records.write(event.SerializeToString())


class WandbSink:
    """Scalars for Weights & Biases, which is not among the requirements."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any], dir: Path | str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "logging to W&B needs the package wandb, which is not installed; "
                "run `pip install wandb` or turn W&B off"
            ) from error
        self._run = wandb.init(project=project, name=name, config=dict(config), dir=str(dir))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def read_metrics(path: Path | str) -> list[Record]:
    """Every record of a metrics file, in the order written; a torn last line is left out."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; it is written by `qurl train`")
    records = [record for _, record in _parsed_lines(path)]
    if not records:
        raise ConfigError(f"{path} holds no metrics; the run stopped before its first step ended")
    return records


def _parsed_lines(path: Path) -> list[tuple[str, Record]]:
    # Not splitlines(): it also splits at characters that may stand inside a JSON string.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    last = lines.pop()  # empty, or the line in flight when the run was killed
    if last.endswith("}}"):  # whole but for the newline; a torn one lacks its last brace
        lines.append(last)
    return [(line, _parse(line, path, number)) for number, line in enumerate(lines, 1)]


def _rewrite(path: Path, end_step: float) -> int | None:
    """Keep the whole lines before ``end_step``; the file is the old or the new one, never half.

    Returns:
        The largest step that is left.
    """
    aside, last = path.with_name(path.name + ".new"), None
    with aside.open("w", encoding="utf-8") as file:
        for line, record in _parsed_lines(path):
            if record.step < end_step:
                file.write(line + "\n")
                last = max(record.step, -1 if last is None else last)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    return last


# What a line raises that someone, or the disk, has edited.
_EDITED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def _parse(line: str, path: Path, line_number: int) -> Record:
    try:
        record = json.loads(line)
        metrics = {str(name): _from_json(value) for name, value in record["metrics"].items()}
        return Record(int(record["step"]), float(record["time"]), metrics)
    except _EDITED as error:
        raise ConfigError(
            f"{path}, line {line_number}, is not a metrics record "
            f'{{"step": .., "time": .., "metrics": {{..}}}}: {line[:80]!r}; mend or delete the line'
        ) from error


def _to_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _from_json(value: float | str | None) -> float:
    return math.nan if value is None else float(value)
