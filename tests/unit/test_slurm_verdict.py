import pytest

from qurl_megatron.cluster.folder import Attempt
from qurl_megatron.cluster.verdict import NO_PROGRESS, STOPPED, Decision, decide

AGAIN, DONE, RETRY, STOP = Decision.AGAIN, Decision.DONE, Decision.RETRY, Decision.STOP


SAVED, IDLE = (0, 8), (8, 8)


def attempts(*ended: tuple[str, tuple[int, int]]) -> list[Attempt]:
    """Earlier attempts by their decision, and their steps before and after."""
    earlier = []
    for number, (decision, (before, after)) in enumerate(ended, 1):
        earlier.append(Attempt(number, 5, 0.0, before, after, code=137, decision=decision))
    return earlier


def ended(code: int, signal: str = "", steps: tuple[int, int] = IDLE, failure: str = "") -> Attempt:
    return Attempt(9, 5, 0.0, *steps, signal, code, failure)


def retries(*steps: tuple[int, int]) -> list[Attempt]:
    return attempts(*(("retry", each) for each in steps))


@pytest.mark.parametrize(
    ("code", "signal", "steps", "earlier", "decision", "ends_with"),
    [
        pytest.param(0, "", (0, 40), [], DONE, 0, id="all steps"),
        pytest.param(143, "", (20, 40), [], DONE, 0, id="and a rank died in its goodbye"),
        pytest.param(3, "", (20, 40), [], STOP, 3, id="all steps, and the guard"),
        pytest.param(0, "USR1", (0, 12), [], AGAIN, 0, id="time is up"),
        pytest.param(0, "USR1", (12, 12), [], AGAIN, 0, id="time is up, no new step"),
        pytest.param(0, "USR1", (8, 8), retries(IDLE), STOP, NO_PROGRESS, id="twice"),
        pytest.param(2, "USR1", (0, 12), [], STOP, 2, id="a mistake in the last minute"),
        pytest.param(0, "TERM", (0, 12), [], STOP, STOPPED, id="cancelled"),
        pytest.param(137, "TERM", (0, 12), [], STOP, 137, id="cancelled, and it failed"),
        pytest.param(0, "", (0, 12), [], STOP, STOPPED, id="a signal past the supervisor"),
        pytest.param(1, "", (0, 12), [], RETRY, 1, id="it failed"),
        pytest.param(137, "", IDLE, retries(IDLE), STOP, NO_PROGRESS, id="and again before one"),
        pytest.param(137, "", (8, 9), retries(IDLE), RETRY, 137, id="but it saved this time"),
        pytest.param(137, "", IDLE, retries(SAVED), RETRY, 137, id="the last one had saved"),
        pytest.param(137, "", (8, 9), retries(SAVED, SAVED), RETRY, 137, id="the third failure"),
        pytest.param(137, "", (8, 9), retries(*[SAVED] * 3), STOP, 137, id="one too many"),
        pytest.param(
            *(137, "", (8, 9), attempts(*[("retry", SAVED)] * 3, ("again", SAVED)), RETRY, 137),
            id="an attempt that ended otherwise begins the count again",
        ),
        pytest.param(
            *(137, "", IDLE, attempts(("stop", IDLE)), RETRY, 137), id="somebody has looked since"
        ),
        pytest.param(0, "preempted", (0, 12), [], AGAIN, 0, id="preempted"),
        pytest.param(1, "preempted", (8, 9), retries(*[SAVED] * 3), AGAIN, 0, id="no failure"),
        pytest.param(
            *(0, "preempted", IDLE, attempts(("again", IDLE)), STOP, NO_PROGRESS),
            id="preempted twice before a checkpoint",
        ),
    ],
)
def test_what_follows_on_an_attempt(code, signal, steps, earlier, decision, ends_with):
    outcome = decide(ended(code, signal, steps), earlier, steps=40, retries=3)
    assert (outcome.decision, outcome.exit_code) == (decision, ends_with)


def test_without_retries_the_first_failure_ends_the_job():
    outcome = decide(ended(137, "", SAVED), [], steps=40, retries=0)
    assert outcome.decision == STOP
    assert "job.retries=0 allows no further attempt; step 8 is saved" in outcome.reason


@pytest.mark.parametrize(
    ("attempt", "mend"),
    [
        (ended(137, failure="hung"), "step 8 is saved; fix the cause, then `qurl slurm submit`"),
        (ended(0, "USR1"), "raise job.time_limit or job.signal_s in the cluster file"),
    ],
)
def test_two_attempts_without_a_checkpoint_are_one_sentence_with_the_mend(attempt, mend):
    outcome = decide(attempt, retries(IDLE), steps=40, retries=3)
    assert ", the second attempt in a row without a new checkpoint" in outcome.reason
    assert mend in outcome.reason
