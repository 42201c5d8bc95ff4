"""The decision after an attempt, as a function of its end and of the attempts before it."""

import enum
import signal
from dataclasses import replace

from qurl_megatron.cluster.folder import Attempt

WALL_TIME, PREEMPTED = "USR1", "preempted"
"""Why the ranks were told to end, beside a person's TERM and INT."""
PERSONS = ("TERM", "INT")
"""Signals by which a person ends a run."""
TAKEN = {WALL_TIME: "time is up", PREEMPTED: "preempted by another job"}
"""Reasons for which Slurm takes the nodes back; none is a failure."""

FINAL = (2, 3)
"""Exit codes that a retry would repeat: a mistake in the input; a halt by the guard."""
NO_PROGRESS = 4
"""Exit code when a retry would make no progress."""
BAD_NODE = 7
"""Exit code when a node is bad and there is no other."""
STOPPED = 128 + signal.SIGTERM
"""Exit code of a run after a clean stop."""


class Decision(enum.StrEnum):
    DONE = "done"
    AGAIN = "again"  # in another job
    RETRY = "retry"  # after a failure: in the same job if its nodes are whole, else in another
    WITHOUT = "without"  # in another job, which must not have the nodes that are bad
    STOP = "stop"


GOES_ON = (Decision.AGAIN, Decision.RETRY, Decision.WITHOUT)
"""Decisions after which the run has another attempt."""


def decide(attempt: Attempt, before: Attempt | None, *, steps: int) -> Attempt:
    """Return an ended attempt with the decision whether its run goes on.

    Args:
        before: the previous attempt, if any.
        steps: that the recipe asks for in all.
    """

    def then(decision: Decision, exit_code: int, reason: str) -> Attempt:
        return replace(attempt, decision=decision, exit_code=exit_code, reason=reason)

    code, failure = attempt.code, attempt.failure
    if code not in FINAL and attempt.step_after >= steps:
        return then(Decision.DONE, 0, f"all {steps} steps are done")
    saved = f"step {attempt.step_after} is saved"
    nodes_taken = attempt.signal in TAKEN
    if code == 0 and not nodes_taken:
        source = f"SIG{attempt.signal}" if attempt.signal else "a signal to the ranks"
        return then(Decision.STOP, STOPPED, f"stopped by {source}; {saved}")
    if nodes_taken:
        failure = TAKEN[attempt.signal]
    elif not failure:
        failure = f"the training step ended with {code}"
    if code in FINAL or (attempt.signal and not nodes_taken):
        return then(Decision.STOP, code, f"{failure}; {saved}")
    if (
        before
        and before.decision in (Decision.RETRY, Decision.AGAIN)
        and _was_idle(before)
        and _was_idle(attempt)
    ):
        mend = "fix the cause"
        if attempt.signal == WALL_TIME:
            mend = "raise job.time_limit or job.signal_s in the cluster file"
        reason = (
            f"{failure}, the second attempt in a row without a new checkpoint; {saved}; {mend}, "
            "then `qurl slurm submit`, as before, goes on"
        )
        return then(Decision.STOP, NO_PROGRESS, reason)
    if nodes_taken:
        return then(Decision.AGAIN, 0, f"{failure}; {saved}")
    return then(Decision.RETRY, code, f"{failure}; {saved}")


def _was_idle(attempt: Attempt) -> bool:
    """Return whether an attempt saved no new step."""
    return attempt.step_after <= attempt.step_before
