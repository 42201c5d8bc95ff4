"""Questions in files as people have them: JSONL or parquet, prompts as text or as chats.

Training and evaluation read them alike. Dotted paths such as ``reward_model.ground_truth`` say
where a row has its prompt and its answer; in our own columns, verl's layout and slime's they are
found. All other columns are kept as metadata.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qurl_megatron.config import DataConfig
from qurl_megatron.config.sections import ONE_FILE
from qurl_megatron.kit.errors import ConfigError, printable, reading
from qurl_megatron.observe.text import how_many

PROMPT_KEYS = ("prompt", "problem", "question", "messages")
ANSWER_KEYS = ("reward_model.ground_truth", "answer", "label")
"""Where prompts and answers usually are; the first that a row has is taken."""

EXACT_FLOATS = 2**53  # whole numbers up to here are exact as floats
_MISSING = object()

Turn = dict[str, Any]
"""A turn of a chat: ``role``, ``content``, and keys that the model's chat template may read."""


@dataclass(frozen=True, slots=True)
class Question:
    text: str  # of a chat: the content of each turn, after its role
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)
    turns: tuple[Turn, ...] = field(default=(), hash=False)  # of a chat
    place: str = field(default="", compare=False)  # the file and the line, for messages


@dataclass(frozen=True)
class Columns:
    """Dotted paths of prompt and answer, where they are set."""

    prompt: str = ""
    answer: str = ""
    needed: bool = True  # each row must have an answer; else a missing one is empty


@dataclass(frozen=True)
class DataFile:
    name: str  # in messages: its key and its path
    questions: list[Question]
    checksum: str  # changes with every byte
    prompt_key: str  # of the first row, as is the next
    answer_key: str  # empty: it has no answer, and needs none

    @property
    def summary(self) -> str:
        """How many prompts there are, and the keys they were found by, for a person."""
        first = self.questions[0]
        prompts = f"{how_many(len(self.questions), 'prompt')} in {self.prompt_key}"
        if first.turns:
            prompts += " (chats)"
        answers = "no answers"
        if self.answer_key:
            answers = f"answers in {self.answer_key}"
        if first.metadata:
            answers += f"; kept as metadata: {_names(first.metadata)}"
        return f"{self.name}: {prompts}, {answers}"


def read_file(path: Path, name: str, columns: Columns = Columns()) -> DataFile:
    """Read all rows of a JSONL or parquet file; JSON lines may end in .json, too.

    Args:
        name: the file's name in messages.

    Raises:
        ConfigError: it is missing, empty, unreadable or malformed; says which line.
    """
    if path.suffix not in READERS:
        raise ConfigError(f"{name} must end in {' or '.join(READERS)}{_way_out(path)}")
    if not path.is_file():
        looked = ""
        if not path.is_absolute():
            looked = f": a relative path begins at the working folder, so that is {path.absolute()}"
        raise ConfigError(f"{name} does not exist or is not a file{looked}{_way_out(path)}")
    checksum = checksum_of(path)
    questions: list[Question] = []
    keys = ("", "")
    for position, row in READERS[path.suffix](path, name):
        question, used_keys = _question(row, f"{name} {position}", columns)
        keys = keys if questions else used_keys
        questions.append(question)
    if not questions:
        raise ConfigError(f"{name} holds no prompts")
    return DataFile(name, questions, checksum, *keys)


def _way_out(path: Path) -> str:
    """Return advice for a path that names several files."""
    several = path.is_dir() or any(mark in str(path) for mark in ",*")
    return f"; {ONE_FILE}" if several else ""


def checksum_of(path: Path) -> str:
    """Return a file's checksum; raise ``ConfigError`` if the system cannot read it."""
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def changed_files(config: DataConfig, checksums: Mapping[str, str]) -> dict[str, str]:
    """Return the files that have changed, as "data.path=..."; missing ones aside.

    Args:
        checksums: earlier ones, by key.

    Returns:
        Their names in messages, by key.
    """
    now = {"data.path": config.path, "data.eval_path": config.eval_path}
    changed = {}
    for key, checksum in checksums.items():
        path = now[key]
        readable = os.path.isfile(path) and os.access(path, os.R_OK)
        if readable and checksum_of(Path(path)) != checksum:
            changed[key] = f"{key}={path}"
    return changed


def look_up(row: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a dotted path, in which numbers count items of lists from 0, as in
    prompt.0.content; a column may have the dots in its own name."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            return default
    return value


def as_text(value: Any, name: str, place: str) -> str:
    """Return text as it is, and numbers as text: many public files have numeric answers or ids."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT_FLOATS:
        value = int(value)  # tables make a column of whole numbers and gaps one of floats
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    return _checked(value, name, "text or a number", place)


def _jsonl_rows(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    with reading(path), path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if line.lstrip().startswith(b"["):
                raise ConfigError(
                    f"{name} line {number} begins an array, and each line must be an object by "
                    "itself; write one row a line (docs/data.md has the command)"
                )
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", error)  # its own line number is always 1
                raise ConfigError(
                    f"{name} line {number} is not valid JSON: {reason}; write each object on one "
                    "line"
                ) from None
            yield f"line {number}", row


def _parquet_rows(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            start = 0
            for batch in file.iter_batches():
                for row, values in enumerate(batch.to_pylist(), start=start):
                    yield f"row {row}", values
                start += len(batch)
    # ValueError and OverflowError: of values that Python cannot hold.
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} is not a readable parquet file: {error}") from None


READERS: dict[str, Callable[[Path, str], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl_rows,
    ".parquet": _parquet_rows,
    ".json": _jsonl_rows,  # as many are called that hold an object a line
}


def _question(row: Any, place: str, columns: Columns) -> tuple[Question, tuple[str, str]]:
    """Return the question of a row, and the keys of its prompt and its answer."""
    if not isinstance(row, dict):
        raise ConfigError(f"{place} must be an object with prompt and answer, got {row!r:.80}")
    prompt_key = _key(row, columns.prompt, PROMPT_KEYS, "data.prompt_key", place)
    answer_key, answer = "", ""
    if columns.needed or columns.answer or _present_keys(row, ANSWER_KEYS):
        answer_key = _key(row, columns.answer, ANSWER_KEYS, "data.answer_key", place)
        answer_value = look_up(row, answer_key)
        missing = answer_value is None or isinstance(answer_value, str) and not answer_value.strip()
        if columns.needed or not missing:
            answer = as_text(answer_value, "answer", place)
    prompt = look_up(row, prompt_key)
    if isinstance(prompt, list):
        turns = _chat(prompt, place)
        text = "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
    else:
        turns, text = (), _checked(prompt, "prompt", "text or a list of turns", place)
    try:
        (text + answer).encode()
    except UnicodeEncodeError:  # which JSON can write, but UTF-8 and tokenizers cannot
        raise ConfigError(
            f"{place}: the prompt or the answer has half a character (a surrogate without its "
            "pair); write the whole character or leave it out"
        ) from None
    metadata = {key: value for key, value in row.items() if key not in (prompt_key, answer_key)}
    inner = metadata.get("metadata")
    if inner is None or isinstance(inner, dict):  # slime's column of them
        metadata.pop("metadata", None)
        metadata = {**(inner or {}), **metadata}
    return Question(text, answer, metadata, turns, place), (prompt_key, answer_key)


def _key(row: dict, configured: str, usual: Sequence[str], setting: str, place: str) -> str:
    """Choose the path: the first that has a value, else the first that is there at all."""
    keys = (configured,) if configured else usual
    present_keys = _present_keys(row, keys)
    if not present_keys:
        other = ""
        if usual is ANSWER_KEYS:
            other = ", or have a reward function of your own do without"
        raise ConfigError(
            f"{place} has no {' or '.join(keys)}; it has {_names(row) or 'nothing'}: name the "
            f"right one in {setting}, which holds for all files{other}"
        )
    return next((key for key in present_keys if look_up(row, key) is not None), present_keys[0])


def _present_keys(row: dict, keys: Sequence[str]) -> list[str]:
    return [key for key in keys if look_up(row, key, _MISSING) is not _MISSING]


def _chat(turns: list, place: str) -> tuple[Turn, ...]:
    """Return the turns without null values: a table has the same keys in each."""
    for number, turn in enumerate(turns, start=1):
        role_and_content = isinstance(turn, dict) and (turn.get("role"), turn.get("content"))
        if not role_and_content or not all(isinstance(value, str) for value in role_and_content):
            raise ConfigError(
                f"{place}: turn {number} of the prompt must have role and content, both text, got "
                f"{turn!r:.80}"
            )
    if not any(turn["content"].strip() for turn in turns):
        raise ConfigError(f"{place}: the prompt is empty")
    if turns[-1]["role"] == "assistant":
        raise ConfigError(
            f"{place}: the last turn of the prompt is the assistant's, which leaves nothing to "
            "answer; leave that turn out"
        )
    return tuple({key: value for key, value in turn.items() if value is not None} for turn in turns)


def _checked(value: Any, name: str, kind: str, place: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(
            f"{place}: the {name} must be {kind}, got {value!r:.80} ({type(value).__name__})"
        )
    if not value.strip():
        raise ConfigError(f"{place}: the {name} is empty")
    return value


def _names(names: Iterable[str]) -> str:
    return printable(", ".join(names))
