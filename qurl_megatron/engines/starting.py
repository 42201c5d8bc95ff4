"""Start engines on this machine: the inputs of every kind, and the resulting command."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.kit.errors import ConfigError

API_KEY = "QURL_API_KEY"
"""Environment variable that carries the key: command lines are there for everybody to read."""


def given_key(env: Mapping[str, str]) -> str | None:
    """The engines' API key, where the environment has one.

    Raises:
        ConfigError: no request could carry it: it is empty, or not plain text.
    """
    key = env.get(API_KEY)
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise ConfigError(
            f"{API_KEY} is set, but {'empty' if not key.strip() else 'has characters no key has'}; "
            "unset it, or set it to the key of the engines"
        )
    return key


def refuse_not_installed(config: RolloutConfig) -> None:
    """Raise ``ConfigError`` where engines are to be started here that are not installed."""
    if not (config.urls or config.rendezvous):
        importlib.import_module(config.kind.start).refuse_not_installed(config)


@dataclass(frozen=True)
class Launch:
    """How to start a process."""

    command: tuple[str, ...]
    env: dict[str, str] = field(repr=False)  # on top of one's own; may have the key


@dataclass(frozen=True, kw_only=True)
class Start:
    """Settings of one machine's engines; ``EngineKind.start`` makes a Launch of each."""

    config: RolloutConfig
    model_dir: Path
    port_files: Sequence[Path]
    """One per engine: where it writes its port, once requests are answered."""

    scheme: str
    dtype: str
    threads: int
    """Of each rank of an engine."""

    api_key: str
    empty: bool
    """The first version brings all weights."""

    trainer_ranks: int
    """Training ranks on this machine, each on the GPU of its number."""

    serve_command: Sequence[str]
    """Starts an embedded engine; the options of ``qurl serve`` follow."""

    @property
    def environment(self) -> dict[str, str]:
        """Threads, and the key, which no command line may show."""
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        return {**dict.fromkeys(names, str(self.threads)), API_KEY: self.api_key}
