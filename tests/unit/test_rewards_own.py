"""Functions of the user's own: found or refused in one sentence, called, and never believed."""

import asyncio
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from qurl_megatron.config import RewardConfig
from qurl_megatron.kit.errors import ConfigError, Unscored, unscored
from qurl_megatron.rewards import Item, RewardPool
from qurl_megatron.rewards.pool import RewardDown, Tally, refuse_none_scored
from qurl_megatron.rewards.verifiers import as_score
from qurl_megatron.rewards.worker import call, own_reward, score_of
from qurl_megatron.rewards.workers import as_line
from tests.support.rewards import causes, items, write_functions
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    return write_functions(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def pool(own):
    config = RewardConfig(function=f"{own}:score", workers=2, timeout_s=5.0, failed=-1.0)
    with RewardPool(config) as pool:
        yield pool


FIELDS = {"prompt": "1", "response": "2", "answer": "3", "metadata": {"a": 1}}


@pytest.mark.parametrize("name", ["echo", "later"])
def test_a_function_of_a_file_gets_the_four_fields_by_name_and_may_be_async(own, name):
    reward = own_reward(f"reward.function={own}:{name}")
    assert [reward(FIELDS), reward(FIELDS)] == [1231.0, 1231.0]


def test_a_file_finds_modules_beside_it_but_they_hide_none_that_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (tmp_path / "own_units.py").write_text("KILO = 1000\n")
    (tmp_path / "colorsys.py").write_text("raise AssertionError\n")
    (tmp_path / "near.py").write_text(
        "import colorsys, math, own_units\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Found:\n    value: 'float'\n"
        "def score(**fields):\n    return math.floor(Found(1.5).value) * own_units.KILO\n"
    )
    assert own_reward(f"k={tmp_path}/near.py:score")(FIELDS) == 1e3


def test_gaps_of_a_table_are_null_in_json():
    gaps = {"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}}
    assert json.loads(as_line(gaps)) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


def test_a_function_of_a_module_is_found_and_may_leave_fields_out(own, monkeypatch):
    monkeypatch.syspath_prepend(own.parent)
    assert own_reward("k=own:leaves_out")(FIELDS) == 2.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere:score", r"cannot be imported: ModuleNotFoundError: No module named 'nowhere'; "),
        ("none.py:score", r"none.py does not exist; a relative path begins at the recipe's folder"),
        ("broken.py:score", r"cannot be imported: ZeroDivisionError: .* \(broken.py, line 2\); fi"),
        ("leaves.py:score", r"cannot be imported: SystemExit: 3 \(leaves.py, line 1\); fi"),
        ("stops.py:score", r"cannot be imported: KeyboardInterrupt \(stops.py, line 1\); fi"),
        ("opens.py:score", r"be imported: FileNotFoundError: .*'weights.bin' \(opens.py, line 1"),
        ("own.py:scor", r"own.py has no scor; did you mean score\?"),
        ("own.py:xyz", r"own.py has no xyz; it has misbehave, score, leaves_out"),
        ("imports.py:load", r"imports.py has no load; it has score$"),
        ("imports.py:Scorer", r"imports.py:Scorer is a class; name a function \(it has score\)"),
        ("own.py:number", r"is a value of type int; name a function \(it has misbehave, score"),
        ("own.py:two", r"cannot be called as two\(prompt=.*: got an unexpected .*'prompt'; "),
    ],
)
def test_a_name_that_leads_to_no_reward_is_one_sentence(name, said, own):
    folder = own.parent
    (folder / "broken.py").write_text("one = 1\none / 0\n")
    (folder / "leaves.py").write_text("raise SystemExit(3)\n")
    (folder / "stops.py").write_text("raise KeyboardInterrupt\n")
    (folder / "opens.py").write_text("open('weights.bin')\n")
    (folder / "imports.py").write_text(
        "from json import loads\nclass Scorer: ...\ndef score(): ...\n"
    )
    target = name if name == "nowhere:score" else f"{folder}/{name}"
    with pytest.raises(ConfigError) as error:
        own_reward(f"reward.function={target}")
    assert re.search(said, str(error.value)), error.value
    assert str(error.value).startswith(f"reward.function={target}")
    assert "\n" not in str(error.value)


class Leaving(dict):
    def __contains__(self, name):
        raise SystemExit


def test_a_score_whose_own_code_fails_is_an_exception_and_its_type_is_printable():
    def own(response, **others):
        return Leaving() if response == "leaves" else type("\x1b[2J", (), {})()

    runner = asyncio.Runner()
    leaves = call(own, score_of, runner, {"response": "leaves"})
    assert isinstance(leaves, Unscored) and leaves.why.startswith("SystemExit (test_rewards_own")
    odd = Unscored("invalid", "a value of type ?[2J")
    assert call(own, score_of, runner, {"response": "odd"}) == odd


class Odd:
    def __float__(self):
        raise KeyError("odd")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (True, 1.0), (-0.5, -0.5), (1e6, 1e6)]
    + [(value, None) for value in (math.nan, math.inf, -math.inf, 1e7, 10**400, None, "0.5", b"1")]
    + [(np.float32(0.25), 0.25), (np.array(0.25), 0.25), (np.array(math.nan), None)]
    + [(value, None) for value in ([1.0], 1j, {"score": 1}, np.ones(2))]
    + [pytest.param(Odd(), None, id="odd")],
    ids=repr,
)
def test_only_finite_numbers_are_scores(value, expected):
    found = as_score(value)
    assert found == expected if expected is not None else found.cause == "invalid"


def test_a_reason_fits_on_a_line_and_does_nothing_to_a_terminal():
    assert unscored("exceptions", "a\n  b\x1b[2J\x07c").why == "a b?[2J?c"
    assert len(unscored("exceptions", "x" * 10_000).why) == 300


def test_each_way_to_fail_has_its_cause_and_costs_no_other_response_its_score(pool):
    ways = ("raise", "exit", "die", "hang", "nan", "inf", "none", "text", "huge")
    scores = pool.grade(items("0.25", *ways, "true", "stdin", "7"))
    found = ["exceptions", "exceptions", "crashes", "timeouts", *["invalid"] * 5]
    assert causes(scores) == [0.25, *found, 1.0, 0.0, 7.0]
    tally = Tally.of(scores)
    assert tally.first["exceptions"] == "ValueError: no unit in this response (own.py, line 7)"
    assert "2 raised (ValueError: no unit in this" in tally.said()
    metrics = {name: metric.value for name, metric in tally.metrics().items()}
    assert metrics["reward/failed_fraction"] == 9 / 13
    assert (metrics["reward/timeouts"], metrics["reward/unanswered"]) == (1, 0)


def test_a_child_that_a_reward_forks_never_answers_in_its_place(own):
    texts = [text for i in range(8) for text in (f"{i}.5", "forks", "forks-to-raise", f"{i}.25")]
    expected = [score for i in range(8) for score in (i + 0.5, 7.0, 8.0, i + 0.25)]
    with RewardPool(RewardConfig(function=f"{own}:score", workers=1)) as pool:
        assert pool.grade(items(*texts)) == expected


def test_what_a_function_started_ends_with_its_worker(pool, tmp_path):
    marked = Item("", "children", str(tmp_path), {})
    assert causes(pool.grade([marked])) == ["timeouts"]

    def started() -> list[psutil.Process]:
        found = psutil.process_iter(["cmdline"])
        return [one for one in found if str(tmp_path) in (one.info["cmdline"] or [])]

    wait_until(lambda: not started())


@pytest.mark.parametrize("times, score", [(1, 1.0), (2, "crashes")])
def test_a_response_whose_worker_is_killed_is_scored_by_another_one_once(
    pool, tmp_path, times, score
):
    killed = Item("", "killed", f"{times} {tmp_path}/seen", {})
    assert causes(pool.grade([killed, *items("0.5")])) == [score, 0.5]


def test_a_dict_like_verls_is_its_score():
    assert score_of({"score": 0.5, "acc": True, "pred": "7"}) == 0.5
    assert score_of({"acc": 1.0}) == Unscored("invalid", "a dict without a 'score'")


def test_a_run_that_is_to_stop_is_told_why(own):
    with RewardPool(RewardConfig(function=f"{own}:score", on_failure="stop")) as pool:
        assert pool.grade(items("1")) == [1.0]
        with pytest.raises(ConfigError) as error:
            pool.grade(items("1", "raise"))
    assert str(error.value) == (
        "1 of 2 responses could not be scored: 1 raised (ValueError: no unit in this response "
        "(own.py, line 7)); fix the reward, or set reward.on_failure=score to give such responses "
        "reward.failed"
    )


NONE, DOWN = Unscored("exceptions", "KeyError"), Unscored("unanswered", "http://a:1 is silent")
LOST = Unscored("environment", "raised: Oops")


@pytest.mark.parametrize(
    "scores, kind, message",
    [
        (
            [NONE, Unscored("invalid", "nan")],
            ConfigError,
            "SCORER scored none of 2 responses: 1 raised (KeyError), 1 got no finite number (nan); "
            "fix it, and call it on one response first, as docs/rewards.md shows under "
            '"Try it"',
        ),
        (
            [LOST] * 2,
            ConfigError,
            "none of 2 responses could be scored: 2 failed in the environment (raised: Oops); fix "
            "rollout.environment",
        ),
        (  # which takes no blame from a server that is down
            [DOWN, LOST],
            RewardDown,
            "SCORER scored none of 2 responses: 1 got no answer (http://a:1 is silent), 1 failed "
            "in the environment (raised: Oops); start its server, or have it answer",
        ),
    ],
)
def test_a_reward_that_scores_nothing_is_named_with_what_it_said(scores, kind, message):
    with pytest.raises(kind) as error:
        refuse_none_scored(Tally.of(scores), "SCORER")
    assert str(error.value) == message and type(error.value) is kind
    refuse_none_scored(Tally.of([*scores, 0.0]), "SCORER")  # one has a score
    refuse_none_scored(Tally(), "SCORER")
