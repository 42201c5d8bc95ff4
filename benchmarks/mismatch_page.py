"""The tables of docs/mismatch.md, made from what its studies have measured.

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
from qurl_megatron.kit.disk import write_whole
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
    told: Mapping[str, Any], here: Mapping[str, Any], times: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What is kept of a study.json: rows without curves, and where they were measured.

    Args:
        here: ``environment`` of this machine, in place of that of a study that names none;
            ``measured_there`` is false then, and nobody knows the commit.
        times: the study.json that the seconds of a step are of; None for ``told`` itself.

    Raises:
        ConfigError: a setting has not been timed.
    """
    recipe = told["recipe"]
    there = told.get("environment")
    machine = there or {**here, "commit": None}
    groups = {
        tuple(name.rsplit(",", 1)): group | _seconds(name, group, times)
        for name, group in told["groups"].items()
    }
    rows = [
        {
            "scheme": scheme,
            "family": next((f for f, members in FAMILIES.items() if method in members), ""),
            "label": told["methods"][method]["label"],
            "runs": group["done"],
            **{key: _taken(group[key], what) for key, what, _ in COLUMNS.values()},
            PASSED_STD: _taken(group[PASSED_STD], "mean"),
        }
        for (method, scheme), group in groups.items()
    ]
    return {
        "title": told["study"],
        "version": told["version"],
        "measured_there": there is not None,
        **{key: machine[key] for key in ("cpu", "cores", "commit")},
        "steps": recipe["train"]["steps"],
        "prompts": recipe["data"]["prompts_per_step"],
        "responses": recipe["rollout"]["samples_per_prompt"],
        "tokens": recipe["rollout"]["max_new_tokens"],
        "timed": times and _timed(times),
        "rows": rows,
    }


def rendered(records: Mapping[str, Mapping[str, Any]]) -> str:
    """What stands between the marks of the page.

    Args:
        records: by name of their file.
    """
    sections = [_section(name, one) for name, one in records.items()]
    return "\n".join(sections) or "No study has been kept yet.\n"


def page(text: str, tables: str) -> str:
    """``text`` with other tables between its marks.

    Raises:
        ConfigError: it lacks them.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"{PAGE} lacks the lines {BEGIN.strip()} and {END.strip()}; restore them")
    return f"{before}{begin}\n{tables}\n{end}{after}"


def kept() -> dict[str, dict[str, Any]]:
    """The records in docs/results, by name of their file."""
    return {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(RESULTS.glob(NAMES))
    }


def _seconds(
    name: str, group: Mapping[str, Any], times: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Of a step, where other runs were timed; a setting that was not run needs none."""
    if times is None or not group["done"]:
        return {}
    found = times["groups"].get(name, {}).get(SECONDS)
    if found is None:
        raise ConfigError(
            f"--times: no run of {name} is done among those of {times['name']}; run them all, with "
            "qurl study, or leave --times out"
        )
    return {SECONDS: found}


def _timed(times: Mapping[str, Any]) -> dict[str, Any]:
    """How the runs were made that were timed."""
    machine = times.get("environment", {})
    keys = ("cpu", "cores", "commit", "load_before")
    return {"steps": times["recipe"]["train"]["steps"], **{key: machine.get(key) for key in keys}}


def _taken(spread: Mapping[str, float] | None, what: str) -> float | None:
    return None if spread is None else float(f"{spread[what]:.6g}")


def _section(name: str, one: Mapping[str, Any]) -> str:
    rows = one["rows"]
    undone = [row for row in rows if not row["runs"]]
    machine = f"{one['cpu']}, {one['cores']} cores"
    if not one["measured_there"]:
        machine = f"tables made on {machine}"
    facts = (
        f"{one['steps']} steps of {one['prompts']} prompts x {one['responses']} responses of up to "
        f"{one['tokens']} tokens; {machine}; [{name}](results/{name})."
    )
    if undone:
        facts += f" {NOTHING} in a whole row: not run."
    facts += f" {_about_the_times(one.get('timed'))}"
    columns = [
        column
        for column, (key, _, _) in COLUMNS.items()
        if any(row.get(key) is not None for row in rows)  # older records have fewer
    ]
    lines = [f"### {one['title']}", "", facts, "", *_table(_merged(rows), _setting, columns)]
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
    """The rows of the table, each of one row of the record or of all of ``LOSS`` in a scheme."""
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
        shown = ["unquantized" if scheme == "none" else scheme.upper(), label(members)]
        shown += [
            _passed(members)
            if key == "update_passed"
            else _range([row[key] for row in members], write)
            for key, _, write in map(COLUMNS.__getitem__, columns)
        ]
        lines.append(f"| {' | '.join(shown)} |")
    return lines


def _setting(members: Sequence[Row]) -> str:
    family = members[0]["family"]
    if len(members) > 1:
        return f"{family}: all {len(members)}"
    return f"{family}: {_label(members)}" if family else _label(members)


def _label(members: Sequence[Row]) -> str:
    return members[0]["label"]


def _range(values: Sequence[float | None], write: Callable[[float], str]) -> str:
    """ "3.1 to 3.4", or one of them where they read alike."""
    known = [value for value in values if value is not None]
    if not known:
        return NOTHING
    low, high = write(min(known)), write(max(known))
    return low if low == high else f"{low} to {high}"


def _passed(members: Sequence[Row]) -> str:
    """With the standard deviation over the steps, the largest of several rows."""
    known = [row["update_passed"] for row in members if row["update_passed"] is not None]
    if not known:
        return NOTHING
    stds = [row[PASSED_STD] for row in members if row[PASSED_STD] is not None]
    return plus_minus(min(known), max(known), max(stds, default=None))


def _told(out: Path) -> dict[str, Any]:
    """What the study in a folder has written, with its name.

    Raises:
        ConfigError: none has.
    """
    source = out / "study.json"
    if not source.is_file():
        raise ConfigError(f"{source} is missing; run qurl study STUDY.toml --out {out}")
    return {"name": out.absolute().name} | json.loads(source.read_text(encoding="utf-8"))


def _checked(out: Path) -> dict[str, Any]:
    """
    Raises:
        ConfigError: no study has written to the folder, or one of another name or version.
    """
    told, source = _told(out), out / "study.json"
    if not Path(f"{told['name']}.json").match(NAMES):
        raise ConfigError(
            f"{source} is of a study {told['name']}, and only those named like "
            f"{NAMES.removesuffix('.json')} are kept; rename the study's file"
        )
    if not all(PASSED_STD in group for group in told["groups"].values()):
        raise ConfigError(
            f"{source} lacks {PASSED_STD}; renew it with qurl study STUDY.toml --out {out}"
        )
    return told


def _records(folders: Sequence[Path], times: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """By name of the study.

    Raises:
        ConfigError: a folder is not what it should be, or times are of a study that is not given.
    """
    studies = [_checked(folder) for folder in folders]
    timed = {told["name"]: told for told in map(_told, times)}
    for name in timed.keys() - {told["name"] for told in studies}:
        raise ConfigError(f"--times has seconds of {name}; name the folder of its tables too")
    here = environment()
    return {told["name"]: record(told, here, timed.get(told["name"])) for told in studies}


def _keep(name: str, one: dict[str, Any]) -> None:
    rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in one.pop("rows"))
    rest = json.dumps(one, indent=1, ensure_ascii=False).removesuffix("\n}")
    content = f'{rest},\n "rows": [\n  {rows}\n ]\n}}\n'
    write_whole(RESULTS / f"{name}.json", content)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, nargs="*", help="folder of a qurl study")
    parser.add_argument(
        "--times", type=Path, nargs="+", default=[], metavar="OUT", help="folders with its seconds"
    )
    given = parser.parse_args(arguments)
    try:
        for name, one in _records(given.out, given.times).items():
            _keep(name, one)
        text = page(PAGE.read_text(encoding="utf-8"), rendered(kept()))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    write_whole(PAGE, text)
    print(PAGE.relative_to(DOCS.parent))
    return 0


def plus_minus(low: float, high: float, std: float | None) -> str:
    """1.0092, 1.0092, 0.067 -> "1.01 ± 0.07"; 0.98, 1.02, 0.067 -> "0.98 to 1.02 ± 0.07".

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
