"""Terminal and report say in one sentence whether the correction of the loss did anything."""

import pytest

from qurl_megatron.observe.metrics import History
from qurl_megatron.observe.report import what_acted
from qurl_megatron.observe.sinks import Record

STILL = {
    "rollout/rho_max": 1.27,
    "rollout/truncated_weight_fraction": 0.0,
    "acr/active_fraction": 0.0,
    "acr/rescued_fraction": 0.0,
    "correction/banded_fraction": 0.0,
}
BUSY = {
    "rollout/rho_max": 31.0,
    "rollout/truncated_weight_fraction": 0.02,
    "acr/active_fraction": 0.012,
    "acr/rescued_fraction": 0.0005,
    "acr/gradient_share": 0.004,
    "correction/banded_fraction": 0.03,
}


def said(objective, *steps):
    history = History([Record(n, 0.0, metrics) for n, metrics in enumerate(steps, 1)])
    return what_acted(history, {"objective": objective, "cap": 2.0})


@pytest.mark.parametrize(
    ("objective", "still", "busy"),
    [
        (
            "acr",
            "ACR never acted: no importance weight above C = 2 (largest 1.27)",
            "ACR acted: a wider clip range for 0.6 % of the tokens, 0.03 % rescued from TIS's, "
            "0.4 % of the gradient (C = 2, largest importance weight 31)",
        ),
        (
            "tis",
            "TIS never acted: no importance weight above C = 2 (largest 1.27)",
            "TIS acted: 1.0 % of the importance weights cut to 2 (largest 31)",
        ),
        (
            "icepop",
            "IcePop never acted: no importance weight outside its band (largest 1.27)",
            "IcePop acted: 1.5 % of the tokens left out (largest 31)",
        ),
    ],
)
def test_what_a_correction_did_over_the_steps(objective, still, busy):
    assert said(objective, STILL, STILL) == still
    assert said(objective, STILL, BUSY) == busy


def test_weights_above_the_cap_that_acr_does_not_touch_are_told_apart():
    metrics = {**STILL, "rollout/rho_max": 2.757, "rollout/truncated_weight_fraction": 0.0007}
    assert said("acr", STILL, metrics) == (
        "ACR never acted: no token of a positive advantage had an importance weight above C = 2 "
        "(largest 2.76)"
    )


def test_nothing_is_said_where_nothing_corrects_or_compares():
    assert said("acr", {"acr/active_fraction": 0.0}) == said("naive", BUSY) == ""
