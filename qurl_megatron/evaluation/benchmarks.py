"""Benchmark files: problems with reference answers, one JSON object per line, or parquet.

    {"id": "2024-I-1", "prompt": "How many ...", "answer": "204", ...}

``problem`` and ``question`` are other names of ``prompt``; ``id`` may be missing, further keys are
left alone. The name of a benchmark is that of its file.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurl_megatron.data.questions import READERS, refuse_half_characters
from qurl_megatron.errors import ConfigError

PROMPT_KEYS = ("prompt", "problem", "question")
ANSWER_KEYS = ("answer",)
ID_KEYS = ("id",)


@dataclass(frozen=True, slots=True)
class Problem:
    id: str  # its own, else its number in the file, from 1
    place: str  # the file and the line, for messages
    text: str
    answer: str


@dataclass(frozen=True)
class Benchmark:
    name: str
    path: Path
    problems: tuple[Problem, ...]


def read_benchmarks(
    paths: Sequence[Path],
    *,
    prompt_key: str | None = None,
    answer_key: str | None = None,
    id_key: str | None = None,
) -> list[Benchmark]:
    """All files, checked.

    Args:
        prompt_key: where the text of a problem is; None takes the first of ``PROMPT_KEYS``.
        answer_key: where its reference answer is; None: ``answer``.
        id_key: where its id is; None: ``id``, where there is one.

    Raises:
        ConfigError: a file is missing, empty or malformed, or two have the same name.
    """
    found: dict[str, Benchmark] = {}
    for path in paths:
        if path.stem in found:
            raise ConfigError(
                f"{path} and {found[path.stem].path} are both named {path.stem}, and so would "
                "their results be; rename one"
            )
        found[path.stem] = _read(path, prompt_key, answer_key, id_key)
    return list(found.values())


def _read(
    path: Path, prompt_key: str | None, answer_key: str | None, id_key: str | None
) -> Benchmark:
    problems: list[Problem] = []
    places: dict[str, str] = {}
    for where, row in _rows(path):
        place = f"{path} {where}"
        if not isinstance(row, dict):
            raise ConfigError(f"{place} must be an object with prompt and answer, got {row!r:.80}")
        text = _text(_value(row, prompt_key, PROMPT_KEYS, place), "prompt", place)
        answer = _text(_value(row, answer_key, ANSWER_KEYS, place), "answer", place)
        name = str(len(problems) + 1)
        if id_key is not None or row.get("id") is not None:
            name = _text(_value(row, id_key, ID_KEYS, place), "id", place)
        if name in places:
            raise ConfigError(f"{place} has the id {name!r} of {places[name]}; ids must differ")
        places[name] = where
        problems.append(Problem(name, place, text, answer))
    if not problems:
        raise ConfigError(f"{path} holds no problems")
    return Benchmark(path.stem, path, tuple(problems))


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix not in READERS:
        raise ConfigError(f"{path} must end in {' or '.join(READERS)}")
    if not path.is_file():
        raise ConfigError(f"{path} does not exist or is not a file")
    # Training data has fixed columns; its reader of parquet leaves out all others.
    return _parquet_rows(path) if path.suffix == ".parquet" else READERS[path.suffix](path, "BENCH")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{path} is not a readable parquet file: {error}") from None
    yield from ((f"row {number}", row) for number, row in enumerate(rows))


def _value(row: dict, key: str | None, usual: Sequence[str], place: str) -> Any:
    keys = usual if key is None else (key,)
    for name in keys:
        if row.get(name) is not None:
            return row[name]
    raise ConfigError(
        f"{place} has no {' or '.join(map(repr, keys))}; it has {', '.join(row) or 'nothing'}"
    )


def _text(value: Any, what: str, place: str) -> str:
    """As it is, and numbers as text: many public files have answers that are."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and what != "prompt" and math.isfinite(value):
        return str(value)
    if not isinstance(value, str):
        raise ConfigError(
            f"{place}: the {what} must be a string, got {value!r:.80} ({type(value).__name__})"
        )
    if not value.strip():
        raise ConfigError(f"{place}: the {what} is empty")
    refuse_half_characters(value, f"{place}: the {what}")
    return value
