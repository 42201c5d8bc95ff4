"""How far weights move over many steps, beside their quantization error: the paper's Figure 9.

    qurl train RECIPE.toml checkpoint.every=16 checkpoint.keep=1000
    python -m benchmarks.weight_changes RUN_DIR [--scheme int8] [--out DIR]

compares each saved checkpoint of a run with the one before it, over all weights that rollouts
quantize: the update of Eq. 13, the error of Eq. 14 and the codes that changed. A run's own metrics
have the same of single steps. Tensors are read one at a time, in FP32.
"""

import argparse
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

from qurl_megatron.checkpoints.source import Checkpoint, open_checkpoint
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.drawing import COLORS, STYLE
from qurl_megatron.observe.text import aligned, how_many, number, percent
from qurl_megatron.quant import code_flips, quantize, weight_error, weight_update
from qurl_megatron.schemes import SCHEMES, title
from qurl_megatron.training.state import checkpoints


@dataclass(frozen=True)
class Change:
    """Between two checkpoints of a run."""

    first: int  # steps
    last: int
    update: float  # ||new - old||^2 / ||old||^2, Eq. 13
    error: float  # ||Q(new) - new||^2 / ||new||^2, Eq. 14
    flips: float  # share of codes that differ


def change(first: tuple[int, Checkpoint], last: tuple[int, Checkpoint], scheme: str) -> Change:
    """Compare the weights that ``scheme`` quantizes."""
    (old_step, old), (new_step, new) = first, last
    update, error, flips = (torch.zeros(2, dtype=torch.float64) for _ in range(3))
    for op in new.ops():
        if not any(tensor.quantized for tensor in op.hf):
            continue
        old_shards, new_shards = old.reader.shards(op), new.reader.shards(op)
        for tensor in op.hf:
            before, after = old_shards[tensor.name].float(), new_shards[tensor.name].float()
            codes = quantize(after, scheme)
            update += weight_update(before, after)
            error += weight_error(after, codes)
            flips += code_flips(quantize(before, scheme).values, codes.values)
    shares = [(part / whole).item() for part, whole in (update, error, flips)]
    return Change(old_step, new_step, *shares)


def changes(run_dir: Path, scheme: str) -> list[Change]:
    """Return the change from each saved checkpoint to the next.

    Raises:
        ConfigError: the run has fewer than two, or one that cannot be read.
    """
    saved = checkpoints(run_dir)
    if len(saved) < 2:
        raise ConfigError(
            f"{run_dir} has {how_many(len(saved), 'checkpoint')}, and a change takes two; "
            "train with checkpoint.every=16 checkpoint.keep=1000"
        )
    opened = [(int(folder.name.removeprefix("step_")), open_checkpoint(folder)) for folder in saved]
    return [change(*pair, scheme) for pair in zip(opened, opened[1:], strict=False)]


def table(measured: Sequence[Change]) -> str:
    rows = [("steps", "update, Eq. 13", "error, Eq. 14", "update / error", "codes changed")]
    for c in measured:
        ratio = number(c.update / c.error)
        steps = f"{c.first} to {c.last}"
        rows.append((steps, number(c.update), number(c.error), ratio, percent(c.flips)))
    return "\n".join(aligned(rows, words=("steps",)))


def picture(measured: Sequence[Change], scheme: str) -> bytes:
    """Draw both over the steps, as a PNG."""
    steps = [c.last for c in measured]
    every = measured[0].last - measured[0].first
    curves = (
        (f"{title(scheme)}'s error, Eq. 14", "orange", [c.error for c in measured]),
        (f"update over {every} steps, Eq. 13", "blue", [c.update for c in measured]),
    )
    with matplotlib.rc_context(STYLE):
        figure = Figure((7, 4), facecolor=COLORS["paper"], layout="constrained")
        axes = figure.add_subplot()
        axes.set_facecolor("none")
        for label, color, values in curves:
            axes.plot(steps, values, "o-", color=COLORS[color], label=label)
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_title("Relative squared change of weights (Fig. 9)", loc="left", weight="bold")
        axes.grid(color=COLORS["rule"], lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path, help="folder of a run")
    quantizing = [name for name in SCHEMES if name != "none"]
    parser.add_argument("--scheme", choices=quantizing, default="int8")
    parser.add_argument("--out", type=Path, help="folder for weight_changes.json and .png")
    options = parser.parse_args(arguments)
    try:
        measured = changes(options.run_dir, options.scheme)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(measured))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        record = {"scheme": options.scheme, "changes": [asdict(c) for c in measured]}
        write_whole(options.out / "weight_changes.json", json.dumps(record, indent=1) + "\n")
        write_whole(options.out / "weight_changes.png", picture(measured, options.scheme))
    return 0


if __name__ == "__main__":
    sys.exit(main())
