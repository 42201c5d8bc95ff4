"""The decision after an attempt, as a function of its end and of the attempts before it."""

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from qurl_megatron.cluster.folder import Attempt

WALL_TIME, PREEMPTED = "USR1", "preempted"
"""Why the ranks were told to end, beside a person's TERM and INT."""
PERSONS = ("TERM", "INT")
"""Signals by which a person ends a run."""
TAKEN = {WALL_TIME: "time is up", PREEMPTED: "preempted by another job"}
"""Where Slurm takes the nodes back, which is no failure."""

FINAL = (2, 3)
"""Exit codes of a run that would only end so again: a mistake in the input; the guard."""
NO_PROGRESS = 4
"""Exit code of a run where another attempt would make no progress."""
BAD_NODE = 7
"""Exit code of a run that needs a node which is bad, where there is no other."""
STOPPED = 128 + signal.SIGTERM
"""Exit code of a run after a clean stop."""


class Decision(enum.StrEnum):
    DONE = "done"
    AGAIN = "again"  # in another job
    RETRY = "retry"  # after a failure: in the same job if its nodes are whole, else in another
    WITHOUT = "without"  # in another job, which must not have the nodes that are bad
    STOP = "stop"


GOES_ON = (Decision.AGAIN, Decision.RETRY, Decision.WITHOUT)
"""After these the run has another attempt."""


@dataclass(frozen=True)
class Ending:
    """How the training step ended."""

    code: int  # exit code; 0 after a clean stop, too
    stop_reason: str = ""  # WALL_TIME, PREEMPTED or the name of a signal; "": not told to end
    failure: str = ""  # how it failed, where the exit code does not tell


@dataclass(frozen=True)
class Outcome:
    """The decision after an attempt."""

    decision: Decision
    code: int  # of the supervisor, and so of the job
    reason: str
    excluded_nodes: tuple[str, ...] = ()  # the next job must not have them


def decide(
    ending: Ending,
    step_before: int,
    step_after: int,
    earlier: Sequence[Attempt],
    *,
    steps: int,
    retries: int,
) -> Outcome:
    """Decide whether the run goes on after an attempt.

    Args:
        step_before: step of the newest checkpoint when the attempt began.
        step_after: step of the newest checkpoint at its end.
        earlier: the attempts before it, oldest first.
        steps: all that the recipe asks for.
        retries: failures in a row on which another attempt follows.
    """
    code, stop_reason, failure = ending.code, ending.stop_reason, ending.failure
    if code not in FINAL and step_after >= steps:
        return Outcome(Decision.DONE, 0, f"all {steps} steps are done")
    saved = f"step {step_after} is saved"
    nodes_taken = stop_reason in TAKEN
    if code == 0 and not nodes_taken:
        source = f"SIG{stop_reason}" if stop_reason else "a signal to the ranks"
        return Outcome(Decision.STOP, STOPPED, f"stopped by {source}; {saved}")
    if nodes_taken:
        failure = TAKEN[stop_reason]
    elif not failure:
        failure = f"the training step ended with {code}"
    if code in FINAL or (stop_reason and not nodes_taken):
        return Outcome(Decision.STOP, code, f"{failure}; {saved}")
    if step_after <= step_before and earlier and _was_idle(earlier[-1]):
        mend = "fix the cause"
        if stop_reason == WALL_TIME:
            mend = "raise job.time_limit or job.signal_s in the cluster file"
        reason = (
            f"{failure}, the second attempt in a row without a new checkpoint; {saved}; {mend}, "
            "then `qurl slurm submit`, as before, goes on"
        )
        return Outcome(Decision.STOP, NO_PROGRESS, reason)
    if nodes_taken:
        return Outcome(Decision.AGAIN, 0, f"{failure}; {saved}")
    failures = 1 + _failures_in_a_row(earlier)
    count = f"failure {failures} in a row"
    if failures > retries:
        reason = f"{failure}, {count}, and job.retries={retries} allows no further attempt; {saved}"
        return Outcome(Decision.STOP, code, reason)
    return Outcome(Decision.RETRY, code, f"{failure}; {saved}; {count}")


def _was_idle(attempt: Attempt) -> bool:
    """Return whether an attempt was to be followed by another, and saved no new step."""
    followed = attempt.decision in (Decision.RETRY, Decision.AGAIN)
    return followed and attempt.step_after <= attempt.step_before


def _failures_in_a_row(attempts: Sequence[Attempt]) -> int:
    """Count the last failures. An attempt that ended otherwise begins the count again."""
    failures = 0
    for attempt in reversed(attempts):
        if attempt.decision != Decision.RETRY:
            break
        failures += 1
    return failures
