"""``qurl train`` with a loss from a file beside its recipe."""

import pytest

from tests.support.runs import Run, make_recipe

ACR = """
from qurl_megatron.algo import objective

def acr(tokens):
    limits = tokens.limits
    value = objective(
        tokens.current, tokens.proximal, tokens.behaviour, tokens.advantages, kind="acr",
        clip_low=limits.clip_low, clip_high=limits.clip_high, cap=limits.cap,
    )
    return value, {"abs_advantage": tokens.advantages.abs()}
"""

REWARD = "def score(prompt, response, answer, metadata): return sum(map(ord, response)) % 3 / 2\n"

OPTIONS = ("rollout.engines=1", "reward.kind=", "reward.function=rewards.py:score")
OWN = "algo.function=losses.py:acr"
SAME = ("policy/loss", "policy/kl_from_proximal", "optimizer/grad_norm", "rollout/kl_k3")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    root = tmp_path_factory.mktemp("own_loss")
    (root / "losses.py").write_text(ACR)
    (root / "rewards.py").write_text(REWARD)
    return make_recipe(root)


def finished(recipe, name: str, *settings: str) -> Run:
    run = Run(recipe, name, *OPTIONS, *settings)
    run.finish()
    return run


def test_a_loss_of_ones_own_trains_on_two_ranks_and_is_noticed_when_edited(recipe):
    ours = finished(recipe, "ours", "parallel.tensor=2", "train.steps=2")
    own = finished(recipe, "own", OWN, "parallel.tensor=2", "train.steps=2")
    for step in (1, 2):
        expected, found = ours.metrics()[step], own.metrics()[step]
        assert {name: found[name] for name in SAME} == {name: expected[name] for name in SAME}
        assert found["loss/abs_advantage"] > 0 and "policy/clip_fraction" not in found
    assert own.metrics()[2]["optimizer/grad_norm"] > 0

    losses = recipe.parent / "losses.py"
    losses.write_text(ACR.replace("return value", "return 2 * value"))
    again = finished(recipe, "own", OWN, "parallel.tensor=2", "train.steps=3")  # resumes
    notice = "has changed since step 2: the policy learns by the new one from here on"
    assert f"the code of algo.function={losses}:acr {notice}" in again.stdout()
