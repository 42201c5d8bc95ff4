"""How far the run is: a live display in a terminal, one line per step in a log file.

step 12/60  reward 0.412  clip 0.3 %  k3 1.2e-3  flips 4.1 %  812 tok/s  2.29 s  eta 1m50s

A name that does not explain itself is explained once, above the first line that has it.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from qurl_megatron.observe.failures import HERE
from qurl_megatron.observe.text import duration, percent, scientific

if TYPE_CHECKING:
    from rich.console import RenderableType

FIELDS: dict[str, Callable[[float], str]] = {
    "reward/mean": lambda value: f"reward {value:.3f}",
    "reward/failed_fraction": lambda value: f"unscored {percent(value)}" if value else "",
    "eval/accuracy": lambda value: f"eval {percent(value)}",
    "eval/reward": lambda value: f"eval {value:.3f}",
    "policy/clip_fraction": lambda value: f"clip {percent(value)}",
    "rollout/kl_k3": lambda value: f"k3 {scientific(value)}",
    "quant/code_flip_rate": lambda value: f"flips {percent(value)}",
    "throughput/rollout_tokens_per_s": lambda value: f"{value:.0f} tok/s",
    "time/step": duration,
}
"""What a step's line shows, in this order; a metric that the step lacks is left out, as is one that
has nothing to say."""

LEGEND = {
    "policy/clip_fraction": "clip: share of tokens that clipping cuts off",
    "rollout/kl_k3": "k3: KL of the sampling from the trained policy, per token",
    "quant/code_flip_rate": "flips: share of quantized weights whose code changed with the step",
}
"""Names of ``FIELDS`` that do not explain themselves."""

ETA_STEPS = 20  # recent steps that the remaining time is estimated from


class Progress:
    """Follows a run of ``total_steps`` steps, of which ``start_step`` are done already.

        with Progress(total_steps, start_step, enabled=rank == 0) as progress:
            progress.phase("rollout")
            ...
            progress.step(1, metrics)

    In a terminal, what this process prints meanwhile appears above the display.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.done = start_step
        self._enabled = enabled
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._metrics: dict[str, float] = {}
        self._intervals: deque[float] = deque(maxlen=ETA_STEPS)
        self._phase = ""
        self._explained: set[str] = set()  # names of LEGEND
        self._started = self._phase_started = self._step_started = clock()
        self._live = None

    def __enter__(self) -> "Progress":
        self._started = self._phase_started = self._step_started = self._clock()
        # Asked of the stream, not of rich: FORCE_COLOR makes rich take a log file for a terminal.
        terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        if self._enabled and terminal:
            self._live = _start_live(self._render, self._stream)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the last state of the display where it is; what is printed next comes below it."""
        self._phase = ""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        """Show what the run is busy with from now on."""
        self._phase, self._phase_started = name, self._clock()
        HERE.enter(name)

    def begin(self) -> None:
        """A step begins; what came before the first, such as starting engines, is no part of it."""
        if not self._intervals:
            self._step_started = self._clock()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report a finished step; step 0 is the evaluation before training.

        Shown is the time since the step before, saving and evaluating included, as the remaining
        time is estimated from; not ``time/step``, which leaves these out.
        """
        now = self._clock()
        if step > self.done:
            self._intervals.append((now - self._step_started) / (step - self.done))
            if "time/step" in metrics:
                metrics = {**metrics, "time/step": self._intervals[-1]}
        self._step_started, self.done = now, step
        self._metrics |= metrics
        if unexplained := [name for name in LEGEND if name in metrics.keys() - self._explained]:
            self._explained.update(unexplained)
            self._print("; ".join(LEGEND[name] for name in unexplained), style="dim")
        if self._live is None:
            self._print(self.line(metrics))

    def alarm(self, text: str) -> None:
        """A line that nobody overlooks, above the display or in the log."""
        self._print(f"*** {text}", style="bold red")

    def _print(self, line: str, style: str = "") -> None:
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(line, style=style))
        elif self._enabled:
            self._stream.write(line + "\n")  # one write: ranks share the log
            self._stream.flush()

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end at the pace of the last steps, or None before the first of them."""
        if not self._intervals:
            return None
        return (self.total_steps - self.done) * sum(self._intervals) / len(self._intervals)

    def line(self, metrics: Mapping[str, float]) -> str:
        """The log line of the step just reported."""
        parts = [f"step {self.done}/{self.total_steps}", *_readings(metrics)]
        if self.eta_seconds:
            parts.append(f"eta {_whole_seconds(self.eta_seconds)}")
        return "  ".join(parts)

    def _render(self) -> "RenderableType":
        """Two rows: how far, and what the last step measured."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self._clock()
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        eta = f"   eta {_whole_seconds(self.eta_seconds)}" if self.eta_seconds else ""
        bar.add_row(
            Text(f"step {self.done}/{self.total_steps}", style="bold"),
            ProgressBar(total=max(self.total_steps, 1), completed=self.done),
            Text(f"{_whole_seconds(now - self._started)}{eta}", style="dim"),
        )
        row = Text(no_wrap=True, overflow="ellipsis")
        if self._phase:
            row.append(f"{self._phase} {now - self._phase_started:.0f} s", style="cyan")
            row.append("   ")
        row.append("  ".join(_readings(self._metrics)))
        return Group(bar, row)


def _readings(metrics: Mapping[str, float]) -> list[str]:
    shown = (show(metrics[name]) for name, show in FIELDS.items() if name in metrics)
    return [text for text in shown if text]


def _whole_seconds(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 59.5 else duration(seconds)


def _start_live(render: Callable[[], "RenderableType"], stream: TextIO):
    from rich.console import Console  # not needed for a log file, and 0.1 s to import
    from rich.live import Live

    live = Live(
        console=Console(file=stream),
        get_renderable=render,
        refresh_per_second=2,
        vertical_overflow="crop",
    )
    live.start()
    return live
