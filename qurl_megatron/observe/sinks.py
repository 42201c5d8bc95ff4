"""Files of JSON lines that grow while a run goes on, metrics.jsonl among them, and its views:
TensorBoard and W&B, which shows examples of responses, too.

A crash leaves at most the last line torn. Readers pass over it, and a resumed run removes it
together with the lines of the steps that it does again.

A line of metrics: ``{"step": 12, "time": 1735689600.5, "metrics": {"reward/mean": 0.41}}``.
JSON has no NaN or infinity, so these are the strings "NaN", "Infinity" and "-Infinity", which
``float()`` and JavaScript's ``Number()`` read back.
"""

import contextlib
import json
import math
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from qurl_megatron.kit.clock import now
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError, printable

if TYPE_CHECKING:
    from qurl_megatron.observe.samples import Example

METRICS_FILE = "metrics.jsonl"  # in a run's folder


T = TypeVar("T", bound=Any)  # has a step

# Errors of parsing a line that a person, or the disk, has edited.
_EDITED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class Growing:
    """Appends to a file; each piece is there whole, or not at all where the disk is full."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, piece: bytes) -> None:
        """Append ``piece``; where that raises ``OSError``, the file is as it was before."""
        start = self._file.seek(0, os.SEEK_END)
        unwritten = memoryview(piece)
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError:
            self._file.truncate(start)
            raise

    def close(self) -> None:
        self._file.close()


class LineFile(Generic[T]):
    """A file of JSON lines, one or more for each step. A subclass defines the lines."""

    kind: str  # name of a line, for the error message
    of: type

    @classmethod
    def parse(cls, line: str) -> T:
        """Return the value of a line; raises ValueError or the like for a bad one."""
        # Not msgspec's own decoder: a model may leave half of a surrogate pair.
        return msgspec.convert(json.loads(line), cls.of)

    @staticmethod
    def evaluates(value: T) -> bool:
        """Return whether an evaluation, and nothing else, wrote the line."""
        return False

    def __init__(self, path: Path, *, resume_step: int = 0, evaluates: bool = False) -> None:
        """Open ``path`` for appending.

        Args:
            resume_step: the first step that will be written again. Lines of this step and later
                come from updates that the checkpoint does not know, and are dropped; 0 starts an
                empty file.
            evaluates: the step before that will be evaluated again, too.

        Raises:
            ConfigError: as ``read``; the file is untouched.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        self.last_step: int | None = None
        """The largest step among the lines that were kept."""
        for line, value in self._parsed(path):
            again = evaluates and value.step + 1 == resume_step and self.evaluates(value)
            if value.step < resume_step and not again:
                kept.append(line + "\n")
                self.last_step = max(self.last_step or 0, value.step)
        write_whole(path, "".join(kept), sync=True)  # the old file or the new one, never half
        self._file = Growing(path)

    def append(self, *values: T | Mapping[str, Any]) -> None:
        """Append a line for each value, all of them in one piece."""
        lines = [json.dumps(msgspec.to_builtins(value)) + "\n" for value in values]
        self._file.write("".join(lines).encode())

    def close(self) -> None:
        self._file.close()

    @classmethod
    def read(cls, path: Path) -> list[T]:
        """Return the values of a file's lines; none where there is no file.

        Raises:
            ConfigError: a line, other than a torn last one, is not of this kind.
        """
        return [value for _, value in cls._parsed(path)]

    @classmethod
    def _parsed(cls, path: Path) -> list[tuple[str, T]]:
        if not path.is_file():
            return []
        # Not splitlines(): it also splits at characters that may stand inside a JSON string.
        *lines, last = path.read_text(encoding="utf-8", errors="replace").split("\n")
        parsed = []
        for number, line in enumerate(lines, 1):
            try:
                parsed.append((line, cls.parse(line)))
            except _EDITED as error:
                raise ConfigError(
                    f"{path}, line {number}, is not {cls.kind}: {line[:80]!r}; fix or delete the "
                    "line"
                ) from error
        with contextlib.suppress(*_EDITED):  # empty, or torn when the run was killed
            parsed.append((last, cls.parse(last)))
        return parsed


@dataclass(frozen=True, slots=True)
class Record:
    """One line of metrics.jsonl."""

    step: int
    time: float  # unix seconds
    metrics: dict[str, float]


class JsonlSink(LineFile[Record]):
    """metrics.jsonl: a line per call; several calls for one step add to each other."""

    kind = 'a metrics record {"step": .., "time": .., "metrics": {..}}'

    @classmethod
    def parse(cls, line: str) -> Record:
        record = json.loads(line)
        metrics = {name: float(value) for name, value in record["metrics"].items()}
        return Record(int(record["step"]), float(record["time"]), metrics)

    @staticmethod
    def evaluates(value: Record) -> bool:
        return all(name.startswith("eval/") for name in value.metrics)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers: dict[str, float | str] = {}
        for name, value in metrics.items():
            numbers[name] = float(value)
            if not math.isfinite(value):
                numbers[name] = json.dumps(float(value))  # NaN, Infinity or -Infinity, as a string
        self.append({"step": step, "time": round(now(), 3), "metrics": numbers})


def read_metrics(path: Path | str) -> list[Record]:
    """Return every record of a metrics file, in the order written; a torn last line is left out.

    Args:
        path: the file, or the folder of the run that wrote it.

    Raises:
        ConfigError: there is no file, no record, or a line is damaged.
    """
    path = Path(path)
    if path.is_dir():
        path = path / METRICS_FILE
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; it is written by `qurl train`")
    records = JsonlSink.read(path)
    if not records:
        raise ConfigError(f"{path} holds no metrics; the run stopped before its first step ended")
    return records


class TensorBoardSink:
    """Scalars for TensorBoard; steps from ``resume_step`` on replace those logged before.

    Written by this thread: TensorBoard's own writer has one that dies of a full disk.
    """

    def __init__(self, dir: Path | str, resume_step: int = 0) -> None:
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


WANDB_ID = "wandb_id"  # file in a run's folder with the id of its W&B run


def wandb_package() -> Any:
    """Import the optional package of Weights & Biases; raise ``ConfigError`` if it is missing."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"observe.wandb_project needs the package wandb, which cannot be imported ({error}); "
            "run `pip install wandb`, or leave observe.wandb_project out"
        ) from error
    return wandb


class WandbSink:
    """Scalars and tables for Weights & Biases: one run there for each run folder."""

    def __init__(
        self, project: str, run_dir: Path, config: Mapping[str, Any], *, resume_step: int = 0
    ) -> None:
        """
        Args:
            config: the recipe, by section and key.
            resume_step: the first step that will be written again; 0 begins another run of W&B.

        Raises:
            ConfigError: the package is not installed, or W&B refuses.
        """
        self._wandb = wandb_package()
        id_file, run_id = run_dir / WANDB_ID, ""
        if resume_step and id_file.is_file():
            run_id = id_file.read_text(encoding="utf-8").strip()
        if not run_id:
            run_id = secrets.token_hex(4)
            write_whole(id_file, run_id + "\n")
        try:
            self._run = self._wandb.init(
                project=project,
                name=run_dir.resolve().name,
                id=run_id,
                resume="allow",
                config=dict(config),
                allow_val_change=True,  # some keys may change on resume
                dir=str(run_dir),
            )
        except self._wandb.Error as error:
            raise ConfigError(
                f"W&B did not begin the run ({' '.join(str(error).split())}); run `wandb login`, "
                "set WANDB_MODE=offline to log without the network, or leave "
                "observe.wandb_project out"
            ) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def show(self, step: int, examples: Sequence["Example"]) -> None:
        """Log a table for each kind of examples, lowest rewards first."""
        names = ["prompt", "response", "answer", "reward", "advantage", "tokens", "finish"]
        rows: dict[str, list[list[Any]]] = {}
        for example in sorted(examples, key=lambda example: example.reward):
            cells = [getattr(example, name) for name in names]
            shown = [printable(cell) if isinstance(cell, str) else cell for cell in cells]
            rows.setdefault(f"samples/{example.of}", []).append(shown)
        for tag, data in rows.items():
            self._run.log({tag: self._wandb.Table(columns=names, data=data)}, step=step)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the run, as failed where an exception ends the block."""
        self._run.finish(exit_code=int(kind is not None))
