"""Join the records of a study whose runs were made a part at a time, perhaps on several machines.

    qurl study STUDY.toml --out OUT --only '*-seed-0'
    python -m benchmarks.join_studies docs/results/STUDY.json OUT/study.json

adds the runs that have ended in the second record to the first, which need not exist yet. All runs
of a pair belong into one part: another machine may round differently.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qurl_megatron.evaluation.study_results import FINAL_NAMES, compact, spread
from qurl_megatron.kit.disk import read_json, write_whole
from qurl_megatron.kit.errors import ConfigError

ENDED = ("done", "failed")

Record = Mapping[str, Any]  # what a study.json holds


def joined(record: Record | None, part: Record) -> dict[str, Any]:
    """Return the record with those runs of ``part`` that have ended, each with its part's number.

    Args:
        record: of the parts so far; None: this is the first.

    Raises:
        ConfigError: one is no record of a study, they are of different studies, or both have the
            same run.
    """
    for document, key in ((record, "environments"), (part, "environment")):
        if document is not None and not document.keys() >= {"runs", "groups", key}:
            raise ConfigError(
                f"a record lacks runs, groups or {key}; first comes the one that this command has "
                "written, then the study.json of a qurl study"
            )
    runs = dict(record["runs"]) if record else {}
    environments = list(record["environments"]) if record else []
    for key in ("name", "recipe", "methods"):
        if record and record[key] != part[key]:
            raise ConfigError(f"the records differ in their {key}: they are of two studies")
    for name, run in part["runs"].items():
        if run["state"] not in ENDED:
            runs.setdefault(name, run)
        elif name in runs and runs[name]["state"] in ENDED:
            raise ConfigError(f"{name} has ended in both records; leave it out of one")
        else:
            runs[name] = {"part": len(environments), **run}
    groups = {}
    for arm, group in part["groups"].items():
        of_arm = [run for run in runs.values() if f"{run['method']},{run['scheme']}" == arm]
        done = [run for run in of_arm if run["state"] == "done"]
        totals = {name: spread([run[name] for run in done]) for name in FINAL_NAMES}
        groups[arm] = {"planned": group["planned"], "done": len(done), **totals}
    document = {key: value for key, value in part.items() if key != "environment"}
    environments.append(part["environment"])
    return {**document, "runs": runs, "groups": groups, "environments": environments}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path, help="record to write, or to add to")
    parser.add_argument("part", type=Path, help="study.json of a qurl study")
    options = parser.parse_args(arguments)
    try:
        earlier = read_json(options.record) if options.record.is_file() else None
        document = joined(earlier, read_json(options.part))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    write_whole(options.record, compact(document))
    states = [run["state"] for run in document["runs"].values()]
    ended = sum(state in ENDED for state in states)
    print(f"{options.record}: {ended} of {len(states)} runs have ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
