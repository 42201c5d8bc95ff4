"""Batches come in order, begin as soon as their staleness allows, and stop when asked."""

import contextlib
import threading

import pytest

from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.collect import Interrupted
from qurl_megatron.training.ahead import Ahead
from tests.support.waiting import PATIENCE_S, wait_until


class Engines:
    """Answers a batch when told to; remembers the order in which batches began."""

    def __init__(self):
        self.begun: list[int] = []
        self.done = {step: threading.Event() for step in range(20)}
        self.drawn = 0

    def cursor(self):
        return {"position": self.drawn}

    def draw(self):
        before = self.cursor()
        self.drawn += 1
        return before, f"prompt {self.drawn}"

    def produce(self, step, prompt, stop):
        self.begun.append(step)
        while not self.done[step].wait(0.005):
            if stop():
                raise Interrupted("stopped")
        return f"{prompt} for step {step}"


@pytest.fixture
def engines():
    return Engines()


def ahead(engines, staleness, last=10, produce=None):
    options = dict(first=1, last=last, max_staleness=staleness)
    return Ahead(engines.draw, produce or engines.produce, engines.cursor, **options)


def begun(engines, count):
    """Wait for ``count`` batches to begin; what is drawn would begin at once."""
    wait_until(lambda: len(engines.begun) >= count)
    assert engines.drawn == count
    return sorted(engines.begun)


@pytest.mark.parametrize(
    ("staleness", "at_start", "after_one"), [(0, [1], [1, 2]), (1, [1, 2], [1, 2, 3]),
                                             (3, [1, 2, 3, 4], [1, 2, 3, 4, 5])]
)  # fmt: skip
def test_a_batch_begins_when_its_oldest_allowed_version_is_published(
    engines, staleness, at_start, after_one
):
    with ahead(engines, staleness) as batches:
        batches.admit(0)
        assert begun(engines, len(at_start)) == at_start
        engines.done[1].set()
        assert batches.take(1, lambda: False) == ("prompt 1 for step 1", {"position": 1})
        assert begun(engines, len(at_start)) == at_start  # taking alone admits nothing
        batches.admit(1)
        assert begun(engines, len(after_one)) == after_one


def test_batches_that_end_out_of_order_are_handed_over_in_order_with_their_own_cursor(engines):
    with ahead(engines, 2) as batches:
        batches.admit(0)
        for step in (3, 2, 1):
            engines.done[step].set()
        taken = [batches.take(step, lambda: False) for step in (1, 2, 3)]
    assert taken == [(f"prompt {s} for step {s}", {"position": s}) for s in (1, 2, 3)]


def test_nothing_is_drawn_beyond_the_last_step(engines):
    with ahead(engines, 5, last=2) as batches:
        batches.admit(0)
        assert begun(engines, 2) == [1, 2] and engines.drawn == 2


def test_a_stop_ends_the_wait_and_leaving_ends_what_is_in_flight(engines):
    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(ahead(engines, 1))
        batches.admit(0)
        with pytest.raises(Interrupted):
            batches.take(1, lambda: True)
        leaving = threading.Thread(target=stack.pop_all().close)
    leaving.start()
    leaving.join(PATIENCE_S)
    left = not leaving.is_alive()
    for done in engines.done.values():  # or what was not stopped would go on for ever
        done.set()
    assert left  # both batches saw the stop; none was ever done


def test_what_no_engine_answered_is_asked_again_with_the_same_prompts(engines):
    asked = []

    def fail_once(step, prompt, stop):
        asked.append((step, prompt))
        if len(asked) == 1:
            raise EngineError("no engine is left")
        return prompt

    with ahead(engines, 0, produce=fail_once) as batches:
        batches.admit(0)
        with pytest.raises(EngineError):
            batches.take(1, lambda: False)
        batches.retry()
        assert batches.take(1, lambda: False) == ("prompt 1", {"position": 1})
    assert asked == [(1, "prompt 1")] * 2
