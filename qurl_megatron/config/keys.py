"""A key of a section: its default, its range, and whether it may change when a run is resumed.

A section is a frozen dataclass, a subclass of ``Section``. Rules of one key are arguments of
``key``; rules on several keys are code in the section's ``check``.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeVar

from qurl_megatron.kit.errors import ConfigError

if TYPE_CHECKING:
    from qurl_megatron.config.load import RunConfig

OnResume = Literal["free", "change", "fork", "never"]
"""May a key change when a run is resumed? free: yes, the numbers stay the same; change: yes, the
numbers change from there on; fork: only in a fork of the run; never: the checkpoint's tensors
depend on it."""

LARGEST = 1e9
"""Bound on any number of a recipe: as seconds, 32 years, which system clocks can still wait."""
LARGEST_WHOLE = 1 << 53
"""Bound on any whole number, seeds included."""

Value = TypeVar("Value")


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError(message)`` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def names_a_user(url: str) -> bool:
    """Return whether a URL, even a malformed one, has a user's name or password before @."""
    return re.match(r"(?:[^/?#]*//)?[^/?#]*@", url) is not None


def did_you_mean(word: object, names: Iterable[str]) -> str:
    """Return the end of a message about a misspelt name; empty if none of the names is close."""
    close = get_close_matches(str(word).lower(), names, n=1, cutoff=0.8)
    return f"; did you mean {close[0]!r}?" if close else ""


@dataclass(frozen=True)
class Allowed:
    """The values that a key may have."""

    has: Callable[[Any], bool]  # False for NaN
    words: str  # "KEY must <words>, got VALUE"
    reason: str = ""  # further words of the message
    names: tuple[str, ...] = ()  # all of them, where they are names

    def refuse(self, name: str, value: Any) -> NoReturn:
        """Raise ``ConfigError`` for a key's value that is not allowed."""
        because = f"; {self.reason}" if self.reason else ""
        meant = did_you_mean(value, self.names)
        raise ConfigError(f"{name} must {self.words}, got {value!r}{because}{meant}")


def at_least(low: float, reason: str = "") -> Allowed:
    return Allowed(lambda value: value >= low, f"be {low} or more", reason)


def positive() -> Allowed:
    return Allowed(lambda value: value > 0, "be positive")


def in_interval(written: str) -> Allowed:
    """Allow an interval such as "[0, 1)", which is closed at 0 and open at 1."""
    low, high = (float(end) for end in written[1:-1].split(","))

    def has(value: float) -> bool:
        above_low = low <= value if written[0] == "[" else low < value
        return above_low and (value <= high if written[-1] == "]" else value < high)

    return Allowed(has, f"lie in {written}")


def at_most_in_size(largest: float) -> Allowed:
    return Allowed(
        lambda value: -largest <= value <= largest, f"be a number of at most {largest:.0f} in size"
    )


def one_of(*names: str) -> Allowed:
    """Allow the names in a table; choices that are fixed are a ``Literal``."""
    return Allowed(lambda value: value in names, f"be one of {', '.join(names)}", names=names)


def key(
    default: Value, allowed: Allowed | None = None, *, on_resume: OnResume | None = None
) -> Value:
    """Return a field of a section.

    Args:
        allowed: which values of its type it may have; None: all.
        on_resume: None takes the section's rule.
    """
    facts = {"allowed": allowed, "on_resume": on_resume}
    definition: Any = field(default=default, metadata=facts)
    if isinstance(default, dict):
        definition = field(default_factory=default.copy, metadata=facts)
    return definition


def check_keys(values: Any, name: str) -> None:
    """Raise ``ConfigError`` if a key of the section ``name`` is out of its range."""
    for key in fields(values):
        value, allowed = getattr(values, key.name), key.metadata.get("allowed")
        if allowed is not None and not allowed.has(value):
            allowed.refuse(f"{name}.{key.name}", value)
        if type(value) is float and not abs(value) <= LARGEST:
            at_most_in_size(LARGEST).refuse(f"{name}.{key.name}", value)
        if type(value) is int and abs(value) > LARGEST_WHOLE:
            at_most_in_size(LARGEST_WHOLE).refuse(f"{name}.{key.name}", value)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table of a recipe or of a cluster file; its subclasses are frozen dataclasses."""

    section: ClassVar[str]
    on_resume: ClassVar[OnResume]

    def __init_subclass__(cls, *, name: str, on_resume: OnResume) -> None:
        """Name the table, for messages; ``on_resume`` is the rule of keys without their own."""
        super().__init_subclass__()
        cls.section, cls.on_resume = name, on_resume

    def __post_init__(self) -> None:
        check_keys(self, self.section)
        self.check()

    def check(self) -> None:
        """Raise ``ConfigError`` if keys do not go together."""


def rules_of(section: type[Section]) -> dict[str, OnResume]:
    """Return the rule on resume of each key of a section."""
    rules: Any = {f.name: f.metadata.get("on_resume") for f in fields(section)}
    return {name: rule or section.on_resume for name, rule in rules.items()}


@dataclass(frozen=True)
class Change:
    """A key that has another value now than when the run was started last."""

    key: str  # section.key
    before: Any
    now: Any
    rule: OnResume

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.before)} -> {_shown(self.now)}"


def changes(before: "RunConfig", now: "RunConfig") -> list[Change]:
    """Return the settings that differ, except ``train.run_dir``, where the run lies."""
    special: dict[str, OnResume] = {}
    if now.train.align == "full":  # its numbers depend on the engines' tensor size
        special["rollout.engine_tensor"] = "fork"
    if before.reward.url and now.reward.url:  # the server has moved
        special["reward.url"] = "free"
    differences = []
    for section in fields(now):
        old, new = getattr(before, section.name), getattr(now, section.name)
        for name, marked in rules_of(type(new)).items():
            key, a, b = f"{section.name}.{name}", getattr(old, name), getattr(new, name)
            if a != b and key != "train.run_dir":
                differences.append(Change(key, a, b, special.get(key, marked)))
    return differences


def refused(changed: list[Change], *, fork: bool = False) -> list[Change]:
    """Return changes that make it another run; with ``fork``, those that its checkpoint forbids."""
    rules = ("never",) if fork else ("never", "fork")
    return [change for change in changed if change.rule in rules]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        entries = (f"{name}: {entry}" for name, entry in value.items())
        return f"{{{', '.join(entries)}}}"
    return "''" if value == "" else str(value)
