"""The tables and pictures of studies in the docs, made from the record kept of each.

    python -m benchmarks.study_page

writes each table of ``TABLES`` again between its two marks, ``<!-- NAME -->`` and
``<!-- NAME: end -->``, and draws the pictures; tests hold both to the records. To renew them, put
the study.json of ``qurl study`` in the place of its record in docs/results, and call this.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.paired import (
    PRIMARY_HARD,
    UNPLANNED,
    against_kl,
    at_equal_seconds,
    collapses,
    comparisons,
    doses,
    gate,
    mean_interval,
    to_unquantized,
)
from benchmarks.study_pictures import IMAGES, PICTURES, png
from qurl_megatron.evaluation.study_results import NOTHING, TRAINED
from qurl_megatron.kit.disk import read_json, write_whole
from qurl_megatron.observe.text import MINUS

DOCS = Path(__file__).parents[1] / "docs"
Record = Mapping[str, Any]  # what a study.json holds

METHODS = {
    "unquantized rollouts": "bf16",
    "naive (Eq. 3)": "naive",
    "uncorrected (Eq. 1)": "proximal",
    "decoupled (Eq. 4)": "decoupled",
    "TIS (Eq. 5)": "tis",
    "ACR (Eq. 9)": "acr",
    "ACR, UAQ s = 1.5": "acr_uaq",
}
SCALES = {
    "s = 1": "acr",
    "s = 1.5": "acr_uaq",
    "s = 2": "acr_s2",
    "1.5 x learning rate": "acr_lr15",
    "2 x learning rate": "acr_lr20",
}


def corrections(record: Record, scheme: str) -> list[str]:
    """Return the table of the methods' ends under one scheme, and unquantized."""
    lines = [
        "| method | trained policy, % | seeds | as rolled out, % | KL | largest rho | clipped "
        "| ACR acted |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for label, method in METHODS.items():
        group = _group(record, method, scheme)
        seeds = ", ".join(f"{value:.1f}" for value in percents(group, TRAINED))
        acted = f"{100 * group['acr_active']['mean']:.2f} %" if "acr" in method else NOTHING
        lines.append(
            f"| {label} | {_spread(group, TRAINED)} | {seeds} | {_spread(group, 'accuracy')} "
            f"| {_small(group['kl']['mean'])} | {group['rho_max']['high']:.3g} "
            f"| {100 * group['clip_fraction']['mean']:.1f} % | {acted} |"
        )
    return lines


def against_unquantized(record: Record) -> list[str]:
    """Return the table of differences of the trained policies, by Welch's t-test."""
    lines = ["| method | four bits | eight bits |", "|---|---:|---:|"]
    unquantized = percents(_group(record, "bf16", "none"), TRAINED)
    for label, method in list(METHODS.items())[1:]:
        cells = []
        for scheme in ("int4", "int8"):
            trained = percents(_group(record, method, scheme), TRAINED)
            gap = f"{trained.mean() - unquantized.mean():+.1f}".replace("-", MINUS)
            p = stats.ttest_ind(trained, unquantized, equal_var=False).pvalue
            cells.append(f"{gap} (p = {p:.2f})".replace("= 0.", "= ."))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def scales(record: Record) -> list[str]:
    """Return the table of larger s and larger learning rates, with ACR."""
    lines = [
        "| setting | rollouts | trained policy, % | as rolled out, % | codes that change per step "
        "| update, Eq. 13 | error, Eq. 14 | update / error |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for rollouts, scheme in (("INT8", "int8"), ("INT4, simulated", "int4")):
        for label, method in SCALES.items():
            group = _group(record, method, scheme)
            names = ("code_flip_rate", "weight_update", "weight_error")
            flips, update, error = (group[name]["mean"] for name in names)
            ratio = f"{update / error:.2g}" if update > 0.01 * error else f"{update / error:.4f}"
            changed = f"{100 * flips:.3g} %" if flips > 0.01 else f"{100 * flips:.2f} %"
            lines.append(
                f"| {label} | {rollouts} | {_spread(group, TRAINED)} | {_spread(group, 'accuracy')}"
                f" | {changed} | {_power(update)} | {_power(error)} | {ratio} |"
            )
    return lines


def uaq_or_lr(record: Record) -> list[str]:
    """Return the table of UAQ beside larger learning rates, paired by seed."""
    lines = [
        "| setting | unquantized | UAQ's, higher by | as rollouts | UAQ's, higher by | flips |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    uaq = record["groups"]["uaq,int8"]
    for method, settings in record["methods"].items():
        group, cells = record["groups"][f"{method},{settings['schemes'][0]}"], []
        for what in (TRAINED, "accuracy"):
            more = NOTHING
            if group is not uaq:
                mean, half = mean_interval(percents(uaq, what) - percents(group, what))
                more = f"{mean:.1f} ± {half:.1f}"
            cells += [_spread(group, what), more]
        flips = group["code_flip_rate"]
        cells.append(NOTHING if flips is None else f"{100 * flips['mean']:.1f} %")
        lines.append(f"| {settings['label']} | {' | '.join(cells)} |")
    return lines


def weights(fast: Record, slow: Record) -> list[str]:
    """Return the table of weight changes over many steps, at two learning rates."""
    lines = [
        "| learning rate | steps | update, Eq. 13 | error, Eq. 14 | update / error "
        "| codes that change |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for rate, record in (("1e-4", fast), ("1e-6", slow)):
        for change in record["changes"]:
            update, error = change["update"], change["error"]
            lines.append(
                f"| {rate} | {change['first']} to {change['last']} | {_power(update)} "
                f"| {_power(error)} | {update / error:.2g} | {100 * change['flips']:.2g} % |"
            )
    return lines


TABLES: dict[str, tuple[str, tuple[str, ...], Callable[..., list[str]]]] = {
    "four bits": ("results/study.md", ("study_cpu",), lambda record: corrections(record, "int4")),
    "eight bits": ("results/study.md", ("study_cpu",), lambda record: corrections(record, "int8")),
    "against unquantized": ("results/study.md", ("study_cpu",), against_unquantized),
    "scales": ("results/study.md", ("study_cpu",), scales),
    "weights": ("results/study.md", ("weights_lr1e-4", "weights_lr1e-6"), weights),
    "UAQ or learning rate": ("algorithms.md", ("uaq_or_lr",), uaq_or_lr),
    "doses, sorting": ("results/README.md", ("dose_sort",), doses),
    "doses, spiral": ("results/README.md", ("dose_spiral",), doses),
    "one block, tests": ("results/README.md", ("one_block",), comparisons),
    "one block, unplanned": (
        "results/README.md",
        ("one_block",),
        lambda r: comparisons(r, UNPLANNED),
    ),
    "one block, to unquantized": ("results/README.md", ("one_block",), to_unquantized),
    "one block, KL": ("results/README.md", ("one_block",), against_kl),
    "hard, gate": ("results/README.md", ("hard",), gate),
    "hard, tests": ("results/README.md", ("hard",), lambda r: comparisons(r, PRIMARY_HARD)),
    "hard, to unquantized": ("results/README.md", ("hard",), to_unquantized),
    "hard, collapses": ("results/README.md", ("hard",), collapses),
    "hard, seconds": ("results/README.md", ("hard", "hard_alone"), at_equal_seconds),
}
"""By the name of its marks, each table's page, its records in docs/results, and its function."""


def percents(group: Record, name: str) -> np.ndarray:
    """Return a final number of each run, in percent."""
    return 100 * np.array(group[name]["values"])


def pages() -> dict[Path, str]:
    """Return every page with its tables made again."""
    texts: dict[Path, str] = {}
    for name, (page, files, make) in TABLES.items():
        path = DOCS / page
        records = [read_json(DOCS / f"results/{file}.json") for file in files]
        text = texts.get(path) or path.read_text(encoding="utf-8")
        table = "\n".join(make(*records))
        begin, end = f"<!-- {name} -->\n\n", f"\n\n<!-- {name}: end -->"
        before, opened, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        assert opened and closed, f"{page} lacks the marks of {name}; restore them"
        texts[path] = f"{before}{begin}{table}{end}{after}"
    return texts


def _group(record: Record, method: str, scheme: str) -> Record:
    return record["groups"][f"{method},{'none' if method == 'bf16' else scheme}"]


def _spread(group: Record, name: str) -> str:
    values = percents(group, name)
    return f"{values.mean():.1f} ± {values.std(ddof=1):.1f}"


def _small(value: float) -> str:
    if value >= 1e-3:
        return f"{value:.2g}"
    return f"{value:.0e}".replace("e-0", "e-") if value > 1e-9 else "0"


def _power(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def main() -> int:
    for path, text in pages().items():
        write_whole(path, text)
        print(path.relative_to(DOCS.parent))
    for name, picture in PICTURES.items():
        write_whole(IMAGES / name, png(picture))
        print((IMAGES / name).relative_to(DOCS.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
