"""Rollouts of 8 bits over BF16's, by the size of the model: the paper's Figure 8.

    qurl bench rollout --model Qwen2.5-Math-7B --schemes bf16 int8 --out runs/7b
    qurl bench rollout --model Qwen2.5-14B --schemes bf16 int8 --out runs/14b
    python -m benchmarks.speedups runs/7b/rollout.json runs/14b/rollout.json --out speedups.png

Each record gives the median ratio of tokens/s and its interval, as ``qurl bench rollout`` prints
them, for each of its loads and engines. The models stand in the order of the files.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.harness import read
from qurl_megatron.bench.rollout import Speedup, speedups
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.drawing import COLORS, STYLE
from qurl_megatron.observe.text import aligned

BARS = ("blue", "green", "orange", "purple")  # colours of the schemes


def setting(speedup: Speedup) -> str:
    """Return what stands below a bar: the model, its engine, its split and its load."""
    keys = speedup.case.keys
    split = f" x {keys['tensor']}" if keys.get("tensor", 1) != 1 else ""
    responses = int(keys["prompts"] or 0) * int(keys["samples"] or 0)
    return f"{keys['model']}{split}\n{keys['engine']}\n{responses} responses"


def table(ratios: Sequence[Speedup]) -> str:
    rows = [("setting", "scheme", "over BF16", "from", "to")]
    for s in ratios:
        median, low, high = (f"{value:.2f}" for value in (s.median, s.low, s.high))
        rows.append((setting(s).replace("\n", ", "), s.scheme, median, low, high))
    return "\n".join(aligned(rows, words=("setting", "scheme")))


def picture(ratios: Sequence[Speedup]) -> bytes:
    """Draw a bar for each ratio with its interval, in a group for each setting, as a PNG."""
    settings = list(dict.fromkeys(map(setting, ratios)))
    schemes = list(dict.fromkeys(s.scheme for s in ratios))
    width = 0.8 / len(schemes)
    with matplotlib.rc_context(STYLE):
        longest = max(len(line) for name in settings for line in name.splitlines())
        size = (max(5.0, max(1.7, 0.1 * longest) * len(settings) + 1), 4)
        figure = Figure(size, facecolor=COLORS["paper"], layout="constrained")
        axes = figure.add_subplot()
        axes.set_facecolor("none")
        for s in ratios:
            i = schemes.index(s.scheme)
            place = settings.index(setting(s)) + (i - (len(schemes) - 1) / 2) * width
            axes.bar(place, s.median, 0.92 * width, color=COLORS[BARS[i % len(BARS)]])
            axes.plot([place, place], [s.low, s.high], color=COLORS["ink"], lw=1.5)
        for i, scheme in enumerate(schemes):
            axes.bar(0, 0, color=COLORS[BARS[i % len(BARS)]], label=scheme)
        axes.axhline(1, color=COLORS["muted"], lw=1, ls="--")
        axes.set_ylim(top=1.2 * max(s.high for s in ratios))  # room for the legend
        axes.set_xticks(range(len(settings)), settings)
        axes.set_title("Tokens/s over BF16's (Fig. 8)", loc="left", weight="bold")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.legend(frameon=False, ncols=len(schemes), loc="upper right")
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("records", type=Path, nargs="+", help="rollout.json of qurl bench rollout")
    parser.add_argument("--out", type=Path, help="the picture, a PNG file")
    options = parser.parse_args(arguments)
    try:
        ratios = [s for path in options.records for s in speedups(read(path).cases)]
        if not ratios:
            raise ConfigError(
                "no record has a scheme beside bf16 of the same load; measure with "
                "--schemes bf16 int8"
            )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(ratios))
    if options.out:
        write_whole(options.out, picture(ratios))
    return 0


if __name__ == "__main__":
    sys.exit(main())
