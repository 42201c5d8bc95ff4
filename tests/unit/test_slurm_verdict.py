import pytest

from qurl_megatron.cluster.folder import Attempt
from qurl_megatron.cluster.verdict import NO_PROGRESS, STOPPED, Decision, decide

AGAIN, DONE, RETRY, STOP = Decision.AGAIN, Decision.DONE, Decision.RETRY, Decision.STOP
SAVED, IDLE = (0, 8), (8, 8)


def attempt(code: int, steps: tuple[int, int], signal: str = "", **values) -> Attempt:
    return Attempt(9, 5, 0.0, *steps, signal, code, **values)


FAILED_IDLE, FAILED = (RETRY, IDLE), (RETRY, SAVED)
CASES = {
    "all steps": (0, "", (0, 40), None, DONE, 0),
    "and a rank died in its goodbye": (143, "", (20, 40), None, DONE, 0),
    "all steps, and the guard": (3, "", (20, 40), None, STOP, 3),
    "time is up": (0, "USR1", (0, 12), None, AGAIN, 0),
    "time is up, no new step": (0, "USR1", IDLE, None, AGAIN, 0),
    "twice": (0, "USR1", IDLE, FAILED_IDLE, STOP, NO_PROGRESS),
    "a mistake in the last minute": (2, "USR1", (0, 12), None, STOP, 2),
    "cancelled": (0, "TERM", (0, 12), None, STOP, STOPPED),
    "cancelled, and it failed": (137, "TERM", (0, 12), None, STOP, 137),
    "a signal past the supervisor": (0, "", (0, 12), None, STOP, STOPPED),
    "it failed": (1, "", (0, 12), None, RETRY, 1),
    "and again before a checkpoint": (137, "", IDLE, FAILED_IDLE, STOP, NO_PROGRESS),
    "but it saved this time": (137, "", (8, 9), FAILED_IDLE, RETRY, 137),
    "the last one had saved": (137, "", IDLE, FAILED, RETRY, 137),
    "somebody has looked since": (137, "", IDLE, (STOP, IDLE), RETRY, 137),
    "preempted": (1, "preempted", (8, 9), FAILED, AGAIN, 0),
    "preempted twice before one": (0, "preempted", IDLE, (AGAIN, IDLE), STOP, NO_PROGRESS),
}


@pytest.mark.parametrize(
    ("code", "signal", "steps", "before", "decision", "ends_with"), CASES.values(), ids=CASES
)
def test_what_follows_on_an_attempt(code, signal, steps, before, decision, ends_with):
    if before is not None:
        before = attempt(137, before[1], decision=before[0])
    outcome = decide(attempt(code, steps, signal), before, steps=40)
    assert (outcome.decision, outcome.exit_code) == (decision, ends_with)


@pytest.mark.parametrize(
    ("ended", "mend"),
    [
        (attempt(137, IDLE, failure="hung"), "step 8 is saved; fix the cause, then `qurl slurm"),
        (attempt(0, IDLE, "USR1"), "raise job.time_limit or job.signal_s in the cluster file"),
    ],
)
def test_two_attempts_without_a_checkpoint_are_one_sentence_with_the_mend(ended, mend):
    outcome = decide(ended, attempt(137, IDLE, decision=RETRY), steps=40)
    assert ", the second attempt in a row without a new checkpoint" in outcome.reason
    assert mend in outcome.reason
