import json

import pytest

from qurl_megatron.bench.repeats import Repeats
from qurl_megatron.bench.step import case_of, read_run


def write_run(folder, *, ahead: float) -> None:
    """Four steps of 3 s of training and 2 s of rollout, ``ahead`` of them behind the training."""
    folder.mkdir()
    metrics, spans = [], []
    for step in range(1, 5):
        start = 10.0 * step
        slow = 100.0 if step <= 2 else 1.0  # of the first steps, which do not count
        found = {"time/step": (5.0 - ahead) * slow, "time/rollout": 2.0 - ahead, "time/train": 3.0}
        metrics.append({"step": step, "time": start, "metrics": found})
        for lane, name, begin, end in (
            ("engines", "rollout", start, start + 2.0),
            ("trainer", "train", start + 2.0 - ahead, start + 5.0 - ahead),
        ):
            spans.append({"lane": lane, "name": name, "step": step, "start": begin, "end": end})
    for name, rows in (("metrics.jsonl", metrics), ("timeline.jsonl", spans)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("ahead", "share"), [(0.0, 0.0), (1.0, 0.5)])
def test_a_run_is_its_median_step_without_the_first_and_the_rollouts_overlap(
    tmp_path, ahead, share
):
    write_run(tmp_path / "run", ahead=ahead)
    found = read_run(tmp_path / "run")
    assert found["step"] == 5.0 - ahead and found["train"] == 3.0
    assert found["overlap"] == pytest.approx(share) and found["engines"] == pytest.approx(2.0)


def test_the_limit_of_a_step_is_the_longer_side(tmp_path):
    write_run(tmp_path / "run", ahead=1.0)
    runs = Repeats(seconds=[9.0], results=[read_run(tmp_path / "run")], yardsticks=[0.01])
    case = case_of("staleness 1", 1, "quickstart", runs)
    assert case.figure("step").limit == 3.0 and case.figure("step").share == 0.75
    assert case.notes["overlap"] == 0.5
