"""Benchmark files, and the prompts that are made of them.

    {"id": "2024-I-1", "prompt": "How many ...", "answer": "204", ...}

One JSON object per line, or parquet; read as training data is (``data.rows``), but a problem may
also have an ``id``. A benchmark is named after its file.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qurl_megatron.data.rows import Columns, DataFile, Question, as_text, read_file
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.shipped import shipped
from qurl_megatron.types import Prompt


@dataclass(frozen=True, slots=True)
class Problem:
    id: str  # its own, else its number in the file, from 1
    question: Question


@dataclass(frozen=True)
class ProblemSet:
    name: str
    path: Path
    problems: tuple[Problem, ...]
    summary: str = ""  # columns and counts, for a person
    prompts: tuple[Prompt, ...] = ()  # of one model's tokenizer

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.input_ids) for prompt in self.prompts)


def read_benchmarks(
    paths: Sequence[Path],
    *,
    prompt_key: str = "",
    answer_key: str = "",
    answers: bool = True,
) -> list[ProblemSet]:
    """Read and check all files.

    Args:
        prompt_key, answer_key: dotted paths in a row; empty: the usual names.
        answers: every row must have an answer; otherwise a missing one is empty.

    Raises:
        ConfigError: a file is missing, empty or malformed, or two have the same name.
    """
    columns = Columns(prompt_key, answer_key, ("--prompt-key", "--answer-key"), needed=answers)
    problem_sets: dict[str, ProblemSet] = {}
    for path in paths:
        path = shipped(path, "launch/benchmarks")
        if path.stem in problem_sets:
            raise ConfigError(
                f"{path} and {problem_sets[path.stem].path} are both named {path.stem}, and so "
                "would their results be; rename one"
            )
        file = read_file(path, str(path), columns)
        problem_sets[path.stem] = ProblemSet(path.stem, path, _problems(file), file.summary)
    return list(problem_sets.values())


def _problems(file: DataFile) -> tuple[Problem, ...]:
    questions: dict[str, Question] = {}
    for number, question in enumerate(file.questions, start=1):
        row_id = question.metadata.get("id")
        name = str(number) if row_id is None else as_text(row_id, "id", question.place)
        if name in questions:
            raise ConfigError(
                f"{question.place} has the id {name!r} of {questions[name].place}; ids must differ"
            )
        questions[name] = question
    return tuple(Problem(name, question) for name, question in questions.items())


def with_prompts(
    benchmark: ProblemSet, tokenizer: Tokenizer, *, chat: bool, suffix: str
) -> ProblemSet:
    """Return the benchmark with its prompts, in the order of the file.

    Args:
        suffix: a line of its own at the end of each problem; of a chat, of its last turn.
    """
    end = f"\n{suffix}" if suffix else ""
    prompts = []
    for index, problem in enumerate(benchmark.problems):
        question, turns = problem.question, problem.question.turns
        if turns:
            turns = (*turns[:-1], {**turns[-1], "content": turns[-1]["content"] + end})
        asked = replace(question, text=question.text + end, turns=turns)
        [ids] = tokenizer.read([asked], chat=chat)
        prompts.append(Prompt(index, ids, asked.text, asked.answer, asked.metadata, turns))
    return replace(benchmark, prompts=tuple(prompts))


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Changes with every token that is asked, and with all that a reward gets of a question."""
    facts = [(prompt.input_ids, prompt.answer, prompt.metadata) for prompt in prompts]
    content = json.dumps(facts, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def check_lengths(benchmark: ProblemSet, max_new_tokens: int, limit: float) -> None:
    """Raise ``ConfigError`` where the longest prompt and its response exceed ``limit`` tokens."""
    longest = benchmark.longest
    if longest + max_new_tokens <= limit:
        return
    fix = "leave it out, or take an engine with a longer context"
    if longest < limit:
        fix = f"give at most {limit - longest:.0f}"
    lengths = [len(prompt.input_ids) for prompt in benchmark.prompts]
    place = benchmark.problems[lengths.index(longest)].question.place
    raise ConfigError(
        f"{place}: the longest prompt, {longest} tokens, and --max-new-tokens {max_new_tokens} "
        f"exceed the {limit:.0f} tokens that the engine takes; {fix}"
    )
