"""The tables of docs/mismatch.md, made from the records of its studies.

    python -m benchmarks.mismatch_page [OUT ...] [--times OUT ...]

keeps what ``qurl study`` has written to each OUT as docs/results/NAME.json, NAME being that of the
study's file, and writes the tables again between the two marks of the page; a test holds them
equal. Seconds are worth nothing where something else ran beside a study: with ``--times`` they are
those of another folder of the same study, whose runs had the machine to themselves. A record has
one row for each method and scheme, in the order of the study file:

    {"title": ..., "cpu": ..., "cores": ..., "steps": ..., "timed": {"steps": ..., ...} or null,
     "rows": [{"scheme": "int8", "family": "Shape the weights", "label": "UAQ, s = 1.5",
     "kl_mean": 1.2e-5, ...}, ...]}
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from qurl_megatron.bench.record import environment
from qurl_megatron.evaluation.study_results import NOTHING
from qurl_megatron.kit.disk import read_json, write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.text import MINUS, number, percent

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "mismatch.md"
RESULTS = DOCS / "results"
NAMES = "mismatch_*.json"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"
LOSS = "Correct the loss"
"""The family whose members change nothing that is measured here but time: one row holds them."""
FAMILIES = {
    LOSS: ("naive", "proximal", "decoupled", "tis", "acr", "icepop", "rejection"),
    "Shape the weights": ("uaq", "stochastic", "dithered"),
    "Align the forward": ("align_weights", "align_full"),
    "Replay the routing": ("tis_replay", "acr_replay"),
}
"""Methods of the studies, by the heading under which the page lists them."""

Row = Mapping[str, Any]

COLUMNS: dict[str, tuple[str, str, Callable[[float], str]]] = {
    "KL": ("kl_mean", "mean", number),
    "Largest ρ": ("rho_max", "high", number),
    "Routes differ": ("routes_differ", "mean", percent),
    "Flips": ("code_flip_rate", "mean", percent),
    "Update passed": ("update_passed", "mean", number),  # but see _passed
    "Reward": ("reward", "mean", number),
    "Step, s": ("step_seconds", "mean", number),
}
"""Heading: a number of ``study_results.FINALS``, the part of its spread, how it is written."""


PASSED_STD = "update_passed_std"
SECONDS = "step_seconds"


def record(
    study: Mapping[str, Any],
    this_machine: Mapping[str, Any],
    times: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the record of a study.json: rows without curves, and where they were measured.

    Args:
        this_machine: its ``environment``, for a study that names none; ``measured_there`` is false
            then, and nobody knows the commit.
        times: study.json with the seconds of a step; None takes those of ``study`` itself.

    Raises:
        ConfigError: a setting has not been timed.
    """
    recipe = study["recipe"]
    machine = study.get("environment") or {**this_machine, "commit": None}
    rows = []
    for name, measured in study["groups"].items():
        method, scheme = name.rsplit(",", 1)
        group = measured | _seconds(name, measured, times)
        row = {
            "scheme": scheme,
            "family": next((f for f, members in FAMILIES.items() if method in members), ""),
            "label": study["methods"][method]["label"],
            "runs": group["done"],
        }
        for key, part, _ in COLUMNS.values():
            row[key] = _rounded(group[key], part)
        rows.append({**row, PASSED_STD: _rounded(group[PASSED_STD], "mean")})
    return {
        "title": study["study"],
        "version": study["version"],
        "measured_there": study.get("environment") is not None,
        **{key: machine[key] for key in ("cpu", "cores", "commit")},
        "steps": recipe["train"]["steps"],
        "prompts": recipe["data"]["prompts_per_step"],
        "responses": recipe["rollout"]["samples_per_prompt"],
        "tokens": recipe["rollout"]["max_new_tokens"],
        "timed": times and _timed(times),
        "rows": rows,
    }


def rendered(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text between the marks of the page.

    Args:
        records: by name of their file.
    """
    return "\n".join(_section(name, record) for name, record in records.items())


def page(text: str, tables: str) -> str:
    """Return ``text`` with other tables between its marks.

    Raises:
        ConfigError: it lacks them.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"{PAGE} lacks the lines {BEGIN.strip()} and {END.strip()}; restore them")
    return f"{before}{begin}\n{tables}\n{end}{after}"


def kept() -> dict[str, dict[str, Any]]:
    """Return the records in docs/results, by name of their file."""
    return {path.name: read_json(path) for path in sorted(RESULTS.glob(NAMES))}


def _seconds(
    name: str, group: Mapping[str, Any], times: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the seconds of a step where other runs were timed, unless the setting was not run."""
    if times is None or not group["done"]:
        return {}
    seconds = times["groups"].get(name, {}).get(SECONDS)
    if seconds is None:
        raise ConfigError(
            f"--times: no run of {name} is done among those of {times['name']}; run them all, with "
            "qurl study, or leave --times out"
        )
    return {SECONDS: seconds}


def _timed(times: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of steps of the timed runs, and their machine."""
    machine = times.get("environment", {})
    keys = ("cpu", "cores", "commit", "load_before")
    return {"steps": times["recipe"]["train"]["steps"], **{key: machine.get(key) for key in keys}}


def _rounded(spread: Mapping[str, float] | None, part: str) -> float | None:
    return None if spread is None else float(f"{spread[part]:.6g}")


def _section(name: str, record: Mapping[str, Any]) -> str:
    rows = record["rows"]
    machine = f"{record['cpu']}, {record['cores']} cores"
    if not record["measured_there"]:
        machine = f"tables made on {machine}"
    facts = (
        f"{record['steps']} steps of {record['prompts']} prompts x {record['responses']} responses "
        f"of up to {record['tokens']} tokens; {machine}; [{name}](results/{name})."
    )
    if not all(row["runs"] for row in rows):
        facts += f" {NOTHING} in a whole row: not run."
    facts += f" {_about_the_times(record['timed'])}"
    columns = [
        column
        for column, (key, _, _) in COLUMNS.items()
        if any(row.get(key) is not None for row in rows)  # older records have fewer
    ]
    lines = [f"### {record['title']}", "", facts, "", *_table(_merged(rows), _setting, columns)]
    members = [row for row in rows if row["family"] == LOSS]
    if len(members) > len({row["scheme"] for row in members}):
        alone = [[row] for row in members]
        lines += ["", f"{LOSS}, one by one:", "", *_table(alone, _label, columns)]
    return "\n".join(lines) + "\n"


def _about_the_times(timed: Mapping[str, Any] | None) -> str:
    if timed is None:
        return "Seconds are of the same runs, beside which other work may have run."
    known = [f"{timed['cpu']}, {timed['cores']} cores"] if timed["cpu"] else []
    if timed["load_before"] is not None:
        known.append(f"load of {timed['load_before']:.2g} before")
    about = f" ({'; '.join(known)})" if known else ""
    return f"Seconds are of runs of {timed['steps']} steps made one after another, alone{about}."


def _merged(rows: Iterable[Row]) -> list[list[Row]]:
    """Group a record's rows as the table shows them: those of ``LOSS`` in a scheme are one."""
    merged: list[list[Row]] = []
    for (_, family), members in groupby(rows, lambda row: (row["scheme"], row["family"])):
        together = list(members)
        merged += [together] if family == LOSS else [[row] for row in together]
    return merged


def _table(
    rows: Sequence[Sequence[Row]], label: Callable[[Sequence[Row]], str], columns: Sequence[str]
) -> list[str]:
    head = ["Rollouts", "Setting", *columns]
    lines = [f"| {' | '.join(head)} |", f"|---|---|{'---:|' * len(columns)}"]
    for members in rows:
        scheme = members[0]["scheme"]
        cells = ["unquantized" if scheme == "none" else scheme.upper(), label(members)]
        for column in columns:
            key, _, write = COLUMNS[column]
            if key == "update_passed":
                cells.append(_passed(members))
            else:
                cells.append(_range([row[key] for row in members], write))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _setting(members: Sequence[Row]) -> str:
    family = members[0]["family"]
    if len(members) > 1:
        return f"{family}: all {len(members)}"
    return f"{family}: {_label(members)}" if family else _label(members)


def _label(members: Sequence[Row]) -> str:
    return members[0]["label"]


def _range(values: Sequence[float | None], write: Callable[[float], str]) -> str:
    """Write values as "3.1 to 3.4", or as one number where they read alike."""
    measured = [value for value in values if value is not None]
    if not measured:
        return NOTHING
    low, high = write(min(measured)), write(max(measured))
    return low if low == high else f"{low} to {high}"


def _passed(members: Sequence[Row]) -> str:
    """Write the share with its standard deviation over the steps, the largest of several rows."""
    shares = [row["update_passed"] for row in members if row["update_passed"] is not None]
    if not shares:
        return NOTHING
    stds = [row[PASSED_STD] for row in members if row[PASSED_STD] is not None]
    return plus_minus(min(shares), max(shares), max(stds, default=None))


def _read(out: Path) -> dict[str, Any]:
    """Return the study.json in a folder; raise ``ConfigError`` if there is none."""
    source = out / "study.json"
    if not source.is_file():
        raise ConfigError(f"{source} is missing; run qurl study STUDY.toml --out {out}")
    return read_json(source)


def _records(folders: Sequence[Path], times: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return records by the name of their study.

    Raises:
        ConfigError: a folder has no study.json, or one of another name; or times are of a study
            that is not given.
    """
    studies = {}
    for folder in folders:
        study = _read(folder)
        if not Path(f"{study['name']}.json").match(NAMES):
            raise ConfigError(
                f"{folder / 'study.json'} is of a study {study['name']}, and only those named like "
                f"{NAMES.removesuffix('.json')} are kept; rename the study's file"
            )
        studies[study["name"]] = study
    timed = {study["name"]: study for study in map(_read, times)}
    for name in timed.keys() - studies.keys():
        raise ConfigError(f"--times has seconds of {name}; name the folder of its tables too")
    machine = environment()
    return {name: record(study, machine, timed.get(name)) for name, study in studies.items()}


def _keep(name: str, record: dict[str, Any]) -> None:
    rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in record.pop("rows"))
    rest = json.dumps(record, indent=1, ensure_ascii=False).removesuffix("\n}")
    content = f'{rest},\n "rows": [\n  {rows}\n ]\n}}\n'
    write_whole(RESULTS / f"{name}.json", content)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, nargs="*", help="folder of a qurl study")
    parser.add_argument(
        "--times", type=Path, nargs="+", default=[], metavar="OUT", help="folders with its seconds"
    )
    options = parser.parse_args(arguments)
    try:
        for name, record in _records(options.out, options.times).items():
            _keep(name, record)
        text = page(PAGE.read_text(encoding="utf-8"), rendered(kept()))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    write_whole(PAGE, text)
    print(PAGE.relative_to(DOCS.parent))
    return 0


def plus_minus(low: float, high: float, std: float | None) -> str:
    """Write 1.0092, 1.0092, 0.067 as "1.01 ± 0.07"; 0.98, 1.02, 0.067 as "0.98 to 1.02 ± 0.07".

    The spread has one significant digit, two where the first is a 1 ("0.5 ± 1.1"): one would move
    it by up to a half. The means end where it does: further digits are noise.
    """
    if std is None or not math.isfinite(std):
        decimals, spread = 3, ""
    else:
        first, exponent = f"{std:.1e}".split("e")
        decimals = max(0, (first < "2") - int(exponent)) if std else 3
        spread = f" ± {std:.{decimals}f}" if std else " ± 0"
    lowest, highest = (f"{value:.{decimals}f}".replace("-", MINUS) for value in (low, high))
    return f"{lowest if lowest == highest else f'{lowest} to {highest}'}{spread}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
