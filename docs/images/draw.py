"""Draw the pictures of this folder anew: ``make pictures``, two minutes and Chromium.

It runs the quickstart in a terminal of its own, a pseudo-terminal, and takes the picture of what
that shows at the end, of the report in a desk's and in a telephone's browser, and the overview.
"""

import html
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from qurl_megatron.observe.drawing import COLORS, SECTIONS, STYLE, draw
from qurl_megatron.observe.metrics import History
from qurl_megatron.observe.report import REPORT_FILE
from qurl_megatron.observe.sinks import read_metrics

HERE = Path(__file__).parent
RECIPE = HERE.parents[1] / "launch" / "recipes" / "quickstart.toml"
OVERVIEW = ("reward", "clip", "kl", "rho_max", "flips", "phases")  # sum up a run
COLUMNS, ROWS = 108, 34  # of the terminal, and how many of its last lines are drawn
CELL = (7.83, 19)  # width and height of a character in pixels, at 13 pixels of font size
BACKGROUND, INK, DIM = "#14171a", "#e8eaed", "#9aa1ab"
BASIC = ("#4b525b", "#ff7b72", "#35c29b", "#e3b341", "#58b0ea", "#d58ab4", "#56c8d8", "#e8eaed")
CHROMIUM = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip

Cell = tuple[str, str]
"""A character and the attributes of its SVG text."""


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("pictures of the report need chromium or google-chrome on PATH")
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "quickstart"
        shown = run_in_terminal(
            [sys.executable, "-m", "qurl_megatron.cli", "train", str(RECIPE)]
            + [f"train.run_dir={run_dir}"]
        )
        rows = screen(shown.replace(f"{scratch}/", "runs/"))[-ROWS:]
        (HERE / "terminal.svg").write_text(terminal_svg(rows), encoding="utf-8")
        save_overview(History(read_metrics(run_dir)), HERE / "quickstart.png")
        for name, size, theme in (
            ("report.png", "1280,1500", ()),
            ("report_phone.png", "420,1500", ("--blink-settings=preferredColorScheme=0",)),
        ):
            subprocess.run(
                [browser, *CHROMIUM, *theme, f"--user-data-dir={scratch}/browser"]
                + [f"--window-size={size}", f"--screenshot={HERE / name}"]
                + [f"file://{run_dir / REPORT_FILE}"],
                check=True,
                capture_output=True,
            )


def save_overview(history: History, path: Path) -> None:
    """Save the pictures that sum up a run as one image, with titles and legends."""
    pictures = SECTIONS["Learning"] | SECTIONS["Quantization gap"] | SECTIONS["Time"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.4, 10.2), facecolor=COLORS["paper"], layout="constrained")
        figure.get_layout_engine().set(w_pad=0.18, h_pad=0.16)
        for place, key in enumerate(OVERVIEW, 1):
            axes = figure.add_subplot(3, 2, place)
            axes.set_title(pictures[key].title, loc="left", fontsize=13, fontweight="bold", pad=24)
            before = None  # label
            for line, _ in draw(axes, pictures[key], history):
                before = axes.annotate(
                    f"● {line.label}   ",
                    (0 if before is None else 1, 1),
                    xytext=(0, 7),
                    xycoords=(before or "axes fraction", "axes fraction"),
                    textcoords="offset points",
                    color=COLORS[line.color],
                    fontsize=10.5,
                    annotation_clip=False,
                )
        figure.savefig(path, dpi=130)


def run_in_terminal(command: list[str]) -> str:
    """Run a command in a pseudo-terminal of ``COLUMNS``; all that it wrote there."""
    ours, theirs = pty.openpty()
    environment = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | environment
    )
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:  # Linux says so where the other end is closed
        pass
    if process.wait():
        sys.exit(written.decode(errors="replace"))
    return written.decode(errors="replace")


def screen(written: str) -> list[list[Cell]]:
    """The rows of a terminal on which this was written: what rich uses of its commands."""
    rows: list[list[Cell]] = [[]]
    row = column = 0
    style = ""
    for code, letter, character in re.findall(r"\x1b\[([?\d;]*)([A-Za-z])|([^\x1b])", written):
        if letter == "m":
            style = _style(code, style)
        elif letter == "A":
            row = max(0, row - int(code or 1))
        elif letter == "K":
            rows[row] = rows[row][:column] if code in ("", "0") else []
        elif character == "\r":
            column = 0
        elif character == "\n" or character and column == COLUMNS:
            row, column = row + 1, 0
            rows.extend([] for _ in range(row + 1 - len(rows)))
        if character and character not in "\r\n":
            rows[row].extend((" ", "") for _ in range(column - len(rows[row])))
            rows[row][column : column + 1] = [(character, style)]
            column += 1
    while rows and not rows[-1]:
        rows.pop()
    return rows


def _style(code: str, style: str) -> str:
    """The attributes after a command that sets colours and weights."""
    numbers = [int(part or 0) for part in code.split(";")]
    while numbers:
        number = numbers.pop(0)
        color = ""
        if number == 0:
            style = ""
        elif number == 1:
            style += ' font-weight="bold"'
        elif number == 2:
            color = DIM
        elif 30 <= number <= 37:
            color = BASIC[number - 30]
        elif number == 38 and numbers[0] == 2:
            color = "#{:02x}{:02x}{:02x}".format(*numbers[1:4])
            del numbers[:4]
        elif number == 38:  # of 256 colours, greys are what is used
            color = BASIC[0]
            del numbers[:2]
        if color:
            style = re.sub(' fill="[^"]*"', "", style) + f' fill="{color}"'
    return style


def terminal_svg(rows: list[list[Cell]]) -> str:
    """Rows of characters as a drawing that needs no font of its own."""
    width, height = round(COLUMNS * CELL[0] + 32), len(rows) * CELL[1] + 32
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13" '
        f'fill="{INK}"><rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>'
    ]
    for place, row in enumerate(rows):
        start = 0
        while start < len(row):
            style = row[start][1]
            end = start + 1
            while end < len(row) and row[end][1] == style:
                end += 1
            text = "".join(character for character, _ in row[start:end])
            if text.strip():
                lines.append(
                    f'<text x="{16 + start * CELL[0]:.1f}" y="{16 + (place + 0.75) * CELL[1]:.1f}" '
                    f'textLength="{(end - start) * CELL[0]:.1f}" xml:space="preserve"{style}>'
                    f"{html.escape(text)}</text>"
                )
            start = end
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    main()
