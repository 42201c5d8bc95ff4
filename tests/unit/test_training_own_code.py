"""A reward or an environment that is edited under a run is noticed where the run goes on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from qurl_megatron.config import RewardConfig, load
from qurl_megatron.rewards.own_code import checksums
from qurl_megatron.training.fork import state_of_fork
from qurl_megatron.training.state import TrainState
from qurl_megatron.training.train import adapt
from tests.support.descriptions import RECIPE_TEXT

BEFORE = TrainState(step=3, accuracy_before=0.25, accuracy=0.5)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A reward in a file, and a tool and a loss in modules that would end whoever imports them."""
    monkeypatch.chdir(tmp_path)
    for file in ("rewards.py", "own_package/inner/tool.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("def score(): ...\n")
    (tmp_path / "own_package/__init__.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "recipe.toml").write_text(RECIPE_TEXT)
    config = load(tmp_path / "recipe.toml", [f"train.run_dir={tmp_path / 'run'}"])
    rollout = replace(config.rollout, environment="own_package.inner.tool:Tool")
    reward = RewardConfig(function=f"{tmp_path}/rewards.py:score")
    return replace(config, reward=reward, rollout=rollout)


FILES = {"reward.function": "rewards.py", "rollout.environment": "own_package/inner/tool.py"}


def taken_up(config, state, changes=()):
    return adapt(config, SimpleNamespace(run_dir="run", changes=list(changes)), state)


@pytest.mark.parametrize("key", FILES)
def test_what_was_edited_is_said_and_parts_what_was_measured_before_from_what_comes(
    config, tmp_path, key
):
    state, told = taken_up(config, BEFORE)  # of before there were checksums
    assert (told, state.accuracy) == ([], 0.5) and state.own_code.keys() == {*FILES}
    assert taken_up(config, state) == (state, [])
    (tmp_path / FILES[key]).write_text("def score(): return 1\n")
    after, [said] = taken_up(config, state)
    assert said.startswith(f"the code of {key}=") and "has changed since step 3: held-out" in said
    assert after.accuracy is after.accuracy_before is None
    assert taken_up(config, after)[1] == []
    # A fork to another function has nothing of this one to be held against.
    assert state_of_fork(state, {key}, {}, evaluates=True).own_code.keys() == {*FILES} - {key}
    assert state_of_fork(state, set(), {}, evaluates=True).own_code == state.own_code


def test_code_that_has_gone_is_for_others_to_refuse(config, tmp_path):
    state, _ = taken_up(config, BEFORE)
    (tmp_path / "rewards.py").unlink()
    assert taken_up(config, state)[1] == []


@pytest.mark.parametrize("name", ["math:sqrt", "own_package.inner.nowhere.deeper:score"])
def test_code_in_no_file_is_not_watched(config, name):
    assert not checksums([name]) or name.startswith("math")
