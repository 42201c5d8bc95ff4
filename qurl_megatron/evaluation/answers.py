"""The graded responses to one benchmark, on disk: an interrupted evaluation goes on from them.

    OUT/aime24.samples.jsonl    the settings on the first line, then a line per response

Lines are only ever added, in whole batches, so a process that dies loses at most its last batch.
There may be more responses than an evaluation asks for: each is drawn with a seed of its own, so
the first of many equal fewer. A file made with other settings is refused: half of one policy and
half of another would be the accuracy of neither.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from qurl_megatron.kit.errors import ConfigError, Unscored
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.rewards.pool import Tally

COUNT = "k"  # the number of responses asked for, on which no answer depends
Key = tuple[str, int]
"""A mode, and the number of a problem in its file."""


class GradedAnswer(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
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
        self.path, self.responses = path, responses
        self._settings = json.loads(json.dumps(settings))
        self._settings.pop(COUNT, None)
        self._kept: dict[Key, list[GradedAnswer]] = {}
        if path.exists():
            self._load()

    @property
    def answers(self) -> dict[Key, list[GradedAnswer]]:
        """The responses that are asked for."""
        asked = {}
        for (mode, problem), kept in self._kept.items():
            if mode in self.responses:
                asked[mode, problem] = kept[: self.responses[mode]]
        return asked

    @property
    def every(self) -> list[GradedAnswer]:
        """The responses that are asked for, by mode and problem."""
        return [answer for _, answers in sorted(self.answers.items()) for answer in answers]

    @property
    def counts(self) -> dict[Key, int]:
        """The number of answers to each problem, asked for or not."""
        return {key: len(kept) for key, kept in self._kept.items()}

    def count(self, key: Key) -> int:
        return len(self._kept.get(key, ()))

    def truncate(self, counts: Mapping[Key, int]) -> None:
        """Forget all but the first so many answers to each problem; those not named have none."""
        before = self.counts
        self._kept = {key: kept[: counts.get(key, 0)] for key, kept in self._kept.items()}
        if not any(self._kept.values()):
            self.path.unlink(missing_ok=True)  # settings without answers bind nobody
        elif self.counts != before:
            self._rewrite()

    def add(self, answers: Iterable[GradedAnswer]) -> None:
        """Add the next ones of their problems; they are on disk when this returns."""
        answers = list(answers)
        for answer in answers:
            self._take(answer)
        if self.path.exists():
            self._write(self.path, "ab", answers)
        else:
            self._rewrite()

    def _take(self, answer: GradedAnswer) -> None:
        kept = self._kept.setdefault(answer.key, [])
        if answer.sample == len(kept):  # else lines before it have been deleted
            kept.append(answer)

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
            there, here = recorded.get(key), self._settings.get(key)
            if there != here:
                changed.append(f"{key}: {there} there, {here} here")
        if changed:
            raise ConfigError(
                f"{self.path} holds answers made with other settings ({'; '.join(changed)}); undo "
                "that to go on with them, give another --out, or delete that file"
            )
        for number, line in enumerate(lines, start=2):
            try:
                self._take(msgspec.json.decode(line, type=GradedAnswer))
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"{self.path} line {number} is damaged ({error}); delete the line"
                ) from None
        if cut_off:  # in the middle of a line of the last batch
            self._rewrite()

    def _rewrite(self) -> None:
        aside = self.path.with_name(f".{self.path.name}.tmp")
        answers = [answer for kept in self._kept.values() for answer in kept]
        self._write(aside, "wb", answers, header=json.dumps({"settings": self._settings}) + "\n")
        aside.replace(self.path)

    def _write(
        self, path: Path, mode: str, answers: Iterable[GradedAnswer], header: str = ""
    ) -> None:
        with refusing(path, key="--out"), path.open(mode) as file:
            file.write(header.encode())
            for answer in answers:
                file.write(msgspec.json.encode(answer) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def tally_of(answers: Iterable[GradedAnswer]) -> Tally:
    """Count the answers without a score, and why; earlier processes' count, too."""
    tally = Tally()
    for answer in answers:
        cause, _, reason = answer.unscored.partition(": ")
        tally.count(Unscored(cause, reason) if cause else None)
    return tally
