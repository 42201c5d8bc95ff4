"""``qurl slurm logs``: why an attempt ended, with the first cause on top.

Reads the folder alone: it works while the run goes on, and on machines without Slurm.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from qurl_megatron.cluster import folder
from qurl_megatron.cluster.cause import Cause, Event, Evidence, Log, first_cause
from qurl_megatron.cluster.folder import Attempt
from qurl_megatron.cluster.verdict import GOES_ON, Decision
from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.observe.failures import read_failures

TASKS = {"train": "rank", "engines": "rollout node"}
"""Who writes a log of an attempt, by the beginning of its name."""
TAIL = 4 << 20
"""Bytes that are read of a log, of its end."""
LATE_S = 60.0
"""By how much the file server's clock, and an engine's last word, may be past an attempt's end."""


def logs(run_dir: Path, number: int | None) -> int:
    """Print the first cause of an attempt.

    Args:
        number: None takes the newest.

    Raises:
        ConfigError: there is no such attempt.
    """
    attempts = folder.attempts(run_dir)
    if not attempts:
        job = folder.job(run_dir)
        raise ConfigError(f"{run_dir} has no attempt yet; `squeue --jobs={job}` says why it waits")
    last = len(attempts)
    number = last if number is None else number
    if not 1 <= number <= last:
        raise ConfigError(f"--attempt {number}: {run_dir} has attempts 1 to {last}")
    attempt = attempts[number - 1]
    evidence = gather(run_dir, attempt)
    print(printable(render(run_dir, attempt, evidence, first_cause(evidence))))
    return 0


def gather(run_dir: Path, attempt: Attempt) -> Evidence:
    """Read all evidence on an attempt."""
    logs_folder = folder.attempt_folder(run_dir, attempt.number)
    logs = []
    for path in sorted(logs_folder.glob("*-*.log")):
        task, _, number = path.stem.rpartition("-")  # such as train-0
        logs.append(_log(path, f"{TASKS[task]} {number}"))
    end = attempt.ended_at if attempt.ended else float("inf")
    for path in sorted((run_dir / "logs").rglob("engine-*.log")):
        # An engine's log is begun again by each attempt.
        if attempt.began_at - 1 <= path.stat().st_mtime <= end + LATE_S:
            node = path.parent.relative_to(run_dir / "logs")
            name = path.stem if node == Path() else f"{path.stem} on {node}"
            logs.append(_log(path, name, engine=True))
    lines: list[str] = []
    job_log = run_dir / "slurm/job.log"
    if job_log.is_file():
        lines = section(job_log.read_text(encoding="utf-8", errors="replace"), attempt.number)
    return Evidence(read_failures(logs_folder), logs, lines)


def _log(path: Path, source: str, *, engine: bool = False) -> Log:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        text = file.read().decode("utf-8", "replace")
    return Log(source, text, path.stat().st_mtime, engine)


def section(text: str, number: int) -> list[str]:
    """Return the lines of job.log that belong to one attempt; all attempts append to it."""
    lines, inside = [], False
    for line in text.splitlines():
        if began := re.match(r"qurl: attempt (\d+), ", line):
            inside = int(began[1]) == number
        if inside:
            lines.append(line)
    return lines


def render(run_dir: Path, attempt: Attempt, evidence: Evidence, cause: Cause | None) -> str:
    """Return the lines for an operator."""
    number = attempt.number
    if attempt.ended:
        lines = [
            f"{run_dir}, attempt {number}, job {attempt.job}: ended with {attempt.code} "
            f"({attempt.decision}); steps {attempt.step_before} to {attempt.step_after} are saved"
        ]
    else:
        lines = [f"{run_dir}, attempt {number}: it runs, or its supervisor was killed"]
    if attempt.reason:
        lines.append(f"The supervisor says: {attempt.reason}")
    if cause is None or attempt.decision == Decision.DONE:
        lines.append("no rank and no engine has failed")
    else:
        lines += _cause(cause, attempt)
    own = folder.attempt_folder(run_dir, number)
    lines += [
        "",
        f"Logs, and stacks of a run that hung: {own}; of engines {run_dir}/logs; of supervisor and "
        f"srun, of all attempts, {run_dir}/slurm/job.log",
    ]
    return "\n".join(lines)


def _cause(cause: Cause, attempt: Attempt) -> Iterator[str]:
    first = cause.first
    yield ""
    yield f"{_title(attempt)}: {first.kind.name}: {_place(first)}"
    yield f"  {first.message}"
    yield f"What to do: {first.kind.advice}"
    if attempt.ended:
        goes_on = attempt.decision in GOES_ON
        again = "`qurl slurm submit`, as before, goes on from the newest checkpoint"
        yield f"  {'the run goes on by itself' if goes_on else again}"
    if first.traceback.strip():
        yield from ("", first.traceback.rstrip())
    if cause.followed:
        yield from ("", f"{len(cause.followed)} followed from it, or came later")
        for event in cause.followed:
            line = event.message.splitlines()[0]
            yield f"  {_place(event)}: {event.kind.name}: {line:.120}"


def _title(attempt: Attempt) -> str:
    if not attempt.ended:
        return "Failed so far"
    # Told by Slurm to end, the run goes on: engines that Slurm has ended before the ranks, say.
    again = attempt.decision == Decision.AGAIN
    return "Failed while it ended" if again else "First cause"


def _place(event: Event) -> str:
    """Return who failed, on which node, in which phase, step and version."""
    source = f"{event.source} on {event.node}" if event.node else event.source
    if event.failure is None:
        return source
    place = event.failure.phase
    if event.failure.step is not None:
        place += f" of step {event.failure.step} with weights {event.failure.version}"
    return f"{source}, {place}"
