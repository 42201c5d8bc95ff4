"""``qurl fleet status``: the versions and load of engines, as they report them.

It needs no run and changes nothing, so it may look at any engine at any time.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from qurl_megatron.config.keys import names_a_user
from qurl_megatron.engines.starting import given_key
from qurl_megatron.fleet.answer import Load
from qurl_megatron.fleet.client import EngineClient, EngineError, deadline
from qurl_megatron.kit.errors import ConfigError

PATIENCE_S = 10.0
BETWEEN_S = 0.5  # two looks at an engine that counts tokens, for their number per second


@dataclass(frozen=True)
class Row:
    """One engine at one moment."""

    url: str
    load: Load | None  # None: no answer
    error: str = ""
    tokens_per_s: float | None = None
    time: float = 0.0


def show(
    urls: Sequence[str],
    *,
    watch_s: float | None = None,
    api_key_file: Path | None = None,
    console: Console | None = None,
) -> int:
    """Print the table once, or until interrupted.

    Returns:
        0, or 1 where an engine of several did not answer.

    Raises:
        ConfigError: a URL is malformed, or nobody answers at any of them.
    """
    if watch_s is not None and watch_s <= 0:
        raise ConfigError(f"--watch must be a positive number of seconds, got {watch_s}")
    console = console or Console()
    clients = [_client(url, _key(api_key_file)) for url in urls]
    rows = look(clients)
    if all(row.load is None for row in rows):
        raise ConfigError(rows[0].error)
    if any(row.load and row.tokens_per_s is None for row in rows):
        time.sleep(BETWEEN_S)
        rows = look(clients, rows)
    if watch_s is None:
        console.print(table(rows))
        return 1 if any(row.load is None for row in rows) else 0
    with Live(table(rows), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(watch_s)
            rows = look(clients, rows)
            live.update(table(rows), refresh=True)


def look(clients: Sequence[EngineClient], before: Sequence[Row] = ()) -> list[Row]:
    """Ask all engines at once; ``before`` are the same engines' rows of the last look."""

    def ask(client: EngineClient) -> Row:
        try:
            with deadline(PATIENCE_S):
                load = client.load()
        except EngineError as error:
            return Row(client.url, None, str(error), time=time.monotonic())
        return Row(client.url, load, "", load.tokens_per_s, time.monotonic())

    with ThreadPoolExecutor(len(clients)) as pool:
        rows = list(pool.map(ask, clients))
    pairs = zip(rows, before or rows, strict=True)
    return [_with_speed(row, earlier) for row, earlier in pairs]


def table(rows: Sequence[Row]) -> Table:
    grid = Table(box=None, pad_edge=False)
    for name in ("engine", "health", "version", "running", "queued", "tokens/s", "model"):
        numbers = name in ("version", "running", "queued", "tokens/s")
        grid.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        load = row.load
        if load is None:
            grid.add_row(escape(row.url), f"[red]no answer[/]: {escape(row.error)}")
            continue
        grid.add_row(
            escape(row.url),
            "[yellow]paused[/]" if load.paused else "[green]ok[/]",
            escape(load.version),
            str(load.running),
            str(load.waiting),
            "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            escape(load.model),
        )
    return grid


def _with_speed(row: Row, earlier: Row) -> Row:
    """Return the row with a speed from two looks, for engines that only count their tokens."""
    if row.load is None or row.tokens_per_s is not None or earlier.load is None:
        return row
    seconds, now, then = row.time - earlier.time, row.load.generated, earlier.load.generated
    if now is None or then is None or seconds <= 0:
        return row
    speed = max(0, now - then) / seconds  # fewer than before: it has been restarted
    return Row(row.url, row.load, row.error, speed, row.time)


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
