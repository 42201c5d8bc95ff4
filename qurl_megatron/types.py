"""Types that travel between the parts: prompts in, samples out.

Everything here is plain data without tensors, so that the rollout side needs no Megatron and the
training side needs no engine. Values per token lie in arrays: a step has millions of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, Literal, cast

import numpy as np

from qurl_megatron.kit.errors import Unscored

FinishReason = Literal["stop", "length", "abort"]

Versions = tuple[tuple[int, int], ...]
"""(weight version, how many tokens in a row it generated), in the order of the tokens."""


def routes_dtype(experts: int) -> str:
    """Return NumPy's and torch's name of the smallest format for ``Sample.routes``, by the experts
    of a layer."""
    return "uint8" if experts < 256 else "int16"  # numbers plus one


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question with the reference answer its responses are checked against."""

    index: int  # position in the data order; seeds and the order of samples derive from it
    input_ids: tuple[int, ...]
    text: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)  # a file's other columns
    turns: tuple[dict[str, Any], ...] = field(default=(), hash=False)  # of a chat

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as a chat, also if it is plain text."""
        return list(self.turns) or [{"role": "user", "content": self.text}]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One response to a prompt, as the behaviour policy generated it; equal to one of equal values.

    In a conversation of several turns the response is all that follows on the prompt: the policy's
    turns, and the environment's messages between them. Only the former are ever trained on. The
    arrays may be given as any sequence; they are read-only from then on.
    """

    prompt: Prompt
    response_ids: np.ndarray  # int32
    behaviour_log_probs: np.ndarray  # float32, one per response token, at the sampling temperature
    finish_reason: FinishReason
    versions: Versions  # of the tokens that the policy wrote
    text: str = ""  # the decoded response, without special tokens
    reward: float = 0.0
    # bool: the policy wrote this token. Given as None: all of them.
    written: np.ndarray = cast(np.ndarray, None)
    # Experts that the engine chose, plus one: [tokens of prompt and response, layers, experts of a
    # token]. The last tokens' rows may be missing, and rows of zeros are.
    routes: np.ndarray | None = None
    failure: Unscored | None = None  # of the environment
    left_out: bool = False  # the environment's last message, as it would have left no room

    def __post_init__(self) -> None:
        object.__setattr__(self, "response_ids", _frozen(self.response_ids, np.int32))
        log_probs = _frozen(self.behaviour_log_probs, np.float32)
        object.__setattr__(self, "behaviour_log_probs", log_probs)
        object.__setattr__(self, "versions", in_a_row(self.versions))
        written = self.written
        if written is None:
            written = np.ones(len(self.response_ids), bool)
        object.__setattr__(self, "written", _frozen(written, np.bool_))
        lengths = {len(self.response_ids), len(self.behaviour_log_probs), len(self.written)}
        assert len(lengths) == 1, f"response, log-probs and mask differ in length: {lengths}"
        counts = {sum(count for _, count in self.versions), self.written_tokens}
        assert len(counts) == 1, f"versions and written tokens differ in length: {counts}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return False
        pairs = ((getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return all(np.array_equal(*values) for values in pairs)

    @property
    def truncated(self) -> bool:
        """Whether the length limit, not the model, ended the response."""
        return self.finish_reason == "length"

    @property
    def written_tokens(self) -> int:
        """How many tokens of the response the policy wrote."""
        return int(self.written.sum())

    @property
    def turns(self) -> list[np.ndarray]:
        """The ids of each stretch of tokens in a row that the policy wrote."""
        ends = np.flatnonzero(np.diff(self.written)) + 1
        parts = np.split(self.response_ids, ends), np.split(self.written, ends)
        return [ids for ids, written in zip(*parts, strict=True) if written.any()]

    @property
    def token_versions(self) -> list[int | None]:
        """The weight version that generated each response token; None where none did."""
        versions = iter([version for version, count in self.versions for _ in range(count)])
        return [next(versions) if written else None for written in self.written]


def in_a_row(versions: Iterable[tuple[int, int]]) -> Versions:
    """Merge neighbours of one version, and leave out entries without tokens."""
    runs = groupby((run for run in versions if run[1]), key=lambda run: run[0])
    return tuple((version, sum(count for _, count in run)) for version, run in runs)


def _frozen(values: Sequence | np.ndarray, dtype: Any) -> np.ndarray:
    """Return the values as a read-only array; themselves if they are one already."""
    if isinstance(values, np.ndarray) and values.dtype == dtype and not values.flags.writeable:
        return values
    array = np.array(values, dtype=dtype)
    array.flags.writeable = False
    return array
