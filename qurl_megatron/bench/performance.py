"""docs/performance.md, made from the records in docs/results.

``python -m qurl_megatron.bench.performance`` writes it anew; a test holds it equal to ``rendered``.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from qurl_megatron.bench.environment import beside
from qurl_megatron.bench.options import BENCHMARKS
from qurl_megatron.bench.record import Case, Figure, Record, percent, records_in
from qurl_megatron.errors import ConfigError
from qurl_megatron.observe.text import number

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "performance.md"
RESULTS = DOCS / "results"
NO_MODULE = "_decode."
"""A decode step that begins so is torch's because of the file named, not of processor or scheme."""

HEAD = """\
# Measured

Every table is one record of `qurl bench`, in [results](results), and this page is made of them
(`python -m qurl_megatron.bench.performance`). To measure your own machine, and to hold it against
an older measurement:

```sh
qurl bench decode --out runs/bench                  # a table, runs/bench/decode.json, index.html
qurl bench decode --against runs/bench/decode.json  # exit code 0 not slower, 1 slower, 3 no verdict
qurl bench all                                      # a short form of each, in runs/bench/short
```

`--against` compares only what was measured alike: the same hardware, and cases with the same model,
tokens, steps and threads. No time is judged where the machine read its memory at rates more than
15 % apart, as other guests of a host make it: then measure both again, one after the other.
`qurl bench all` names what cannot be run on this machine, goes on with the rest, and leaves with
exit code 0 where at least one benchmark ran, otherwise with 1.

A cell is the median, half of the interquartile range after ±, the share that it reaches of the
limit in brackets, and after → what was predicted, by the formulas as of the record: today's
`qurl plan` may say something else. What the limits are stands under each table.
Cases marked * cannot be compared with others; why stands below, too.
[performance-notes.md](performance-notes.md) tells what moved these figures, and what did not.
"""


def rendered(folder: Path = RESULTS) -> str:
    """The page.

    Raises:
        ConfigError: a record cannot be read.
    """
    records = records_in(folder)
    count = Counter(record.benchmark for record in records.values())
    sections = [
        _section(path, record, alone=count[record.benchmark] == 1)
        for path, record in records.items()
    ]
    return "\n".join([HEAD, *sections])


def _section(path: Path, record: Record, *, alone: bool) -> str:
    """
    Args:
        alone: no other section is of this benchmark.
    """
    environment = record.environment
    title = BENCHMARKS[record.benchmark].help + ("" if alone else f": {path.stem}")
    facts = [
        f"`{record.command}`",
        f"{environment['cpu']}, {environment['cores']} cores",
        *([", ".join(found)] if (found := environment.get("instructions")) else []),
        *beside(environment),
        record.started[:10],
        f"[{path.name}](results/{path.name})",
    ]
    lines = [f"## {title[0].upper()}{title[1:]}", "", "; ".join(facts) + ".", ""]
    shown = [case for case in record.cases if case.figures]
    for keys, cases in _by_model(shown).items():
        if keys:
            lines += [f"{keys}:", ""]
        lines += [*_table(cases), ""]
    lines += [f"- {line}" for line in _remarks(record.cases)]
    return "\n".join(lines).rstrip() + "\n"


def _by_model(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """In one table stand cases of one model."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        model = case.keys.get("model")
        found.setdefault(f"Shape {model}" if model else "", []).append(case)
    return found


def _table(cases: list[Case]) -> list[str]:
    heads = list(dict.fromkeys((f.name, f.unit) for case in cases for f in case.figures))
    lines = [
        "| | " + " | ".join(f"{name}, {unit}" for name, unit in heads) + " |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for case in cases:
        figures = {(figure.name, figure.unit): figure for figure in case.figures}
        shown = [_cell(figures[head]) if head in figures else "" for head in heads]
        lines.append(f"| {case.name}{' *' if case.reasons else ''} | " + " | ".join(shown) + " |")
    return lines


def _cell(figure: Figure) -> str:
    text = number(figure.median)
    if len(figure.repeats) > 1:
        text += f" ±{percent(figure.spread)}"
    if figure.share is not None:
        text += f" ({percent(figure.share)})"
    if figure.predicted is not None:
        text += f" → {number(figure.predicted)}"
    return text


def _remarks(cases: list[Case]) -> list[str]:
    limits: dict[str, list[str]] = {}
    for case in cases:
        for figure in case.figures:
            if figure.limit is not None and figure.limit_of not in limits.get(figure.name, []):
                limits.setdefault(figure.name, []).append(figure.limit_of)
    found = [f"Limit of {name}: {', or '.join(what)}." for name, what in limits.items()]
    reasons: dict[str, list[str]] = {}
    for case in cases:
        for reason in case.reasons:
            reasons.setdefault(case.why(reason), []).append(case.name)
        step = case.notes.get("decode step", "")
        if step.startswith(NO_MODULE):
            reasons.setdefault(f"decoded by torch: {step}", []).append(case.name)
    for why, names in reasons.items():
        every = set(names) == {case.name for case in cases if case.figures}
        found.append(f"{why} ({'every case' if every else '; '.join(names)}).")
    return [line[0].upper() + line[1:] for line in found]


def main() -> int:
    try:
        PAGE.write_text(rendered(), encoding="utf-8")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(PAGE.relative_to(DOCS.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
