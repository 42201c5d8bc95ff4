import math
import random
import statistics
import subprocess
import sys

import pytest

from qurl_megatron.observe.metrics import (
    Cosine,
    EffectiveSampleSize,
    ExplainedVariance,
    Max,
    Mean,
    Min,
    StdDev,
    Sum,
    Timer,
    merge,
    values,
)


def _measure(weights: list[float]) -> dict:
    """What one microbatch reports about its tokens."""
    return {
        "mean": Mean(sum(weights), len(weights)),
        "sum": Sum(sum(weights)),
        "max": Max(max(weights)),
        "min": Min(min(weights)),
        "ess": EffectiveSampleSize(sum(weights), sum(w * w for w in weights), len(weights)),
        "std": StdDev(sum(weights), sum(w * w for w in weights), len(weights)),
    }


def test_merging_uneven_microbatches_equals_measuring_the_whole_batch():
    noise = random.Random(0)
    batch = [noise.lognormvariate(0, 1) for _ in range(60)]
    parts = [batch[:1], batch[1:20], batch[20:57], batch[57:]]
    merged = values(merge(_measure(part) for part in parts))
    assert merged == pytest.approx(values(_measure(batch)), rel=1e-12)


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        (EffectiveSampleSize(8.0, 16.0, 4.0), 1.0),  # equal weights
        (EffectiveSampleSize(5.0, 25.0, 4.0), 0.25),  # a single one
        (Cosine(-2.0, 1.0, 4.0), -1.0),
        (Cosine(0.0, 0.0, 5.0), 0.0),
        (StdDev(4.0, 8.0, 2), 0.0),
        # Nothing was measured, or nothing varies.
        (Mean(0.0, 0.0), math.nan),
        (StdDev(2.0, 4.0, 1), math.nan),
        (ExplainedVariance(0.1 + 0.1 + 0.1, 3 * 0.1**2, 0.0, 0.02, 3), math.nan),
        (ExplainedVariance(0, 0, 0, 0, 0), math.nan),
    ],
)
def test_values_by_hand(metric, value):
    assert metric.value == pytest.approx(value, nan_ok=True)


def test_a_deviation_is_that_of_the_textbook():
    noise = random.Random(1)
    xs = [noise.random() for _ in range(50)]
    measured = StdDev(sum(xs), sum(x * x for x in xs), len(xs))
    assert measured.value == pytest.approx(statistics.stdev(xs))


def test_a_cosine_is_that_of_the_vectors_its_parts_make_up():
    # (3, 0) and (3, 4): 9 / (3 * 5), in two parts.
    parts = [{"x": Cosine(9.0, 9.0, 9.0)}, {"x": Cosine(0.0, 0.0, 16.0)}]
    assert merge(parts)["x"].value == 0.6


def _explained(targets: list[float], predictions: list[float]) -> ExplainedVariance:
    errors = [t - p for t, p in zip(targets, predictions, strict=True)]
    return ExplainedVariance(
        sum(targets),
        sum(t * t for t in targets),
        sum(errors),
        sum(e * e for e in errors),
        len(targets),
    )


def test_explained_variance_is_one_less_the_share_of_the_variance_that_is_missed():
    # Errors 0, 0, 0, 2 vary by 3/4 around their mean, the targets 0, 1, 2, 5 by 7/2.
    targets, predictions = [0.0, 1.0, 2.0, 5.0], [0.0, 1.0, 2.0, 3.0]
    assert _explained(targets, predictions).value == pytest.approx(1 - 0.75 / 3.5)
    in_parts = merge({"x": _explained(targets[i:j], predictions[i:j])} for i, j in ((0, 1), (1, 4)))
    assert values(in_parts)["x"] == pytest.approx(1 - 0.75 / 3.5)
    # A constant offset is no variance missed; a constant prediction explains none.
    assert _explained(targets, [t + 1 for t in targets]).value == pytest.approx(1.0)
    assert _explained(targets, [0.5] * 4).value == pytest.approx(0.0)


@pytest.mark.parametrize("kind", [Max, Min])
def test_nan_shows_in_an_extreme_whichever_rank_it_came_from(kind):
    for order in ([1.0, math.nan], [math.nan, 1.0]):
        assert math.isnan(merge({"x": kind(value)} for value in order)["x"].value)


def test_metrics_that_only_some_ranks_have_are_kept():
    parts = [{"a": Sum(1.0)}, {"b": Mean(0.0, 0.0)}, {"b": Mean(3.0, 2.0)}]
    assert values(merge(parts)) == {"a": 1.0, "b": 1.5}


def test_merging_two_kinds_under_one_name_names_it():
    with pytest.raises(AssertionError, match="reward/mean is a Mean .* and a Sum"):
        merge([{"reward/mean": Mean(1.0, 1.0)}, {"reward/mean": Sum(1.0)}])


def test_timer_adds_up_the_visits_to_a_phase_and_keeps_the_slowest_rank():
    seconds = iter([0.0, 1.0, 3.0, 4.0, 4.5, 10.0])
    announced = []
    timer = Timer(announced.append, clock=lambda: next(seconds))
    for _ in range(2):
        with timer.phase("rollout"):
            pass
    fast = {"time/rollout": Max(1.0), "time/step": Max(9.0)}
    assert values(merge([timer.metrics(), fast])) == {"time/rollout": 2.5, "time/step": 10.0}
    assert announced == ["rollout", "rollout"]


def test_timer_refuses_a_phase_inside_a_phase():
    timer = Timer()
    nested = pytest.raises(AssertionError, match="publish inside train")
    with timer.phase("train"), nested, timer.phase("publish"):
        pass


def test_reading_and_following_a_run_loads_nothing_heavy():
    code = (
        "import sys\n"
        "from qurl_megatron.observe import metrics, progress, samples, sinks, timeline\n"
        "from qurl_megatron.evaluation import study_results\n"
        "heavy = {'torch', 'matplotlib', 'tensorboard'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
