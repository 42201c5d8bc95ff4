"""``qurl samples``: the examples that a run has kept, those that were asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.samples import SAMPLES_FILE, Example, as_text, read_samples, say


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which examples; None does not ask."""

    step: int | None = None
    worst: int | None = None
    best: int | None = None
    prompt: str | None = None

    def __post_init__(self) -> None:
        for name in ("worst", "best"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"--{name} must be 1 or more, got {value}")


def show(run_dir: Path, wanted: Wanted) -> None:
    """Print them.

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
    say("\n\n".join(map(as_text, chosen(examples, wanted))))


def chosen(examples: Sequence[Example], wanted: Wanted) -> list[Example]:
    """Of one step, the newest where no other is named, or with a prompt of all of them; lowest
    rewards first where ``worst`` or ``best`` are asked for.

    Raises:
        ConfigError: there is none like that.
    """
    steps = sorted({example.step for example in examples})
    step, text = wanted.step, wanted.prompt
    if step is not None and step not in steps:
        raise ConfigError(f"--step {step} has no examples; kept are {_said(steps)}")
    if step is None and text is None:
        step = steps[-1]
    matching = [
        example
        for example in examples
        if step in (None, example.step) and (text or "") in example.prompt
    ]
    if not matching:
        of_step = "" if step is None else f" of step {step}"
        raise ConfigError(f"--prompt {text!r} is in none of the prompts that are kept{of_step}")
    if wanted.worst is None and wanted.best is None:
        return matching
    matching.sort(key=lambda example: example.reward)  # stable: else as they were written
    worst = min(wanted.worst or 0, len(matching))
    return matching[:worst] + matching[max(worst, len(matching) - (wanted.best or 0)) :]


def _said(steps: Sequence[int]) -> str:
    """Numbers a person can choose from."""
    if len(steps) > 10:
        return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    *before_last, last = map(str, steps)
    return f"steps {', '.join(before_last)} and {last}" if before_last else f"step {last}"
