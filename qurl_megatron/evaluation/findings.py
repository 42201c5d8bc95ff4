"""Writes what a study has found so far: OUT/study.json, OUT/study.md and the pictures."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qurl_megatron.evaluation.finished import groups, read_results, to_json
from qurl_megatron.evaluation.pictures import pictures
from qurl_megatron.evaluation.plan import Study
from qurl_megatron.evaluation.tables import page
from qurl_megatron.kit.disk import write_whole


def write_report(study: Study, out: Path, environment: Mapping[str, Any] | None = None) -> Path:
    """Draw everything again; returns the path of study.md.

    Args:
        environment: of ``bench.environment``, where runs have been made; None where none were, and
            what study.json says of those before stays.
    """
    out.mkdir(parents=True, exist_ok=True)
    results = read_results(study, out)
    finished_groups = groups(study, results)
    drawn = pictures(finished_groups)
    for name, image in drawn.items():
        write_whole(out / name, image)
    numbers = out / "study.json"
    if environment is None and numbers.is_file():
        environment = json.loads(numbers.read_text(encoding="utf-8")).get("environment")
    document = to_json(study, results)
    if environment is not None:
        document["environment"] = dict(environment)
    write_whole(numbers, _json(document))
    path = out / "study.md"
    write_whole(path, page(study, results, finished_groups, [out / name for name in drawn]))
    return path


def _json(value: object) -> str:
    """Indented, with each list of numbers on one line."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    numbers = re.compile(r"\[\s+[-\d][^\[\]{}\"]*\]")
    return numbers.sub(lambda found: " ".join(found[0].split()), text)
