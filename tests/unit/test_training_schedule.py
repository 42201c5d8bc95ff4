"""The learning rate of each update, worked out by hand."""

from types import SimpleNamespace

import pytest

from qurl_megatron.actor.trained import schedule
from qurl_megatron.config import OptimizerConfig

SIX = dict(lr=1.0, warmup_steps=2, decay_steps=6)  # updates, of which two warm up


def rates(updates: int, **settings) -> list[float]:
    optimizer = SimpleNamespace(param_groups=[{}])
    scheduler, found = schedule(optimizer, OptimizerConfig(**settings)), []
    for _ in range(updates):
        scheduler.step(1)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(schedule="constant"), [0.5, 1, 1, 1, 1, 1, 1, 1]),
        (dict(schedule="linear"), [0.5, 1, 0.8, 0.6, 0.4, 0.2, 0, 0]),
        (dict(schedule="linear", decay_to=0.1), [0.5, 1, 0.82, 0.64, 0.46, 0.28, 0.1, 0.1]),
        # (1 + cos(pi n / 5)) / 2
        (dict(schedule="cosine"), [0.5, 1, 0.904508, 0.654508, 0.345492, 0.095492, 0, 0]),
    ],
)
def test_every_update_of_a_schedule_has_a_size_and_the_next_has_what_is_left(settings, expected):
    assert rates(8, **SIX, **settings) == pytest.approx(expected, abs=1e-6)


def test_without_warm_up_the_first_update_is_a_little_below_the_full_rate():
    assert rates(2, lr=1.0, decay_steps=9, schedule="linear") == pytest.approx([0.9, 0.8])


def test_a_schedule_goes_on_from_its_state_with_what_the_recipe_says_now():
    before, now = (
        schedule(SimpleNamespace(param_groups=[{}]), OptimizerConfig(**settings))
        for settings in ({**SIX, "schedule": "cosine"}, {**SIX, "lr": 3.0, "schedule": "linear"})
    )
    before.step(3)
    now.load_state_dict(before.state_dict())
    assert now.optimizer.param_groups[0]["lr"] == pytest.approx(2.4)
