"""Spans survive the file, and their overlap is counted."""

import json

import pytest

from qurl_megatron.observe.report import write_trace
from qurl_megatron.observe.timeline import Span, Timeline, overlap


def one_step_off(steps: int) -> list[Span]:
    """Ten seconds a step: the engines are always busy, the trainer from second 2 on."""
    spans = []
    for step in range(1, steps + 1):
        at = 1000.0 + 10 * step
        spans += [
            Span("engines", "rollout", step + 1, at, at + 10),
            Span("trainer", "rollout", step, at, at + 2),
            Span("trainer", "train", step, at + 2, at + 9),
            Span("update", "publish", step, at + 9, at + 10),
        ]
    return spans


def test_spans_come_back_and_that_of_a_block_that_raises_too(tmp_path):
    path = tmp_path / "timeline.jsonl"
    timeline = Timeline(path)
    for span in one_step_off(3):
        timeline.add(span)
    timeline.event("fleet", "engine-1 died", 3, at=1032.0)
    with pytest.raises(ZeroDivisionError), timeline.span("trainer", "train", 1):
        raise ZeroDivisionError
    timeline.close()
    *spans, raised = Timeline.read(path)
    assert spans == [*one_step_off(3), Span("fleet", "engine-1 died", 3, 1032, 1032)]
    assert raised.name == "train" and raised.end >= raised.start


def test_a_trace_has_a_lane_for_each_process_and_events_for_spans(tmp_path):
    spans = [Span("trainer", "train", 3, 1.5, 2.0), Span("fleet", "engine-1 died", 3, 1.75, 1.75)]
    write_trace(spans, tmp_path / "trace.json")
    train = {"name": "train", "cat": "trainer", "pid": 0, "tid": 0, "args": {"step": 3}}
    died = {"name": "engine-1 died", "cat": "fleet", "pid": 1, "tid": 0, "args": {"step": 3}}
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "trainer"}},
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "fleet"}},
        {**train, "ph": "b", "id": 0, "ts": 1_500_000},
        {**train, "ph": "e", "id": 0, "ts": 2_000_000},
        {**died, "ph": "b", "id": 1, "ts": 1_750_000},
        {**died, "ph": "e", "id": 1, "ts": 1_750_000},
    ]


def test_overlap_is_the_share_of_generating_that_other_work_hides():
    # The engines generate all 10 s of a step, of which the trainer trains 7.
    assert overlap(one_step_off(4)) == pytest.approx(0.7)
    synchronous = [
        Span("engines", "rollout", 1, 0.0, 5.0),
        Span("trainer", "rollout", 1, 0.0, 5.0),
        Span("trainer", "train", 1, 5.0, 9.0),
    ]
    assert overlap(synchronous) == 0.0
