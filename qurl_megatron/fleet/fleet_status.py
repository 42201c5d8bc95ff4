"""``qurl fleet status``: the versions and load of engines, as they report them.

It needs no run and changes nothing, so it may look at any engine at any time.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qurl_megatron.config.keys import names_a_user
from qurl_megatron.engines.starting import given_key
from qurl_megatron.fleet.answer import Load
from qurl_megatron.fleet.client import EngineClient, EngineError, deadline
from qurl_megatron.kit.errors import ConfigError

PATIENCE_S = 10.0


def show(
    urls: Sequence[str], *, api_key_file: Path | None = None, console: Console | None = None
) -> int:
    """Print a table of the engines.

    Returns:
        0, or 1 where an engine of several did not answer.

    Raises:
        ConfigError: a URL is malformed, or nobody answers at any of them.
    """
    clients = [_client(url, _key(api_key_file)) for url in urls]
    with ThreadPoolExecutor(len(clients)) as pool:
        loads = list(pool.map(load_of, clients))
    silent = [load for load in loads if isinstance(load, EngineError)]
    if len(silent) == len(loads):
        raise ConfigError(str(silent[0]))
    (console or Console()).print(table(clients, loads))
    return 1 if silent else 0


def table(clients: Sequence[EngineClient], loads: Sequence[Load | EngineError]) -> Table:
    """Return a row for each engine."""
    grid = Table(box=None, pad_edge=False)
    for name in ("engine", "health", "version", "running", "queued", "model"):
        numbers = name in ("version", "running", "queued")
        grid.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for client, load in zip(clients, loads, strict=True):
        if isinstance(load, EngineError):
            grid.add_row(escape(client.url), f"[red]no answer[/]: {escape(str(load))}")
            continue
        health = "[yellow]paused[/]" if load.paused else "[green]ok[/]"
        queue = (str(load.running), str(load.waiting))
        grid.add_row(escape(client.url), health, escape(load.version), *queue, escape(load.model))
    return grid


def load_of(client: EngineClient) -> Load | EngineError:
    """Ask an engine for its load; return the error where it does not answer."""
    try:
        with deadline(PATIENCE_S):
            return client.load()
    except EngineError as error:
        return error


def _client(url: str, api_key: str | None) -> EngineClient:
    if not (names_a_user(url) or url.startswith(("http://", "https://"))):
        raise ConfigError(f"{url!r} is not an engine URL; give e.g. http://127.0.0.1:30000")
    try:
        return EngineClient(url, timeout_s=PATIENCE_S, api_key=api_key)
    except EngineError as error:
        raise ConfigError(str(error)) from None


def _key(file: Path | None) -> str | None:
    if file is None:
        return given_key(os.environ)
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"--api-key-file {file} cannot be read: {error.strerror}") from None
