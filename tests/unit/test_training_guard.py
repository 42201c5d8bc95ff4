"""Sequences of metrics worked by hand: when the guard trips, what it says, what it remembers."""

import json
import math

import pytest

from qurl_megatron.config import GuardConfig
from qurl_megatron.training.guard import judge
from qurl_megatron.training.state import TrainState


def follow(config: GuardConfig, name: str, series, *, first: int = 1, counts=None):
    """The verdicts on a metric's values, one a step."""
    verdicts = []
    for step, value in enumerate(series, first):
        verdicts.append(judge(config, counts or {}, step, {name: value}))
        counts = verdicts[-1].counts
    return verdicts


def steps(verdicts, first: int = 1) -> list[int]:
    """At which of them the guard tripped."""
    return [step for step, verdict in enumerate(verdicts, first) if verdict.reason]


@pytest.mark.parametrize(
    ("key", "metric", "good", "bad"),
    [
        ("kl_above", "rollout/kl_k3", 0.1, 0.11),
        ("rho_above", "rollout/rho_max", 0.1, 50.0),
        ("reward_below", "reward/mean", 0.1, 0.09),
        ("entropy_below", "policy/entropy", 0.1, 0.0),
        ("entropy_above", "policy/entropy", 0.1, 3.0),
    ],
)
def test_every_threshold_trips_at_the_last_of_so_many_steps_in_a_row(key, metric, good, bad):
    config = GuardConfig(**{key: 0.1}, patience=3)
    verdicts = follow(config, metric, [bad, bad, good, bad, bad, bad, bad, good])
    assert steps(verdicts) == [6]
    assert verdicts[5].reason == (
        f"{metric} = {bad:.4g} is {'above' if bad > good else 'below'} guard.{key} = 0.1, "
        "3 steps in a row up to step 6"
    )
    assert [v.metrics["guard/tripped"] for v in verdicts] == [0, 0, 0, 0, 0, 1, 1, 0]
    [row] = [name for name in verdicts[0].metrics if name != "guard/tripped"]
    assert [v.metrics[row] for v in verdicts] == [1, 2, 0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("key", "metric"), [("kl_above", "rollout/kl_k3"), ("reward_below", "reward/mean")]
)
def test_what_is_no_finite_number_has_crossed_every_threshold(key, metric, value):
    config = GuardConfig(**{key: 0.5}, patience=1, action="halt")
    [verdict] = follow(config, metric, [value], first=4)
    assert verdict.halt
    assert verdict.reason == (
        f"{metric} = {value} is not a finite number, held against guard.{key} = 0.5, at step 4"
    )


def test_thresholds_of_zero_are_not_watched_and_without_any_there_is_nothing_to_log():
    [verdict] = follow(GuardConfig(), "rollout/kl_k3", [math.nan])
    assert (verdict.counts, verdict.metrics, verdict.reason) == ({}, {}, "")
    [verdict] = follow(GuardConfig(kl_above=1.0), "rollout/kl_k3", [0.5])
    assert verdict.metrics.keys() == {"guard/kl", "guard/tripped"}


def test_a_metric_that_a_step_lacks_leaves_its_count_alone():
    config = GuardConfig(rho_above=1.0, patience=2)
    first = judge(config, {}, 1, {"rollout/rho_max": 3.0})
    assert not first.reason
    second = judge(config, first.counts, 2, {"policy/entropy": 1.0})
    assert second.counts == {"rho": 1}
    assert judge(config, second.counts, 3, {"rollout/rho_max": 3.0}).reason


def test_dynamic_sampling_is_judged_by_all_that_it_generated():
    """Groups of mixed success have some reward whatever the policy is."""
    config = GuardConfig(reward_below=0.1, patience=1)
    metrics = {"reward/mean": 0.4, "reward/mean_generated": 0.02}
    assert judge(config, {}, 1, metrics).reason.startswith("reward/mean_generated = 0.02")


def test_thresholds_that_trip_together_are_all_named():
    config = GuardConfig(kl_above=0.1, entropy_below=0.5, patience=1, action="halt")
    metrics = {"rollout/kl_k3": 0.2, "policy/entropy": 0.4}
    assert judge(config, {}, 7, metrics).reason == (
        "rollout/kl_k3 = 0.2 is above guard.kl_above = 0.1, at step 7; "
        "policy/entropy = 0.4 is below guard.entropy_below = 0.5, at step 7"
    )


@pytest.mark.parametrize("action", ["warn", "halt"])
def test_interrupted_anywhere_it_judges_as_if_it_had_not_been(action):
    config = GuardConfig(rho_above=1.0, patience=2, action=action)
    series = [2, 2, 2, 0, 2, 2, 2, 2]
    whole = follow(config, "rollout/rho_max", series)
    for stop in range(1, len(series)):
        counts = json.loads(json.dumps(whole[stop - 1].counts))
        later = series[stop:]
        rest = follow(config, "rollout/rho_max", later, first=stop + 1, counts=counts)
        assert rest == whole[stop:]


def test_a_halted_run_that_is_started_again_has_all_of_its_patience():
    config = GuardConfig(kl_above=1.0, patience=3, action="halt")
    *_, halted = follow(config, "rollout/kl_k3", [2, 2, 2])
    assert halted.halt
    again = follow(config, "rollout/kl_k3", [2, 2, 2], first=4, counts=halted.counts)
    assert steps(again, 4) == [6]


def test_a_run_that_was_only_warned_halts_when_it_is_started_again_to_halt():
    warned = follow(GuardConfig(kl_above=1.0, patience=2), "rollout/kl_k3", [2, 2, 2])
    assert steps(warned) == [2]
    config = GuardConfig(kl_above=1.0, patience=2, action="halt")
    [verdict] = follow(config, "rollout/kl_k3", [2], first=4, counts=warned[-1].counts)
    assert verdict.halt and verdict.reason.endswith("4 steps in a row up to step 4")


def test_the_counts_come_back_with_the_state(tmp_path):
    state = TrainState(step=3, guard={"kl": 2}, unevaluated=True)
    state.write(tmp_path)
    assert TrainState.read(tmp_path) == state
