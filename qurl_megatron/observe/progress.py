"""How far the run is: one line per step, and below them, in a terminal, one of the present phase.

step 12/60  reward 0.412  clip 0.3 %  k3 0.00123  flips 4.1 %  812 tok/s  2.29 s  eta 1m50s

Names that do not explain themselves are explained once, above the first of them.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from qurl_megatron.observe.failures import HERE
from qurl_megatron.observe.text import duration, number, percent

if TYPE_CHECKING:
    import rich.progress

FIELDS: dict[str, Callable[[float], str]] = {
    "reward/mean": lambda value: f"reward {value:.3f}",
    "reward/failed_fraction": lambda value: f"unscored {percent(value)}" if value else "",
    "eval/accuracy": lambda value: f"eval {percent(value)}",
    "eval/reward": lambda value: f"eval {value:.3f}",
    "policy/clip_fraction": lambda value: f"clip {percent(value)}",
    "rollout/kl_k3": lambda value: f"k3 {number(value)}",
    "quant/code_flip_rate": lambda value: f"flips {percent(value)}",
    "throughput/rollout_tokens_per_s": lambda value: f"{value:.0f} tok/s",
    "time/step": duration,
}
"""The parts of a step's line, in this order; metrics that the step lacks and empty parts are left
out."""

LEGEND = {
    "policy/clip_fraction": "clip: share of tokens that clipping cuts off",
    "rollout/kl_k3": "k3: KL of the sampling from the trained policy, per token",
    "quant/code_flip_rate": "flips: share of quantized weights whose code changed with the step",
}
"""Names of ``FIELDS`` that do not explain themselves."""

ETA_STEPS = 20  # recent steps that the remaining time is estimated from


class Progress:
    """Follows a run of ``total_steps`` steps, of which ``start_step`` are done already.

        with Progress(total_steps, start_step) as progress:
            progress.phase("rollout")
            ...
            progress.step(1, metrics)

    In a terminal, other output of this process appears above the line of the phase.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.done = start_step
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._intervals: deque[float] = deque(maxlen=ETA_STEPS)
        self._explained = False
        self._step_started = clock()
        self._display: rich.progress.Progress | None = None

    def __enter__(self) -> "Progress":
        self._step_started = self._clock()
        # Asked of the stream, not of rich: FORCE_COLOR makes rich take a log file for a terminal.
        if self._stream.isatty() and os.environ.get("TERM") != "dumb":
            self._display = _start_display(self._stream, self.total_steps)
        return self

    def close(self, *exception: object) -> None:
        """Remove the line of the phase; further output comes below the steps."""
        if self._display is not None:
            self._display.stop()
            self._display = None

    __exit__ = close

    def phase(self, name: str) -> None:
        """Show the phase that begins, and for how long it lasts."""
        HERE.enter(name)
        if self._display is not None:
            (task,) = self._display.task_ids
            self._display.reset(task, completed=self.done, description=name)

    def begin(self) -> None:
        """Begin a step; time before the first, such as for starting engines, does not count."""
        if not self._intervals:
            self._step_started = self._clock()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report a finished step; step 0 is the evaluation before training.

        It shows the time since the step before, saving and evaluating included, from which the
        remaining time is estimated; ``time/step`` leaves these out.
        """
        now = self._clock()
        if step > self.done:
            self._intervals.append((now - self._step_started) / (step - self.done))
            if "time/step" in metrics:
                metrics = {**metrics, "time/step": self._intervals[-1]}
        self._step_started, self.done = now, step
        legend = [text for name, text in LEGEND.items() if name in metrics]
        if legend and not self._explained:
            self._explained = True
            self._print("; ".join(legend), style="dim")
        self._print(self.line(metrics))

    def alarm(self, text: str) -> None:
        """Print a line that nobody overlooks."""
        self._print(f"*** {text}", style="bold red")

    def _print(self, line: str, style: str = "") -> None:
        if self._display is not None:
            from rich.text import Text

            self._display.console.print(Text(line, style=style))
        else:
            self._stream.write(line + "\n")  # one write: ranks share the log
            self._stream.flush()

    def line(self, metrics: Mapping[str, float]) -> str:
        """Return the line of the step just reported."""
        readings = [show(metrics[name]) for name, show in FIELDS.items() if name in metrics]
        parts = [f"step {self.done}/{self.total_steps}", *filter(None, readings)]
        pace = sum(self._intervals) / max(len(self._intervals), 1)
        if eta := pace * (self.total_steps - self.done):
            parts.append(f"eta {f'{eta:.0f}s' if eta < 59.5 else duration(eta)}")
        return "  ".join(parts)


def _start_display(stream: TextIO, total_steps: int) -> "rich.progress.Progress":
    from rich.console import Console  # not needed for a log file, and 0.1 s to import
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    display = Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=None),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),  # of the phase
        console=Console(file=stream),
        refresh_per_second=2,
        transient=True,
        expand=True,
    )
    display.add_task("starting", total=total_steps)
    display.start()
    return display
