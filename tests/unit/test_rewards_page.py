"""The example of docs/rewards.md runs as it stands there."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qurl_megatron.config import RewardConfig, load
from qurl_megatron.kit.errors import CAUSES
from qurl_megatron.rewards import Item, RewardPool, check_rewards
from tests.support.fake_engine import Served

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text(encoding="utf-8")
REWARDS, JUDGE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
RECIPES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
FUNCTION, SUM, HTTP = RECIPES
REST = '[model]\npath = "m"\n[data]\ntask = "chain_sum"\n[rollout]\nsamples_per_prompt = 8\n'
ITEMS = [
    Item("2 + 3 =", response, "5", {}) for response in ("it is 5", "5", "4", "I do not know that")
]


def section(folder: Path, table: str) -> RewardConfig:
    """The reward of a recipe that lies beside rewards.py."""
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "recipe.toml").write_text(REST + table)
    return load(folder / "recipe.toml").reward


@pytest.mark.parametrize(
    ("table", "expected"),
    [(FUNCTION, [1.0, 1.0, 0.1, 0.0]), (SUM, [1 + 0.2 / 3, 1.2, 0.2, 0.04])],
    ids=["function", "sum"],
)
def test_the_functions_score_as_the_page_says(table, expected, tmp_path):
    config = section(tmp_path, table)
    check_rewards(config)
    with RewardPool(config) as pool:
        assert pool.grade(ITEMS) == pytest.approx(expected)


def test_a_function_is_tried_by_the_command_of_the_page(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    (command,) = re.findall(r"```sh\n(python .*)\n```", PAGE)
    command = command.replace("python", sys.executable, 1)
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "1.0\n", done.stderr


def test_the_judge_scores_for_those_who_bring_its_key(tmp_path, monkeypatch):
    space = {"__name__": "judge"}
    exec(JUDGE, space)
    space["Judge"].log_message = lambda *words: None
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with Served(space["Judge"]) as served:
        config = section(tmp_path, HTTP.replace("http://127.0.0.1:8100", served.url))
        check_rewards(config)
        with RewardPool(dataclasses.replace(config, workers=1)) as pool:
            assert pool.grade(ITEMS) == [0.0, 1.0, 0.0, 0.0]


def test_the_page_names_every_key_and_every_metric():
    for field in dataclasses.fields(RewardConfig):
        assert re.search(rf"\b{field.name}\b", PAGE), field.name
    for cause in CAUSES:
        assert f"`reward/{cause}`" in PAGE
