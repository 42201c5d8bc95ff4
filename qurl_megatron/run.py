"""Runs from Python: start one, and read its folder."""

import ctypes
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qurl_megatron.config import RunConfig, load, to_toml
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.place import PR_SET_PDEATHSIG
from qurl_megatron.observe.metrics import History
from qurl_megatron.observe.samples import Example, read_samples
from qurl_megatron.observe.sinks import read_metrics
from qurl_megatron.training.state import RECIPE, checkpoints


class Run:
    """A run's folder. Everything is read anew when asked for, also while the run goes on."""

    def __init__(self, folder: Path | str) -> None:
        """
        Args:
            folder: ``train.run_dir``.

        Raises:
            ConfigError: it is not a run's folder.
        """
        self.folder = Path(folder)
        if not (self.folder / RECIPE).is_file():
            raise ConfigError(f"{self.folder} holds no {RECIPE}; name the folder of a run")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def config(self) -> RunConfig:
        """The recipe, resolved."""
        return load(self.folder / RECIPE)

    @property
    def metrics(self) -> Any:
        """Every metric of every step.

        Returns:
            Where pandas is installed a DataFrame with a row per step and a column per metric;
            else a dict of numpy arrays, equally long, "step" among them. NaN where a metric was
            not measured.

        Raises:
            ConfigError: no step has ended yet.
        """
        history = History(read_metrics(self.folder))
        steps = sorted({int(step) for name in history for step in history[name][0]})
        columns: dict[str, np.ndarray] = {"step": np.array(steps)}
        for name in sorted(history):
            measured_at, values = history[name]
            columns[name] = np.full(len(steps), np.nan)
            columns[name][np.searchsorted(steps, measured_at)] = values
        try:
            import pandas
        except ImportError:
            return columns
        return pandas.DataFrame(columns).set_index("step")

    @property
    def samples(self) -> list[Example]:
        """The responses that the run has kept, with rewards and advantages."""
        return read_samples(self.folder)

    @property
    def checkpoints(self) -> list[Path]:
        """Its checkpoints, oldest first; ``qurl export`` makes Hugging Face folders of them."""
        return checkpoints(self.folder)


def train(config: RunConfig) -> Run:
    """Train as ``qurl train`` does, in processes of its own, and print its output.

    Called again with the same config it resumes. It saves before it ends after Ctrl-C, or because
    this process has died.

    Raises:
        ConfigError: a mistake in the input, or the run ended before its last step; quotes its last
            line.
    """
    last_message = ""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / RECIPE
        recipe.write_text(to_toml(config), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "qurl_megatron.cli", "train", str(recipe)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # The kernel sends it SIGTERM, upon which it saves, when this process dies.
            preexec_fn=partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:  # printed here, so that notebooks show it
                print(line, end="", flush=True)
                if line.startswith("qurl: "):
                    last_message = line.removeprefix("qurl: ").rstrip()
        except KeyboardInterrupt:
            process.wait()  # the terminal sent it the signal, too: it saves, and ends
            raise
        code = process.wait()
    if code:
        raise ConfigError(last_message or f"qurl train ended with exit code {code}")
    return Run(config.train.run_dir)
