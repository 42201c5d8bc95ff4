"""Writes what a study has found so far: OUT/study.json, OUT/study.md and the pictures."""

import json
import re
from pathlib import Path

from qurl_megatron.study.pictures import pictures
from qurl_megatron.study.plan import Study
from qurl_megatron.study.results import groups, read_results, to_json
from qurl_megatron.study.runner import write_whole
from qurl_megatron.study.tables import page


def write_report(study: Study, out: Path) -> Path:
    """Draw everything anew; returns the path of study.md."""
    out.mkdir(parents=True, exist_ok=True)
    results = read_results(study, out)
    made = groups(study, results)
    drawn = pictures(made)
    for name, image in drawn.items():
        write_whole(out / name, image)
    write_whole(out / "study.json", _json(to_json(study, results)).encode())
    path = out / "study.md"
    write_whole(path, page(study, results, made, [out / name for name in drawn]).encode())
    return path


def _json(value: object) -> str:
    """Indented, with each list of numbers on one line."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    numbers = re.compile(r"\[\s+[-\d][^\[\]{}\"]*\]")
    return numbers.sub(lambda found: " ".join(found[0].split()), text)
