"""docs/performance.md, made from the records in docs/results.

``python -m benchmarks.performance`` rewrites it; a test holds it equal to ``rendered``.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.against import most_figures
from benchmarks.harness import read
from benchmarks.repeats import ANOTHER_LOAD
from qurl_megatron.bench.record import SCHEMA, BenchRecord, Case, Figure, percent
from qurl_megatron.kit.disk import read_json
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.text import how_many, number

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "performance.md"
RESULTS = DOCS / "results"
TITLES = {
    "rollout": "engines under a load with long-tailed, grouped responses",
    "step": "seconds of a whole RL step, with rollouts in turn and ahead, and its scaling",
    "publish": "publishing a version to a real SGLang engine, by transport",
    "publish_nodes": "publishing to engines on two nodes, over a link of 2 Gbit/s",
    "publish_fleet": "publishing to 4 and to 64 engines, each with a link of its own",
    "loss": "time and memory of log-probs, entropy and the ACR objective",
    "quantize": "quantizing one layer's weights, beside a copy of the bytes",
    "specs": "Transformer Engine's layers and Adam beside Megatron's own",
    "memory": "memory on one GPU, beside the rows of the dry run",
    "scale": "CPU seconds of the leading rank in a step, by its engines",
    "many_tensors": "CPU seconds of a version's tensors beside their bytes, by their count",
    "decode": "tokens/s of the embedded engine by scheme and batch",
    "convert": "the checkpoint converters, beside a plain copy and peers",
    "versions": "whether the engines of a run served what its checkpoints hold",
}
"""Titles by benchmark; the last three are measured no more."""

HEAD = f"""\
# Measured

Every table is one record, in [results](results), and this page is made of them
(`python -m benchmarks.performance`). To measure your own machine, and, in a checkout, to hold a
measurement against an older one:

```sh
qurl bench rollout --out runs/bench         # a table, and runs/bench/rollout.json
python -m benchmarks.loss --out runs/bench  # likewise scale, many_tensors and others
python -m benchmarks.against OLD NEW        # two such files; 0 not slower, 1 slower, 3 unknown
```

`against` compares only what was measured alike: the same hardware, and cases with the same
settings. Each repeat is divided by the yardstick beside it, and all new ones are set against all
old ones, by the rank test of Mann and Whitney. Where memory was read at rates more than 15 % apart,
as other guests of a host make it, no time is judged. The more figures there are, the more repeats
it takes to show that one is worse: {most_figures(6)} figures at most with six repeats in both
records, {most_figures(8)} with eight, {most_figures(10)} with ten.

A cell is the median, half of the interquartile range after ±, and the share of the limit in
brackets; the limits stand under each table. Cases marked * cannot be compared with others, for the
reason given below the table. Some records were made by benchmarks and with options that are gone:
peers, vLLM, latencies, joules, `decode`, `convert` and `versions`.
[performance-notes.md](performance-notes.md) sets these figures beside what was aimed at.
"""
MEANINGS = {ANOTHER_LOAD: f"{ANOTHER_LOAD}: something else used the machine meanwhile"}
"""Of reasons without a note of their case."""


def rendered(folder: Path = RESULTS) -> str:
    """Return the page: benchmarks in the order of ``TITLES``, records of one by file name.

    Raises:
        ConfigError: a record cannot be read.
    """
    order = list(TITLES)
    files = [
        path for path in sorted(folder.glob("*.json")) if read_json(path).get("schema") == SCHEMA
    ]
    records = sorted(
        ((path, read(path)) for path in files), key=lambda item: order.index(item[1].benchmark)
    )
    count = Counter(record.benchmark for _, record in records)
    sections = []
    for path, record in records:
        title = TITLES[record.benchmark]
        if count[record.benchmark] > 1:
            title += f": {path.stem}"
        sections.append(_section(title, path, record))
    return "\n".join([HEAD, *sections])


def _other_work(environment: Mapping[str, Any]) -> str:
    """Return what else a record's machine did, in a few words; "" where it is not known."""
    if "others" in environment:
        return f"others used {environment['others']:.0%} of the cores"
    loads = [environment[key] for key in ("load_before", "load_after") if key in environment]
    return f"load {' to '.join(f'{load:.2g}' for load in loads)}" if loads else ""


def _section(title: str, path: Path, record: BenchRecord) -> str:
    environment = record.environment
    facts = [
        f"`{record.command}`",
        *(gpu["name"] for gpu in environment["gpus"]),
        f"{environment['cpu']}, {environment['cores']} cores",
        ", ".join(environment["instructions"]),
        _other_work(environment),
        record.started[:10],
        f"[{path.name}](results/{path.name})",
    ]
    lines = [f"## {title[0].upper()}{title[1:]}", "", "; ".join(filter(None, facts)) + ".", ""]
    shown = [case for case in record.cases if case.figures]
    for setting, cases in _by_setting(shown).items():
        if setting:
            lines += [f"{setting}:", ""]
        lines += [*_table(cases), ""]
    lines += [f"- {line}" for line in _remarks(record.cases)]
    return "\n".join(lines).rstrip() + "\n"


def _by_setting(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Return the cases of each table: those of one model under one load."""
    settings: dict[str, list[Case]] = {}
    for case in cases:
        model = case.keys.get("model")
        shape = [f"Shape {model}"] if model else []
        settings.setdefault(", ".join([*shape, *_load(case.keys)]), []).append(case)
    return settings


def _load(keys: Mapping[str, Any]) -> list[str]:
    """Return the load of a case of `qurl bench rollout`; nothing for other benchmarks."""
    if "samples" not in keys:
        return []
    responses = how_many(keys["prompts"] * keys["samples"], "response")
    asked = [f"{responses} to {how_many(keys['prompts'], 'prompt')}", "all at once"]
    if keys["publish"] == "half":
        asked.append("new weights at half")
    elif keys["publish"]:
        asked.append(f"new weights {keys['publish']} times")
    return asked


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
    return text


def _remarks(cases: list[Case]) -> list[str]:
    """Return what stands under a table: limits, engines, and why cases cannot be compared."""
    limits: dict[str, list[str]] = {}
    for case in cases:
        for figure in case.figures:
            if figure.limit is not None and figure.limit_of not in limits.get(figure.name, []):
                limits.setdefault(figure.name, []).append(figure.limit_of)
    lines = [f"Limit of {name}: {', or '.join(what)}." for name, what in limits.items()]
    if engines := [f"{name} ({case.name})" for case in cases if (name := _engine(case))]:
        lines.append(f"Engines: {'; '.join(engines)}.")
    reasons: dict[str, list[str]] = {}
    for case in cases:
        for reason in case.reasons:
            why = case.why(reason) if reason in case.notes else MEANINGS.get(reason, reason)
            reasons.setdefault(why, []).append(case.name)
    for why, names in reasons.items():
        every = set(names) == {case.name for case in cases if case.figures}
        lines.append(f"{why} ({'every case' if every else '; '.join(names)}).")
    return [line[0].upper() + line[1:] for line in lines]


def _engine(case: Case) -> str:
    """Return an engine's name and version by its own account, for a URL says neither; or ""."""
    identity = case.notes.get("identity", {})
    if "version" not in identity:
        return ""
    given = str(case.keys["engine"])
    name = identity.get("engine") or (f"{identity['model']}, version" if "://" in given else given)
    return f"{name} {identity['version']}"


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
