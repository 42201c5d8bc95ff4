"""The attempts of a run: what each began with, how it ended, and the steps that it did.

``qurl slurm`` writes them into ``RUN_DIR/slurm/attempts/N``:

    began.json    when it began, and on how many GPUs
    attempt.json  at its end
    steps.json    its steps, kept when the next attempt begins: a run that is resumed does the steps
                  behind its checkpoint again, and drops the first ones from metrics.jsonl

An attempt whose supervisor was killed has no attempt.json; it ended when its last file was written.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.sinks import Record, read_metrics

BEGAN, ENDED, STEPS = "began.json", "attempt.json", "steps.json"

T = TypeVar("T")


@dataclass(frozen=True)
class Attempt:
    """attempt.json: one job, or one start of a job that was requeued."""

    number: int
    job: int
    restarts: int  # of this job, by Slurm's count
    step_before: int  # of the newest checkpoint when it began
    step_after: int
    signal: str  # why its ranks were told to end, such as USR1 or preempted; "": they were not
    code: int  # exit code of the training step
    decision: str
    began_at: float = 0.0  # Unix seconds, by the supervisor's node
    ended_at: float = 0.0
    gpus: int = 0  # that the job held, of all nodes


@dataclass(frozen=True)
class Began:
    """began.json."""

    began_at: float  # Unix seconds
    gpus: int
    step_before: int  # of the newest checkpoint


@dataclass(frozen=True)
class Step:
    """A step that was done."""

    step: int
    ended_at: float  # Unix seconds, by the leading rank's node
    seconds: float  # time/step: without saving and evaluating


@dataclass(frozen=True)
class Tried:
    """One attempt as its files show it."""

    number: int
    began: Began
    ended: Attempt | None  # None: it runs, or its supervisor was killed
    steps: Sequence[Step]
    last_sign: float  # when a file of it was last written, Unix seconds


def tried(run_dir: Path) -> list[Tried]:
    """All attempts that have said when they began, oldest first.

    Raises:
        ConfigError: a record is damaged.
    """
    folders = {int(path.parent.name): path.parent for path in _attempts(run_dir).glob(f"*/{BEGAN}")}
    newest = max(folders, default=0)
    return [
        Tried(
            number,
            read_began(path),
            read_attempt(path / ENDED) if (path / ENDED).exists() else None,
            _kept_steps(path) if number < newest else steps_since(run_dir, path),
            max(file.stat().st_mtime for file in path.iterdir()),
        )
        for number, path in sorted(folders.items())
    ]


def steps_since(run_dir: Path, attempt: Path) -> list[Step]:
    """The steps in metrics.jsonl that the newest attempt has done."""
    began = read_began(attempt).began_at
    return [step for step in steps_of(run_metrics(run_dir)) if step.ended_at > began]


def steps_of(records: Sequence[Record]) -> list[Step]:
    """Those that were timed; an evaluation before the first step is none."""
    return [
        Step(record.step, record.time, record.metrics["time/step"])
        for record in records
        if "time/step" in record.metrics
    ]


def run_metrics(run_dir: Path) -> list[Record]:
    """Of metrics.jsonl; none where no step has ended yet.

    Raises:
        ConfigError: it is damaged.
    """
    path = run_dir / "metrics.jsonl"
    # A file that has only been begun holds no line, which is no mistake here.
    has_lines = path.is_file() and b"\n" in path.read_bytes()
    return read_metrics(path) if has_lines else []


def read_began(attempt: Path) -> Began:
    return read_record(attempt / BEGAN, lambda value: Began(**value))


def read_attempt(path: Path) -> Attempt:
    field_names = {field.name for field in fields(Attempt)}
    return read_record(
        path, lambda value: Attempt(**{name: value[name] for name in field_names & value.keys()})
    )


def read_record(path: Path, parse: Callable[[Any], T]) -> T:
    """
    Raises:
        ConfigError: the file is missing or damaged.
    """
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; `qurl slurm submit` makes it, and RUN_DIR is train.run_dir"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged ({error!s:.200}); submit the run again with `qurl slurm submit`"
        ) from None


def _kept_steps(attempt: Path) -> list[Step]:
    path = attempt / STEPS
    if not path.exists():
        return []
    return read_record(path, lambda value: [Step(*row) for row in value])


def _attempts(run_dir: Path) -> Path:
    return run_dir / "slurm/attempts"
