"""``qurl slurm logs``: what ended an attempt, with the first cause on top.

Reads the folder alone: it works while the run goes on, and on machines without Slurm.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from qurl_megatron.cluster import folder
from qurl_megatron.cluster.cause import AGAIN, Cause, Event, Evidence, Kind, Log, first_cause
from qurl_megatron.cluster.verdict import GOES_ON, Decision
from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.observe.attempts import Attempt, Tried, tried
from qurl_megatron.observe.failures import read_failures

TAIL = 4 << 20
"""Bytes that are read of a log, of its end."""
LATE_S = 60.0
"""By how much the file server's clock, and an engine's last word, may be past an attempt's end."""

ORDER = (
    "What is first rests on what can follow from what, then on the clocks of the nodes; of a log "
    "without times, on when it was last written."
)


def logs(run_dir: Path, number: int | None) -> int:
    """Print the first cause of an attempt.

    Args:
        number: None takes the newest.

    Raises:
        ConfigError: there is no such attempt.
    """
    attempt = _chosen(run_dir, number)
    evidence = gather(run_dir, attempt)
    print(printable(render(run_dir, attempt, evidence, first_cause(evidence))))
    return 0


def gather(run_dir: Path, one: Tried) -> Evidence:
    """What there is to read of an attempt."""
    logs_folder = folder.attempt_folder(run_dir, one.number)
    ranks = [_log(path, _who(path)) for path in sorted(logs_folder.glob("*.log"), key=_by_number)]
    engines = [
        _log(path, _engine(path, run_dir / "logs"), engine=True)
        for path in sorted((run_dir / "logs").rglob("engine-*.log"))
        if _written_by(one, path)
    ]
    return Evidence(
        read_failures(logs_folder), ranks + engines, section(job_log(run_dir), one.number)
    )


def job_log(run_dir: Path) -> str:
    """What the supervisor and srun said, of all attempts."""
    path = run_dir / "slurm/job.log"
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def word(lines: Sequence[str], number: int) -> str:
    """How the supervisor says that an attempt ended; "" where it has not said so."""
    announcement = f"qurl: attempt {number}: "
    return next(
        (
            line.removeprefix(announcement)
            for line in reversed(lines)
            if line.startswith(announcement)
        ),
        "",
    )


def section(text: str, number: int) -> list[str]:
    """The lines of job.log that belong to one attempt; all attempts append to it."""
    lines, inside = [], False
    for line in text.splitlines():
        if began := re.match(r"qurl: attempt (\d+), ", line):
            inside = int(began[1]) == number
        if inside:
            lines.append(line)
    return lines


def render(run_dir: Path, one: Tried, evidence: Evidence, cause: Cause | None) -> str:
    """What an operator reads."""
    lines = [_headline(run_dir, one)]
    if verdict := word(evidence.srun, one.number):
        lines.append(f"The supervisor says: {verdict}")
    if cause is None or (one.ended and one.ended.decision == "done"):
        lines.append("no rank and no engine has failed")
    else:
        lines += list(_cause(cause, _title(one), _advice(one, cause.first.kind)))
    lines += ["", "Logs", *(f"  {log.path}  {log.who}" for log in evidence.logs)]
    logs_folder = folder.attempt_folder(run_dir, one.number)
    stacks = (path for path in sorted(logs_folder.glob("stack-*")) if path.stat().st_size)
    lines += [f"  {path}  what a rank was doing" for path in stacks]
    lines.append(f"  {run_dir}/slurm/job.log  supervisor and srun, of all attempts")
    if one.number > 1:
        before = f"qurl slurm logs {run_dir} --attempt {one.number - 1}"
        lines += ["", f"The attempt before it: `{before}`"]
    return "\n".join(lines)


def _headline(run_dir: Path, one: Tried) -> str:
    if one.ended is None:
        return f"{run_dir}, attempt {one.number}: it runs, or its supervisor was killed"
    ended: Attempt = one.ended
    return (
        f"{run_dir}, attempt {one.number}, job {ended.job}: ended with {ended.code} "
        f"({ended.decision}); steps {ended.step_before} to {ended.step_after} are saved"
    )


def _title(one: Tried) -> str:
    if one.ended is None:
        return "Failed so far"
    # Told by Slurm to end, the run goes on: engines that Slurm has ended before the ranks, say.
    return "Failed while it ended" if one.ended.decision == Decision.AGAIN else "First cause"


def _advice(one: Tried, kind: Kind) -> str:
    ended = one.ended
    if ended and ended.decision in GOES_ON and kind.advice.endswith(AGAIN):
        return kind.advice.removesuffix(AGAIN) + "the run goes on by itself"
    return kind.advice


def _cause(cause: Cause, title: str, advice: str) -> Iterator[str]:
    first = cause.first
    yield ""
    yield f"{title}: {first.kind.name}: {_where(first, cause.followed)}"
    yield f"  {first.said}"
    yield f"What to do: {advice}"
    if first.traceback.strip():
        yield from ("", first.traceback.rstrip())
    if cause.followed:
        yield from ("", f"{len(cause.followed)} followed from it, or came later")
        for consequence in cause.followed:
            line = consequence.said.splitlines()[0]
            yield f"  {_where(consequence)}: {consequence.kind.name}: {line:.120}"
    yield from ("", ORDER)


def _where(event: Event, others: Sequence[Event] = ()) -> str:
    """Who, on which node, in which phase, step and version; of others where it could not say."""
    facts = [f"{event.who} on {event.node}" if event.node else event.who]
    if event.step is not None:
        facts.append(f"{event.phase} of step {event.step} with weights {event.version}")
    elif event.phase:
        facts.append(event.phase)
    elif other := next((candidate for candidate in others if candidate.step is not None), None):
        facts.append(f"while {other.who} was in {other.phase} of step {other.step}")
    if event.code is not None:
        facts.append(f"exit code {event.code}")
    return ", ".join(facts)


def _chosen(run_dir: Path, number: int | None) -> Tried:
    by_number = {attempt.number: attempt for attempt in tried(run_dir)}
    if not by_number:
        raise folder.no_attempt(run_dir)
    if number is not None and number not in by_number:
        raise ConfigError(f"--attempt {number}: {run_dir} has attempts 1 to {max(by_number)}")
    return by_number[number or max(by_number)]


def _who(path: Path) -> str:
    name, _, number = path.stem.rpartition("-")
    return {"train": f"rank {number}", "engines": f"rollout node {number}"}.get(name, path.stem)


def _engine(path: Path, logs: Path) -> str:
    """Its name, and its node where it has one of its own."""
    node = path.parent.relative_to(logs)
    return path.stem if node == Path() else f"{path.stem} on {node}"


def _written_by(one: Tried, path: Path) -> bool:
    """An engine's log is begun again by each attempt: is this that of ours?"""
    end = one.ended.ended_at if one.ended else float("inf")
    return one.began.began_at - 1 <= path.stat().st_mtime <= end + LATE_S


def _by_number(path: Path) -> tuple[str, int]:
    name, _, number = path.stem.rpartition("-")
    return name, int(number) if number.isdecimal() else 0


def _log(path: Path, who: str, *, engine: bool = False) -> Log:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        text = file.read().decode("utf-8", "replace")
    return Log(who, text, path.stat().st_mtime, path, engine)
