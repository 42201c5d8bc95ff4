"""``qurl slurm hours``: the table of a run's GPU-hours, for a terminal or as JSON."""

import json
from dataclasses import asdict
from pathlib import Path

from qurl_megatron.cluster import folder
from qurl_megatron.observe.hours import KINDS, Hours, Spent, hours_of


def hours(run_dir: Path, *, as_json: bool = False) -> int:
    """Print where the GPU-hours of a run went.

    Raises:
        ConfigError: no attempt has begun, or a record is damaged.
    """
    table = hours_of(run_dir)
    if not table.rows:
        raise folder.no_attempt(run_dir)
    print(json.dumps(as_data(table), indent=1) if as_json else render(table))
    return 0


def as_data(found: Hours) -> dict:
    """GPU-hours, by attempt and of all."""
    rows = [{"attempt": row.number, "gpus": row.gpus, **_rounded(row.hours)} for row in found.rows]
    return {
        "attempts": rows,
        "all": _rounded(found.total),
        "samples": found.samples,
        "per_sample": found.per_sample,
    }


def render(found: Hours) -> str:
    names = [kind.replace("_", " ") for kind in KINDS]
    lines = ["GPU-hours" + "".join(f"{name:>10}" for name in ("GPUs", *names, "all"))]
    for row in found.rows:
        lines.append(_line(f"attempt {row.number}", str(row.gpus), row.hours))
    total = found.total
    lines.append(_line("all", "", total))
    if total.total:
        shares = (f"{getattr(total, kind) / total.total:10.1%}" for kind in KINDS)
        lines.append(f"{'':19}{''.join(shares)}")
    if found.per_sample is not None:
        lines.append(
            f"{found.samples:,.0f} samples were trained on: {found.per_sample:.3g} GPU-hours each"
        )
    return "\n".join(lines)


def _line(name: str, gpus: str, spent: Spent) -> str:
    values = (*asdict(spent).values(), spent.total)
    return f"{name:<9}{gpus:>10}" + "".join(f"{value:10.4f}" for value in values)


def _rounded(spent: Spent) -> dict[str, float]:
    return {**{k: round(v, 6) for k, v in asdict(spent).items()}, "all": round(spent.total, 6)}
