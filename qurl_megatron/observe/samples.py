"""What the model says: a few responses of every step and evaluation, kept and shown.

    {"step": 4, "of": "train", "prompt": "12 + 3 =", "response": "15.", "reward": 0.0, ...}

``samples.jsonl`` has a line per example. What a model writes is data: it is stored as it came and
clipped, and wherever it is shown its control characters are made visible.
"""

import json
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.growing import Growing
from qurl_megatron.observe.text import how_many, number

if TYPE_CHECKING:  # importing this package brings no numpy
    from qurl_megatron.types import Sample

SAMPLES_FILE = "samples.jsonl"
TRAIN, HELD_OUT = "train", "held-out"
LONGEST = 2000  # characters that are kept of a prompt, and of a response
SHORT = 300  # of an example among the lines of a run
SAID = re.compile(r"  (prompt  |response|answer  | {8})  ")
"""How each line begins that ``as_text`` makes of a prompt or a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One response with what was asked, and what became of it."""

    step: int
    of: str  # TRAIN, HELD_OUT or a benchmark
    index: int  # of the prompt, in the order of the data
    prompt: str
    answer: str
    response: str
    reward: float
    advantage: float | None = None  # mean over its tokens; None where nothing is trained
    tokens: int
    finish: str  # "stop", or "length" where the limit ended it


def example_of(sample: "Sample", step: int, of: str, advantage: float | None = None) -> Example:
    """A graded sample, clipped."""
    return Example(
        step=step,
        of=of,
        index=sample.prompt.index,
        prompt=clipped(sample.prompt.text),
        answer=clipped(sample.prompt.answer, SHORT),
        response=clipped(sample.text),
        reward=sample.reward,
        advantage=None if advantage is None else round(advantage, 6),
        tokens=sample.written_tokens,
        finish=sample.finish_reason,
    )


def telling(rewards: Sequence[float], prompts: Sequence[int], count: int) -> list[int]:
    """Which responses to keep: half of them have the lowest rewards, half the highest.

    Among equal rewards those to different prompts come first, in the order of the batch.

    Args:
        rewards, prompts: of each response; one number, the same prompt.

    Returns:
        Indices, ascending.
    """
    nth: list[int] = []
    counts: Counter[tuple[int, float]] = Counter()
    for prompt, reward in zip(prompts, rewards, strict=True):
        nth.append(counts[prompt, reward])
        counts[prompt, reward] += 1
    every = range(len(rewards))
    lowest = sorted(every, key=lambda i: (rewards[i], nth[i], i))[: (count + 1) // 2]
    highest = sorted(every, key=lambda i: (-rewards[i], nth[i], i))
    highest_left = [i for i in highest if i not in lowest][: count // 2]
    return sorted(lowest + highest_left)


def clipped(text: str, longest: int = LONGEST) -> str:
    """The beginning and the end of a text: a response's answer stands at its end."""
    if len(text) <= longest:
        return text
    head, tail = text[: longest * 3 // 4], text[len(text) - longest // 4 :]
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters ...]\n{tail}"


def visible(text: str) -> str:
    """The text with what terminals and pages would obey, or hide, written out; lines stay."""
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    code = ord(character)
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    if code < 0x20:
        return chr(0x2400 + code)  # ESC as one character that reads so
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def facts(example: Example) -> str:
    """What became of a response, in one line."""
    parts = [f"reward {number(example.reward)}"]
    if example.advantage is not None:
        sign = "+" if example.advantage > 0 else ""
        parts.append(f"advantage {sign}{number(example.advantage)}")
    ends = {"length": ", cut off at the limit", "abort": ", aborted"}
    parts.append(how_many(example.tokens, "token") + ends.get(example.finish, ""))
    return ", ".join(parts)


def as_text(example: Example, title: str = "", *, longest: int = 2 * LONGEST) -> str:
    """An example for a terminal, several lines.

    Args:
        title: what its first line begins with; default: step and prompt.
        longest: characters of the prompt, and of the response.
    """
    title = title or f"step {example.step}, {example.of} prompt {example.index}"
    lines = [f"{visible(title)}: {facts(example)}"]
    for name, text in (("prompt", example.prompt), ("response", example.response)):
        lines += _labelled(name, clipped(text, longest) or "(empty)")
    return "\n".join([*lines, *_labelled("answer", example.answer or "(none)")])


def _labelled(name: str, text: str) -> list[str]:
    """With the name before the first line, and the others below that."""
    first, *further_lines = visible(text).split("\n")
    return [f"  {name:<8}  {first}", *(f"  {'':<8}  {line}" for line in further_lines)]


def say(text: str) -> None:
    """Print what may hold any character, on a terminal that may not."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


class SampleFile:
    """Appends the examples of one step, or of one evaluation, in one piece."""

    def __init__(self, path: Path, *, resume_step: int = 0, evaluates: bool = False) -> None:
        """Open ``path`` for appending.

        Args:
            resume_step: the first step that will be done again; its examples and later ones are
                dropped. 0 starts an empty file.
            evaluates: the step before that will be evaluated again, too.
        """
        kept = (
            [example for example in _read(path) if example.step < resume_step]
            if resume_step
            else []
        )
        if evaluates:
            kept = [
                example
                for example in kept
                if (example.step + 1, example.of) != (resume_step, HELD_OUT)
            ]
        write_whole(path, "".join(map(_line, kept)), sync=True)
        self._file = Growing(path)

    def write(self, examples: Iterable[Example]) -> None:
        self._file.write("".join(map(_line, examples)).encode())

    def close(self) -> None:
        self._file.close()


def read_samples(run_dir: Path) -> list[Example]:
    """The examples of a run, in the order of its steps; none where it keeps none.

    Raises:
        ConfigError: a line, other than a cut last one, is not an example.
    """
    return _read(run_dir / SAMPLES_FILE)


def _read(path: Path) -> list[Example]:
    if not path.is_file():
        return []
    # Not splitlines(): it also splits at characters that may stand inside a JSON string.
    *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [_parsed(line, path, place) for place, line in enumerate(lines, 1)]


# A field's kinds; of the fields themselves a line has all, and no others.
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("step", "index", "tokens"), (int,)),
    **dict.fromkeys(("of", "prompt", "answer", "response", "finish"), (str,)),
    "reward": (int, float),
    "advantage": (int, float, type(None)),
}


def _parsed(line: str, path: Path, place: int) -> Example:
    try:
        record: Any = json.loads(line)
        complete = record.keys() == _KINDS.keys()
        if complete and all(type(record[name]) in kinds for name, kinds in _KINDS.items()):
            return Example(**record)
    except (ValueError, AttributeError, RecursionError):
        pass  # said below, as of a line that is JSON and no example
    raise ConfigError(f"{path}, line {place}, is not an example: {line[:80]!r}; delete the line")


def _line(example: Example) -> str:
    return json.dumps(asdict(example)) + "\n"
