"""What follows on an attempt, as a function of how it ended and how those before it did."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from qurl_megatron.cluster.folder import Attempt
from qurl_megatron.cluster.task import STOPPED

WALL_TIME, PREEMPTED = "USR1", "preempted"
"""Why the ranks were told to end, beside a person's TERM and INT."""
PERSONS = ("TERM", "INT")
"""Signals by which a person ends a run."""
TAKEN = {WALL_TIME: "time is up", PREEMPTED: "preempted by another job"}
"""Where Slurm takes the nodes back, which is no failure."""

FINAL = (2, 3)
"""Exit codes of a run that would only end so again: a mistake in the input; the guard."""
NO_PROGRESS = 4
"""Exit code of a run that another attempt would not bring further."""
BAD_NODE = 7
"""Exit code of a run that needs a node which is bad, where there is no other."""


class Decision(enum.StrEnum):
    DONE = "done"
    AGAIN = "again"  # in another job
    RETRY = "retry"  # after a failure: in the same job if its nodes are whole, else in another
    WITHOUT = "without"  # in another job, which must not have the nodes that are bad
    STOP = "stop"


GOES_ON = (Decision.AGAIN, Decision.RETRY, Decision.WITHOUT)
"""After these the run has another attempt."""


@dataclass(frozen=True)
class AttemptOutcome:
    """What follows on an attempt."""

    decision: Decision
    code: int  # of the supervisor, and so of the job
    why: str
    without: tuple[str, ...] = ()  # nodes that the next job must not have


@dataclass(frozen=True)
class Before:
    """How the attempts before this one ended."""

    failures: int = 0  # the last ones in a row
    idle: bool = False  # the last one was to be followed by another, and saved no new step


def before(attempts: Sequence[Attempt]) -> Before:
    """
    Args:
        attempts: those that have ended, oldest first. One that a person stopped, or that had to
            stop, begins the count again: somebody has looked since.
    """
    failures = 0
    for attempt in reversed(attempts):
        if attempt.decision != Decision.RETRY:
            break
        failures += 1
    last = attempts[-1] if attempts else None
    if last is None or last.decision not in (Decision.RETRY, Decision.AGAIN):
        return Before(failures, False)
    return Before(failures, last.step_after <= last.step_before)


def decide(
    code: int,
    told: str,
    step_before: int,
    step_after: int,
    earlier: Before,
    *,
    steps: int,
    retries: int,
    failed: str = "",
    late: bool = False,
) -> AttemptOutcome:
    """
    Args:
        code: exit code of the training step; 0 after a clean stop, too.
        told: why the ranks were told to end: WALL_TIME, PREEMPTED or the name of a signal; "":
            they were not.
        step_before: step of the newest checkpoint when the attempt began.
        step_after: the same at its end.
        steps: all that the recipe asks for.
        retries: failures in a row on which another attempt follows.
        failed: how, where the exit code does not tell.
        late: the attempt followed on another in the same job, and had only the rest of its time.
    """
    saved = f"step {step_after} is saved"
    idle = step_after <= step_before
    if code == 0 and step_after >= steps:
        return AttemptOutcome(Decision.DONE, 0, f"all {steps} steps are done")
    if told == WALL_TIME and code not in FINAL:
        if not idle:
            return AttemptOutcome(Decision.AGAIN, 0, f"time is up; {saved}")
        if not late:
            return AttemptOutcome(
                Decision.STOP,
                NO_PROGRESS,
                f"time was up before a step after {step_before} was saved, and another attempt "
                "would end likewise; raise job.time_limit or job.signal_s in the cluster file",
            )
    if told in TAKEN:
        failed = TAKEN[told]
    elif code == 0:
        by = f"SIG{told}" if told else "a signal to the ranks"
        return AttemptOutcome(Decision.STOP, STOPPED, f"stopped by {by}; {saved}")
    else:
        failed = failed or f"the training step ended with {code}"
    if code in FINAL or (told and told not in TAKEN):
        return AttemptOutcome(Decision.STOP, code, f"{failed}; {saved}")
    if idle and earlier.idle:
        return AttemptOutcome(
            Decision.STOP,
            NO_PROGRESS,
            f"{failed}, the second attempt in a row without a new checkpoint; {saved}; fix the "
            "cause, then `qurl slurm submit`, as before, goes on",
        )
    if told in TAKEN:
        return AttemptOutcome(Decision.AGAIN, 0, f"{failed}; {saved}")
    count = f"failure {earlier.failures + 1} in a row"
    if earlier.failures >= retries:
        none = f"and job.retries={retries} allows no further attempt"
        return AttemptOutcome(Decision.STOP, code, f"{failed}, {count}, {none}; {saved}")
    return AttemptOutcome(Decision.RETRY, code, f"{failed}; {saved}; {count}")
