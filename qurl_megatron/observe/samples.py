"""Examples: a few responses of every step and evaluation, kept, and shown by ``qurl samples``.

    {"step": 4, "of": "train", "prompt": "12 + 3 =", "response": "15.", "reward": 0.0, ...}

``samples.jsonl`` has a line per example. Text that a model wrote is data: it is stored as it came,
clipped, and shown so that nothing obeys it.
"""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.observe.sinks import LineFile
from qurl_megatron.observe.text import how_many, number

if TYPE_CHECKING:  # importing this package brings no numpy
    from qurl_megatron.types import Sample

SAMPLES_FILE = "samples.jsonl"
TRAIN, HELD_OUT = "train", "held-out"
LONGEST = 2000  # characters that are kept of a prompt, and of a response
SHORT = 300  # of an example among the lines of a run
SAID = re.compile(r"  (prompt  |response|answer  | {8})  ")
"""How ``as_text`` begins each line of a prompt, a response or an answer."""


class Example(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    """Return a graded sample as an example, its texts clipped."""
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
    """Return ascending indices of ``count`` responses to keep: half with the lowest rewards, half
    with the highest.

    Among equal rewards those to different prompts come first, in the order of the batch.
    """
    nth: list[int] = []  # how many earlier responses share prompt and reward
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
    """Cut the middle out of a long text: a response's answer stands at its end."""
    if len(text) <= longest:
        return text
    head, tail = text[: longest * 3 // 4], text[len(text) - longest // 4 :]
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters ...]\n{tail}"


def facts(example: Example) -> str:
    """Return reward, advantage, length and ending of a response in one line."""
    parts = [f"reward {number(example.reward)}"]
    if example.advantage is not None:
        sign = "+" * (example.advantage > 0)
        parts.append(f"advantage {sign}{number(example.advantage)}")
    ends = {"length": ", cut off at the limit", "abort": ", aborted"}
    parts.append(how_many(example.tokens, "token") + ends.get(example.finish, ""))
    return ", ".join(parts)


def as_text(example: Example, *, longest: int = 2 * LONGEST) -> str:
    """Return an example as lines for a terminal, prompt and response clipped to ``longest``."""
    title = f"step {example.step}, {example.of} prompt {example.index}"
    lines = [f"{printable(title)}: {facts(example)}"]
    for name, text in (("prompt", example.prompt), ("response", example.response)):
        lines += _labelled(name, clipped(text, longest) or "(empty)")
    return "\n".join([*lines, *_labelled("answer", example.answer or "(none)")])


def _labelled(name: str, text: str) -> list[str]:
    """Write a name before the first line of a text, and indent the others."""
    first, *further_lines = printable(text).split("\n")
    return [f"  {name:<8}  {first}", *(f"  {'':<8}  {line}" for line in further_lines)]


def say(text: str) -> None:
    """Print text with any characters; those that the terminal lacks are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


class SampleFile(LineFile[Example]):
    """samples.jsonl: the examples of one step, or of one evaluation, in one piece."""

    kind, of = "an example", Example

    @staticmethod
    def evaluates(value: Example) -> bool:
        return value.of == HELD_OUT


def read_samples(run_dir: Path) -> list[Example]:
    """Return the examples of a run, in the order of its steps, as ``LineFile.read`` does."""
    return SampleFile.read(run_dir / SAMPLES_FILE)


def select(
    run_dir: Path,
    *,
    step: int | None = None,
    worst: int | None = None,
    best: int | None = None,
    prompt: str = "",
) -> list[Example]:
    """Choose examples of one step; by default the newest, or with ``prompt`` every step.

    Args:
        worst, best: take so many of the lowest and of the highest rewards, lowest first.
        prompt: text that the prompt contains.

    Raises:
        ConfigError: the run keeps none, or none like that.
    """
    path = run_dir / SAMPLES_FILE
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist; `qurl train` writes it, unless observe.samples=0"
        )
    examples = read_samples(run_dir)
    if not examples:
        raise ConfigError(f"{path} is empty: no step or evaluation has ended with observe.samples")
    for name, count in (("worst", worst), ("best", best)):
        if count is not None and count < 1:
            raise ConfigError(f"--{name} must be 1 or more, got {count}")
    steps = sorted({example.step for example in examples})
    if step is None and not prompt:
        step = steps[-1]
    of_step = [example for example in examples if step in (None, example.step)]
    if not of_step:
        raise ConfigError(
            f"--step {step} has no examples; kept are {how_many(len(steps), 'step')} from "
            f"{steps[0]} to {steps[-1]}"
        )
    matching = [example for example in of_step if prompt in example.prompt]
    if not matching:
        raise ConfigError(f"--prompt {prompt!r} is in none of the {len(of_step)} prompts kept")
    if worst is None and best is None:
        return matching
    matching.sort(key=lambda example: example.reward)  # stable: else as they were written
    lowest = min(worst or 0, len(matching))
    return matching[:lowest] + matching[max(lowest, len(matching) - (best or 0)) :]
