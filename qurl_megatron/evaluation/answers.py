"""The graded responses to one benchmark, on disk: what an interrupted evaluation goes on from.

    OUT/aime24.samples.jsonl    the settings on the first line, then a line per response

Lines are only ever added, in whole batches, so that whatever ends the process, all that is lost is
the last batch. There may be more responses than an evaluation asks for: they are drawn one by one,
each with a seed of its own, so the first of many are those of fewer. A file made with other
settings is refused: half of one policy and half of another would be the accuracy of neither.
"""

import itertools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from qurl_megatron.kit.errors import ConfigError, Unscored
from qurl_megatron.rewards.pool import Tally, way_of

CODE = "code of "  # before what names code of the user's own: a setting, its checksum
COUNT = "k"  # the setting that says how many are asked for, on which no answer depends
DRAWING = {"temperature", "top_p", "seed"}  # settings of drawn responses, where there are any
OPTIONAL = {"unscored", "left_out"}  # keys of a line
Key = tuple[str, int]
"""A mode, and the number of a problem in its file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradedAnswer:
    """One response, graded."""

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
    unscored: str = ""  # why it has no score, cause and reason; its line lacks the key otherwise
    left_out: bool = False  # what the environment said next did not fit; the same

    @property
    def key(self) -> Key:
        return self.mode, self.problem


class AnswerFile:
    """Use from one thread at a time."""

    def __init__(self, path: Path, settings: Mapping[str, Any], responses: Mapping[str, int]):
        """
        Args:
            settings: everything that the answers depend on; JSON can hold it.
            responses: how many are asked for of each problem, by mode.

        Raises:
            ConfigError: the file is damaged, or was made with other settings.
        """
        self.path, self.responses = path, responses
        self._lines: list[GradedAnswer] = []  # of the file, in its order
        self._kept: dict[Key, list[GradedAnswer]] = {}  # the same, by sample, from 0 on
        self._header = _header(settings)
        if path.exists():
            self._load(settings)
        else:
            self._rewrite()

    @property
    def answers(self) -> dict[Key, list[GradedAnswer]]:
        """Those that are asked for."""
        return {
            key: kept[: self.responses[key[0]]]
            for key, kept in self._kept.items()
            if key[0] in self.responses
        }

    @property
    def every(self) -> list[GradedAnswer]:
        """Those that are asked for, by mode and problem."""
        return [
            answer
            for _, answers_of_key in sorted(self.answers.items())
            for answer in answers_of_key
        ]

    @property
    def counts(self) -> dict[Key, int]:
        """How many answers there are to each problem, asked for or not."""
        return {key: len(kept) for key, kept in self._kept.items()}

    def count(self, key: Key) -> int:
        return len(self._kept.get(key, ()))

    def keep(self, counts: Mapping[Key, int]) -> None:
        """Forget all answers to a problem but so many, and all to problems that are not named."""
        lines = [line for line in self._lines if line.sample < counts.get(line.key, 0)]
        if len(lines) < len(self._lines):
            self._lines, self._kept = [], {}
            self._take(lines)
            self._rewrite()

    def add(self, answers: Iterable[GradedAnswer]) -> None:
        """The next ones of their problems; on disk when this returns."""
        answers = list(answers)
        self._write(self.path, "a", map(_line, answers))
        self._take(answers)

    def _take(self, answers: Iterable[GradedAnswer]) -> None:
        for answer in answers:
            kept = self._kept.setdefault(answer.key, [])
            if answer.sample == len(kept):  # else lines before it have been deleted
                kept.append(answer)
                self._lines.append(answer)

    def _load(self, settings: Mapping[str, Any]) -> None:
        refuse_answers({self.path: made_otherwise(self.path, settings)})
        *lines, cut_off = self.path.read_bytes().split(b"\n")
        names = {field.name for field in fields(GradedAnswer)}
        for number, line in enumerate(lines[1:], start=2):
            record = _parsed(line, self.path, number)
            if record.keys() | OPTIONAL != names:
                raise ConfigError(f"{self.path} line {number} is not an answer; delete the line")
            self._take([GradedAnswer(**record)])
        # The last batch may have been cut short, in the middle of a line. A header of before there
        # were checksums of code, or drawn responses, takes up those of now.
        before = settings_of(self.path)
        self._header = _header({**settings, **{k: before[k] for k in before if k not in settings}})
        if cut_off or lines[0] + b"\n" != self._header.encode():
            self._rewrite()

    def _rewrite(self) -> None:
        aside = self.path.with_name(f".{self.path.name}.tmp")
        self._write(aside, "w", itertools.chain([self._header], map(_line, self._lines)))
        aside.replace(self.path)

    def _write(self, path: Path, mode: str, lines: Iterable[str]) -> None:
        try:
            with path.open(mode, encoding="utf-8") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def settings_of(path: Path) -> dict[str, Any]:
    """What the answers in a file were made with.

    Raises:
        ConfigError: the file does not say.
    """
    with path.open("rb") as file:
        first = file.readline()
    recorded = _parsed(first, path, 1).get("settings") if first.endswith(b"\n") else None
    if not isinstance(recorded, dict):
        raise ConfigError(f"{path} does not begin with its settings; give another --out")
    return recorded


def made_otherwise(path: Path, settings: Mapping[str, Any]) -> str:
    """How the answers in a file were made with other settings, for ``refuse_answers``; else empty.

    Code that only one of the two has a checksum of is taken for unchanged, and responses are drawn
    with any settings where none were drawn.
    """
    recorded, settings = settings_of(path), json.loads(json.dumps(settings))
    unknown = {
        key for key in recorded.keys() ^ settings.keys() if key.startswith(CODE) or key in DRAWING
    } | {COUNT}
    changed = [
        f"{key}: {recorded.get(key)} there, {settings.get(key)} here"
        for key in dict.fromkeys((*recorded, *settings))
        if key not in unknown and recorded.get(key) != settings.get(key)
    ]
    return f"made with other settings ({'; '.join(changed)})" if changed else ""


def refuse_answers(found: Mapping[Path, str]) -> None:
    """
    Args:
        found: files of answers that are not to be added to, and what these are; empty text: they
            may be.

    Raises:
        ConfigError: there is one; it names all.
    """
    files: dict[str, list[str]] = {}
    for path, description in found.items():
        files.setdefault(description, []).append(str(path))
    files.pop("", None)
    if not files:
        return
    sentences = [
        f"{' and '.join(paths)} hold{'' if paths[1:] else 's'} answers {description}"
        for description, paths in files.items()
    ]
    undo = (
        "undo that to go on with them, "
        if any("settings" in description for description in files)
        else ""
    )
    which = "these files" if sum(map(len, files.values())) > 1 else "that file"
    raise ConfigError(f"{'; '.join(sentences)}; {undo}give another --out, or delete {which}")


def tally_of(answers: Iterable[GradedAnswer]) -> Tally:
    """How many have no score, and why; of a whole file, also those of earlier processes."""
    tally = Tally()
    for answer in answers:
        tally.responses += 1
        if answer.unscored:
            cause, _, reason = answer.unscored.partition(": ")
            way = way_of(Unscored(cause, reason))
            tally.failed += 1
            tally.ways[way] += 1
            tally.first.setdefault(way, reason)
    return tally


def _header(settings: Mapping[str, Any]) -> str:
    recorded = {key: value for key, value in settings.items() if key != COUNT}
    return json.dumps({"settings": recorded}) + "\n"


def _parsed(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path} line {number} is damaged ({error}); delete the line") from None
    return record if isinstance(record, dict) else {}


def _line(answer: GradedAnswer) -> str:
    record = {key: value for key, value in asdict(answer).items() if value or key not in OPTIONAL}
    return json.dumps(record, ensure_ascii=False) + "\n"
