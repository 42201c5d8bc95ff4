"""Benchmark files, the prompts that are made of them, and the graded responses on disk.

    {"id": "2024-I-1", "prompt": "How many ...", "answer": "204", ...}

One JSON object per line, or parquet; read as training data is (``data.rows``), but a problem may
also have an ``id``. A benchmark is named after its file.

    OUT/aime24.samples.jsonl    the settings on the first line, then a line per response

Lines are added for whole problems, so a process that dies loses at most its last ones, and an
interrupted evaluation goes on from the others. A file made with other settings is refused: half of
one policy and half of another would be the accuracy of neither.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from qurl_megatron.config import DataConfig
from qurl_megatron.data.rows import Columns, DataFile, Question, as_text, read_file
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError, Unscored
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.kit.shipped import shipped
from qurl_megatron.rewards.pool import Tally
from qurl_megatron.rewards.verifiers import Score
from qurl_megatron.types import Prompt

Key = tuple[str, int]
"""A mode, and the number of a problem in its file."""


@dataclass(frozen=True)
class Benchmark:
    name: str
    path: Path
    problems: dict[str, Question]  # by its own id, else by its number in the file, from 1
    summary: str = ""  # columns and counts, for a person
    prompts: tuple[Prompt, ...] = ()  # of one model's tokenizer

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.input_ids) for prompt in self.prompts)

    @property
    def fingerprint(self) -> str:
        """Hash of every prompt's tokens, and of everything that a reward gets from a question."""
        facts = [(prompt.input_ids, prompt.answer, prompt.metadata) for prompt in self.prompts]
        content = json.dumps(facts, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def check_lengths(self, max_new_tokens: int, limit: float) -> None:
        """Raise ``ConfigError`` if the longest prompt and its response exceed ``limit``."""
        longest = self.longest
        if longest + max_new_tokens <= limit:
            return
        fix = "leave it out, or take an engine with a longer context"
        if longest < limit:
            fix = f"give at most {limit - longest:.0f}"
        lengths = [len(prompt.input_ids) for prompt in self.prompts]
        place = list(self.problems.values())[lengths.index(longest)].place
        raise ConfigError(
            f"{place}: the longest prompt, {longest} tokens, and rollout.max_new_tokens="
            f"{max_new_tokens} exceed the {limit:.0f} tokens that the engine takes; {fix}"
        )


def read_benchmarks(
    paths: Sequence[Path], config: DataConfig, *, answers: bool = True
) -> list[Benchmark]:
    """Read and check all files.

    Args:
        config: has the keys of prompts and answers.
        answers: every row must have an answer; otherwise a missing one is empty.

    Raises:
        ConfigError: a file is missing, empty or malformed, or two have the same name.
    """
    columns = Columns(config.prompt_key, config.answer_key, needed=answers)
    benchmarks: dict[str, Benchmark] = {}
    for path in paths:
        path = shipped(path, "launch/benchmarks")
        if path.stem in benchmarks:
            raise ConfigError(
                f"{path} and {benchmarks[path.stem].path} are both named {path.stem}, and so "
                "would their results be; rename one"
            )
        file = read_file(path, str(path), columns)
        benchmarks[path.stem] = Benchmark(path.stem, path, _problems(file), file.summary)
    return list(benchmarks.values())


def _problems(file: DataFile) -> dict[str, Question]:
    questions: dict[str, Question] = {}
    for number, question in enumerate(file.questions, start=1):
        row_id = question.metadata.get("id")
        name = str(number) if row_id is None else as_text(row_id, "id", question.place)
        if name in questions:
            raise ConfigError(
                f"{question.place} has the id {name!r} of {questions[name].place}; ids must differ"
            )
        questions[name] = question
    return questions


def with_prompts(
    benchmark: Benchmark, tokenizer: Tokenizer, *, chat: bool, suffix: str
) -> Benchmark:
    """Return the benchmark with its prompts, in the order of the file, each with ``suffix`` as last
    line."""
    end = f"\n{suffix}" if suffix else ""
    prompts = []
    for index, question in enumerate(benchmark.problems.values()):
        if turns := question.turns:
            turns = (*turns[:-1], {**turns[-1], "content": turns[-1]["content"] + end})
        text = question.text + end
        [ids] = tokenizer.read([replace(question, text=text, turns=turns)], chat=chat)
        prompts.append(Prompt(index, ids, text, question.answer, question.metadata, turns))
    return replace(benchmark, prompts=tuple(prompts))


class GradedAnswer(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    mode: str  # "greedy" or "sampled"
    problem: int  # its number in the file, from 0
    id: str
    sample: int  # of this problem in this mode, from 0
    reward: float  # of our kinds 1.0 where it is right, else 0.0
    finish: str  # "stop", or "length" where the limit ended it
    tokens: int
    seconds: float  # its share of the time that the engines took
    version: int  # of the weights; -1 for those an engine started with
    text: str
    unscored: str = ""  # where it has no score: cause and reason
    left_out: bool = False  # the environment's next message did not fit

    @property
    def key(self) -> Key:
        return self.mode, self.problem


class AnswerFile:
    """Use from one thread at a time. The file appears with the first answer."""

    def __init__(self, path: Path, settings: Mapping[str, Any], responses: Mapping[str, int]):
        """
        Args:
            settings: everything that the answers depend on; JSON can hold it.
            responses: number asked for of each problem, by mode.

        Raises:
            ConfigError: the file is damaged, or was made with other settings.
        """
        self.path, self._responses = path, responses
        self._settings = json.loads(json.dumps(settings))
        self.answers: dict[Key, list[GradedAnswer]] = {}  # all responses to each problem
        if path.exists():
            self._load()

    @property
    def every(self) -> list[GradedAnswer]:
        """All responses, by mode and problem."""
        return [answer for _, answers in sorted(self.answers.items()) for answer in answers]

    def forget(self, keys: Collection[Key]) -> None:
        """Forget the answers to some problems, on disk as well."""
        kept = {key: answers for key, answers in self.answers.items() if key not in keys}
        if len(kept) < len(self.answers):
            self.answers = kept
            self._rewrite()

    def add(self, answers: Sequence[GradedAnswer]) -> None:
        """Add all responses to some problems; they are on disk when this returns."""
        for answer in answers:
            self.answers.setdefault(answer.key, []).append(answer)
        if not self.path.exists():
            self._rewrite()
            return
        with refusing(self.path, key="--out"), self.path.open("ab") as file:
            file.write(_lines(answers))
            file.flush()
            os.fsync(file.fileno())

    def _load(self) -> None:
        first, *lines, cut_off = self.path.read_bytes().split(b"\n")
        try:
            recorded = json.loads(first)["settings"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{self.path} does not begin with its settings; give another --out"
            ) from None
        changed = []
        for key in dict.fromkeys((*recorded, *self._settings)):
            old, new = recorded.get(key), self._settings.get(key)
            if old != new:
                changed.append(f"{key}: {old} there, {new} here")
        if changed:
            raise ConfigError(
                f"{self.path} holds answers made with other settings ({'; '.join(changed)}); undo "
                "that to go on with them, give another --out, or delete that file"
            )
        for number, line in enumerate(lines, start=2):
            try:
                answer = msgspec.json.decode(line, type=GradedAnswer)
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"{self.path} line {number} is damaged ({error}); delete the line"
                ) from None
            self.answers.setdefault(answer.key, []).append(answer)
        in_part = set()  # the process died while it wrote them, or lines were deleted
        for (mode, problem), answers in self.answers.items():
            if [answer.sample for answer in answers] != list(range(self._responses.get(mode, 0))):
                in_part.add((mode, problem))
        self.forget(in_part)
        if cut_off and not in_part:
            self._rewrite()

    def _rewrite(self) -> None:
        if not self.answers:
            self.path.unlink(missing_ok=True)  # settings without answers bind nobody
            return
        header = json.dumps({"settings": self._settings}) + "\n"
        with refusing(self.path, key="--out"):
            write_whole(self.path, header.encode() + _lines(self.every), sync=True)


def _lines(answers: Iterable[GradedAnswer]) -> bytes:
    return b"".join(msgspec.json.encode(answer) + b"\n" for answer in answers)


def tally_of(answers: Iterable[GradedAnswer]) -> Tally:
    """Count the answers without a score by cause; earlier processes' answers count, too."""
    scores: list[Score] = []
    for answer in answers:
        cause, _, reason = answer.unscored.partition(": ")
        scores.append(Unscored(cause, reason) if cause else answer.reward)
    return Tally.of(scores)
