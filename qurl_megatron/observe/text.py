"""Numbers as people read them: short, and with their unit."""

import math
from collections.abc import Collection, Sequence

from qurl_megatron.observe.catalogue import known

NARROW_SPACE = "\u202f"
MINUS = "\u2212"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def percent(value: float) -> str:
    """0.00312 -> "0.3 %"; below 0.1 % one significant digit, so that a rare event is not a zero."""
    if not math.isfinite(value):
        return str(value)
    share = 100 * value
    if share == 0 or abs(share) >= 0.095:
        return f"{share:.1f} %"
    if abs(share) >= 1e-4:
        return f"{share:.1g} %"
    return f"{power_of_ten(share)} %"


def byte_size(count: float) -> str:
    """2_345_678 -> "2.35 MB"; powers of 1000."""
    power = min(int(math.log10(max(count, 1))) // 3, 4)
    return f"{count / 1000**power:.{2 if power else 0}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def power_of_ten(value: float) -> str:
    """2e-5 -> "2·10⁻⁵", 1e-3 -> "10⁻³"."""
    mantissa, exponent = f"{value:.2e}".split("e")
    mantissa = f"{float(mantissa):g}"
    power = "10" + str(int(exponent)).translate(_SUPERSCRIPT)
    return {"1": power, "-1": "-" + power}.get(mantissa, f"{mantissa}·{power}")


def number(value: float) -> str:
    """Format three significant digits; separate thousands, write large and small ones as powers."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e7:
        text = power_of_ten(value)
    elif abs(value) >= 1000:
        text = f"{value:,.0f}".replace(",", NARROW_SPACE)
    elif value == round(value):
        text = f"{value:.0f}"
    else:
        text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return text.replace("-", MINUS)


def aligned(rows: Sequence[Sequence[str]], *, words: Collection[str]) -> list[str]:
    """Return the lines of a table whose first row has headings; ``words`` are those of columns
    aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for heading, cell, width in zip(rows[0], row, widths, strict=True):
            cells.append(cell.ljust(width) if heading in words else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def how_many(count: int, noun: str) -> str:
    """1, "answer" -> "1 answer"; 2, "answer" -> "2 answers"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(seconds: float) -> str:
    """2.31 -> "2.31 s", 110 -> "1m50s", 7500 -> "2h05m"."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{seconds_left:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"


def reading(name: str, value: float) -> str:
    """Return a metric's value with the unit that the catalogue gives it."""
    unit_name = known(name).unit
    if unit_name == "share":
        return f"{number(100 * value)}{NARROW_SPACE}%"
    if unit_name == "seconds":
        return duration(value)
    if unit_name == "near 1" and abs(value - 1) < 0.5:
        return f"{value:.4f}"
    return number(value)
