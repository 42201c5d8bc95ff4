"""Benchmark files: problems with reference answers, one JSON object per line, or parquet.

    {"id": "2024-I-1", "prompt": "How many ...", "answer": "204", ...}

They are read as training data is (``data.rows``); besides, a problem may have an ``id``. The name
of a benchmark is that of its file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.data.rows import Columns, DataFile, Question, as_text, look_up, read_file
from qurl_megatron.kit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    id: str  # its own, else its number in the file, from 1
    question: Question


@dataclass(frozen=True)
class ProblemSet:
    name: str
    path: Path
    problems: tuple[Problem, ...]
    summary: str = ""  # what was found where, for a person


def read_benchmarks(
    paths: Sequence[Path],
    *,
    prompt_key: str = "",
    answer_key: str = "",
    id_key: str = "",
    answers: bool = True,
) -> list[ProblemSet]:
    """All files, checked.

    Args:
        prompt_key, answer_key: where a row has them, dotted paths; empty: where they usually are.
        id_key: where it has its id; empty: ``id``, where there is one.
        answers: every row must have one; else those without have an empty one.

    Raises:
        ConfigError: a file is missing, empty or malformed, or two have the same name.
    """
    columns = Columns(prompt_key, answer_key, ("--prompt-key", "--answer-key"), needed=answers)
    problem_sets: dict[str, ProblemSet] = {}
    for path in paths:
        if path.stem in problem_sets:
            raise ConfigError(
                f"{path} and {problem_sets[path.stem].path} are both named {path.stem}, and so "
                "would their results be; rename one"
            )
        file = read_file(path, str(path), columns)
        problem_sets[path.stem] = ProblemSet(path.stem, path, _problems(file, id_key), file.summary)
    return list(problem_sets.values())


def _problems(file: DataFile, id_key: str) -> tuple[Problem, ...]:
    questions: dict[str, Question] = {}
    for number, question in enumerate(file.questions, start=1):
        row_id = look_up(question.metadata, id_key or "id")
        if row_id is None and id_key:
            raise ConfigError(f"{question.place} has no {id_key}, which --id-key names")
        name = str(number) if row_id is None else as_text(row_id, "id", question.place)
        if name in questions:
            raise ConfigError(
                f"{question.place} has the id {name!r} of {questions[name].place}; ids must differ"
            )
        questions[name] = question
    return tuple(Problem(name, question) for name, question in questions.items())
