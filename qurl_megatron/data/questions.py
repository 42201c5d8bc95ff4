"""Questions with exact answers, from a file or from a procedural task.

Nobody can train on what the evaluation asks: a task's questions are told apart by a hash of their
text, so held-out and training ones are disjoint whatever sizes and seeds are asked for.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from qurl_megatron.config import DataConfig
from qurl_megatron.errors import ConfigError

TRAIN_SEED, HELD_OUT_SEED = 1, 1_000_000_001  # far apart: item i of a task is drawn with seed + i
_HALVES = re.compile("[\ud800-\udfff]")
HELD_OUT_SHARE = 8  # one text in eight is held out


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answer: str


def training_questions(config: DataConfig) -> list[Question]:
    """All of them, in the order of the file or the task.

    Raises:
        ConfigError: a missing, empty or malformed file; an unknown task, or wrong arguments for it.
    """
    if config.path:
        return read_file(Path(config.path), "data.path")
    return _task_questions(config, config.task_size, held_out=False)


def held_out_questions(config: DataConfig, count: int) -> list[Question]:
    """The first ``count`` held-out questions; all there are where a file has fewer.

    Raises:
        ConfigError: as for training; no data.eval_path beside data.path; a task too small.
    """
    if config.path:
        if not config.eval_path:
            raise ConfigError(
                "held-out prompts are asked for, but data.eval_path is missing beside data.path; "
                "set it or train.eval_prompts=0"
            )
        return read_file(Path(config.eval_path), "data.eval_path")[:count]
    return _task_questions(config, count, held_out=True)


# -- files -----------------------------------------------------------------------------------


def read_file(path: Path, key: str) -> list[Question]:
    """Questions of a JSONL or parquet file; ``key`` names it in messages."""
    if path.suffix not in READERS:
        raise ConfigError(f"{key}={path} must end in {' or '.join(READERS)}")
    if not path.is_file():
        raise ConfigError(f"{key}={path} does not exist or is not a file")
    rows = READERS[path.suffix](path, key)
    questions = [_question(row, f"{key}={path} {place}") for place, row in rows]
    if not questions:
        raise ConfigError(f"{key}={path} holds no prompts")
    return questions


def _jsonl_rows(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", json.loads(line.decode("utf-8-sig"))
            # Malformed JSON and malformed UTF-8 alike, and brackets without end.
            except (ValueError, RecursionError) as error:
                place = f"{key}={path} line {number}"
                raise ConfigError(f"{place} is not valid JSON: {error}") from None


def _parquet_rows(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in ("prompt", "answer") if name in file.schema_arrow.names]
            _check_columns(columns, file.schema_arrow.names, f"{key}={path}")
            start = 0
            for batch in file.iter_batches(columns=columns):
                for row, values in enumerate(batch.to_pylist(), start=start):
                    yield f"row {row}", values
                start += len(batch)
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{key}={path} is not a readable parquet file: {error}") from None


READERS: dict[str, Callable[[Path, str], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl_rows,
    ".parquet": _parquet_rows,
}


def _question(row: Any, place: str) -> Question:
    if not isinstance(row, dict):
        raise ConfigError(f"{place} must be an object with prompt and answer, got {row!r:.80}")
    _check_columns(row, list(row), place)
    for column in ("prompt", "answer"):
        value = row[column]
        if not isinstance(value, str):
            raise ConfigError(
                f"{place}: {column} must be a string, got {value!r:.80} ({type(value).__name__})"
            )
        if not value.strip():
            raise ConfigError(f"{place}: {column} is empty")
        refuse_half_characters(value, f"{place}: {column}")
    return Question(row["prompt"], row["answer"])


def refuse_half_characters(text: str, place: str) -> None:
    """Raise ``ConfigError`` where a text has what JSON can write, but no UTF-8 and no tokenizer."""
    if half := _HALVES.search(text):
        raise ConfigError(
            f"{place} has half a character (\\u{ord(half[0]):x}, a surrogate without its pair); "
            "write the whole character or leave it out"
        )


def _check_columns(present: Any, names: list[str], place: str) -> None:
    for column in ("prompt", "answer"):
        if column not in present:
            raise ConfigError(
                f"{place} has no column {column!r}; it has {', '.join(names) or 'none'}"
            )


# -- procedural tasks ------------------------------------------------------------------------


def _task_questions(config: DataConfig, count: int, *, held_out: bool) -> list[Question]:
    """Training questions follow the task's own distribution; held-out ones are distinct."""
    # A task may have few questions: draw on, but not for ever, until enough fall on the right side.
    draws = (8 if held_out else 2) * HELD_OUT_SHARE * count + 1000
    task = _Task(config, seed=HELD_OUT_SEED if held_out else TRAIN_SEED, size=draws)
    found: list[Question] = []
    seen: set[str] = set()
    for i in range(draws):
        if len(found) == count:
            return found
        question = task.question(i)
        if _is_held_out(question.text) == held_out and not (held_out and question.text in seen):
            seen.add(question.text)
            found.append(question)
    kind = "distinct held-out" if held_out else "training"
    raise ConfigError(
        f"data.task={config.task} with data.task_args={config.task_args} gave {len(found)} {kind} "
        f"questions in {draws} draws, {count} are asked for; widen its arguments or ask for fewer"
    )


def _is_held_out(text: str) -> bool:
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


class _Task:
    """A reasoning-gym task whose arguments have been checked."""

    def __init__(self, config: DataConfig, *, seed: int, size: int) -> None:
        from reasoning_gym.factory import DATASETS, create_dataset  # 2 s to import

        import qurl_megatron.data.sort_digits  # noqa: F401 - it registers itself

        self.name = config.task
        if config.task not in DATASETS:
            close = get_close_matches(config.task, DATASETS, n=3)
            hint = (
                f"did you mean {' or '.join(close)}?" if close else "known: " + ", ".join(DATASETS)
            )
            raise ConfigError(f"data.task={config.task} is not a reasoning-gym task; {hint}")
        known = {f.name for f in dataclasses.fields(DATASETS[config.task][1])} - {"seed", "size"}
        for name in config.task_args:
            if name not in known:
                raise ConfigError(
                    f"data.task_args: {config.task} takes no {name}; "
                    f"it takes {', '.join(sorted(known))}"
                )
        try:
            self.items = create_dataset(config.task, seed=seed, size=size, **config.task_args)
            self.items[0]
        except Exception as error:  # tasks check their arguments by asserts, or stumble over them
            raise ConfigError(
                f"data.task_args={config.task_args} does not suit data.task={config.task}: {error}"
            ) from None

    def question(self, index: int) -> Question:
        item = self.items[index]
        if not isinstance(item["answer"], str):
            raise ConfigError(
                f"data.task={self.name} has no single written answer (got {item['answer']!r:.80}); "
                "only tasks with exact answers can be scored"
            )
        return Question(item["question"], item["answer"])
