import pytest

from qurl_megatron.cluster.folder import Attempt
from qurl_megatron.cluster.verdict import NO_PROGRESS, STOPPED, Decision, History, decide, history

AGAIN, DONE, RETRY, STOP = Decision.AGAIN, Decision.DONE, Decision.RETRY, Decision.STOP


@pytest.mark.parametrize(
    ("code", "stop_reason", "steps", "earlier", "decision", "ends_with"),
    [
        pytest.param(0, "", (0, 40), (), DONE, 0, id="all steps"),
        pytest.param(0, "USR1", (20, 40), (), DONE, 0, id="all steps in the last minute"),
        pytest.param(
            143, "", (20, 40), (), DONE, 0, id="all steps, and a rank died in its goodbye"
        ),
        pytest.param(3, "", (20, 40), (), STOP, 3, id="all steps, and the guard"),
        pytest.param(0, "USR1", (0, 12), (), AGAIN, 0, id="time is up"),
        pytest.param(137, "USR1", (8, 12), (), AGAIN, 0, id="time is up in the last save"),
        pytest.param(0, "USR1", (12, 12), (), STOP, NO_PROGRESS, id="time is up, no new step"),
        pytest.param(137, "USR1", (12, 12), (), STOP, NO_PROGRESS, id="in the first save"),
        pytest.param(2, "USR1", (0, 12), (), STOP, 2, id="a mistake in the last minute"),
        pytest.param(3, "USR1", (0, 12), (), STOP, 3, id="the guard in the last minute"),
        pytest.param(0, "TERM", (0, 12), (), STOP, STOPPED, id="cancelled"),
        pytest.param(137, "TERM", (0, 12), (), STOP, 137, id="cancelled, and it failed"),
        pytest.param(0, "", (0, 12), (), STOP, STOPPED, id="a signal past the supervisor"),
        pytest.param(1, "", (0, 12), (), RETRY, 1, id="it failed"),
        pytest.param(137, "", (0, 0), (), RETRY, 137, id="it failed before a checkpoint"),
        pytest.param(137, "", (8, 8), (1, True), STOP, NO_PROGRESS, id="and again before one"),
        pytest.param(137, "", (8, 9), (1, True), RETRY, 137, id="but it saved this time"),
        pytest.param(137, "", (8, 8), (1, False), RETRY, 137, id="but the last one had saved"),
        pytest.param(137, "", (8, 9), (2, False), RETRY, 137, id="the third failure"),
        pytest.param(137, "", (8, 9), (3, False), STOP, 137, id="one too many"),
        pytest.param(2, "", (0, 12), (), STOP, 2, id="a mistake"),
        pytest.param(3, "", (0, 12), (), STOP, 3, id="the guard"),
        pytest.param(0, "preempted", (0, 12), (), AGAIN, 0, id="preempted"),
        pytest.param(0, "preempted", (8, 8), (), AGAIN, 0, id="preempted before a checkpoint"),
        pytest.param(1, "preempted", (8, 9), (3, False), AGAIN, 0, id="that is no failure"),
        pytest.param(0, "preempted", (8, 8), (0, True), STOP, NO_PROGRESS, id="and once more"),
        pytest.param(2, "preempted", (8, 9), (), STOP, 2, id="a mistake while preempted"),
    ],
)
def test_what_follows_on_an_attempt(code, stop_reason, steps, earlier, decision, ends_with):
    outcome = decide(code, stop_reason, *steps, History(*earlier), steps=40, retries=3)
    assert (outcome.decision, outcome.code) == (decision, ends_with)


def test_time_that_is_up_soon_after_a_failure_says_nothing_of_a_whole_job():
    again = decide(0, "USR1", 8, 8, History(1, False), steps=40, retries=3, late=True)
    assert (again.decision, again.code) == (AGAIN, 0)
    stuck = decide(0, "USR1", 8, 8, History(1, True), steps=40, retries=3, late=True)
    assert (stuck.decision, stuck.code) == (STOP, NO_PROGRESS)


def test_without_retries_the_first_failure_ends_the_job():
    outcome = decide(137, "", 0, 8, History(), steps=40, retries=0)
    assert outcome.decision is STOP
    assert "job.retries=0 allows no further attempt; step 8 is saved" in outcome.reason


def test_two_attempts_without_a_checkpoint_are_one_sentence_with_the_mend():
    outcome = decide(137, "", 8, 8, History(1, True), steps=40, retries=3, failure="hung")
    assert outcome.reason.startswith("hung, the second attempt in a row without a new checkpoint")
    assert "step 8 is saved" in outcome.reason and "`qurl slurm submit`" in outcome.reason


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([], History(0, False)),
        ([("retry", 0, 8)], History(1, False)),
        ([("retry", 0, 0)], History(1, True)),
        ([("retry", 0, 8), ("retry", 8, 16), ("retry", 16, 16)], History(3, True)),
        ([("retry", 0, 8), ("again", 8, 16)], History(0, False)),
        ([("retry", 0, 8), ("again", 8, 8)], History(0, True)),
        ([("retry", 0, 0), ("stop", 0, 0)], History(0, False)),
        ([("retry", 0, 8), ("again", 8, 16), ("retry", 16, 17)], History(1, False)),
    ],
)
def test_failures_count_from_the_last_attempt_that_ended_otherwise(attempts, expected):
    records = [
        Attempt(n, 5, 0, first, last, "", 137, decision)
        for n, (decision, first, last) in enumerate(attempts, 1)
    ]
    assert history(records) == expected
