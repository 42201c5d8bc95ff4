"""Rollouts on disk, and what follows from scoring them again."""

import json
from dataclasses import replace

import numpy as np
import pytest

from qurl_megatron.config import load
from qurl_megatron.evaluation.rescore import _by_engine, compared, verdict
from qurl_megatron.kit.errors import ConfigError, unscored
from qurl_megatron.training.fresh_scores import actor_recipe
from qurl_megatron.training.rollout_file import Recorded, path_of, read_rollouts, write_rollouts
from qurl_megatron.types import Prompt, Sample
from tests.support.engine_models import write_model

PROMPT = Prompt(4, (5, 6), "what?", "6", {"level": 3}, ({"role": "user", "content": "what?"},))
SAMPLES = [
    Sample(PROMPT, [7, 8, 9], [-1.0, -2.0, -3.0], "stop", ((1, 2), (2, 1)), "a\u2028b", 0.5),
    Sample(
        *(PROMPT, [7, 1, 2, 9], [-1.0, 0.0, 0.0, -0.25], "length", ((2, 2),)),
        written=[True, False, False, True],
        failure=unscored("timeouts", "30 s"),
    ),
]
PROXIMAL = {1: np.array([-1.5, -0.5], np.float32)}


def test_rollouts_are_read_as_they_were_written(tmp_path):
    path = path_of(tmp_path, 3)
    write_rollouts(path, SAMPLES, PROXIMAL)
    assert [file.name for file in path.parent.iterdir()] == ["step_000003.jsonl"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["proximal_log_probs"] is None
    assert lines[1]["proximal_log_probs"] == [-1.5, None, None, -0.5]
    first, second = read_rollouts(path)
    assert [first.sample, second.sample] == SAMPLES
    assert first.proximal is None and second.proximal.tolist() == [-1.5, -0.5]


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda text: text[:-20], "line 2 is damaged"),
        (lambda text: text.replace('"versions": [1, 1, 2]', '"versions": [1]'), "line 1 is damag"),
        (lambda text: text.replace('"prompt": {', '"prompt": {"x": 1, '), "line 1 is damaged .*x"),
    ],
    ids=["cut", "too few versions", "unknown key"],
)
def test_a_damaged_line_is_named(tmp_path, damage, message):
    path = path_of(tmp_path, 3)
    write_rollouts(path, SAMPLES, PROXIMAL)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match=message):
        read_rollouts(path)


def test_the_actor_is_aligned_as_the_run_was(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\npath = "m"\n[data]\ntask = "chain_sum"\n[quant]\nscheme = "int8"\n'
        '[train]\nalign = "full"\n'
    )
    config = load(recipe)
    aligned = actor_recipe(config, tmp_path, 6)
    assert aligned.train.align == "full"
    assert 6 % aligned.train.micro_batch == 0 and aligned.model.path == str(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=32)


def config_of(model, **quant):
    path = model / "recipe.toml"
    path.write_text(f'[model]\npath = "{model}"\ndtype = "float32"\n[data]\ntask = "chain_sum"\n')
    return load(path, [f"quant.{key}={value}" for key, value in quant.items()])


def test_a_response_that_fills_the_engines_context_is_left_to_the_actor(model, capsys):
    samples = [
        Sample(PROMPT, [7] * length, [-1.0] * length, "length", ((2, length),))
        for length in (30, 29)  # of 32, beside a prompt of 2
    ]
    full, scored = _by_engine(model, samples, config_of(model), 2)
    assert full is None and len(scored) == 29 and np.isfinite(scored).all()
    assert "1 response scored by the actor alone" in capsys.readouterr().out


@pytest.mark.parametrize("rounding", ["stochastic", "dithered"])
def test_codes_that_were_drawn_are_not_compared_with_a_fresh_engines(rounding, model, capsys):
    config = config_of(model, rounding=rounding)
    assert _by_engine(model, SAMPLES, config, 2) == [None, None]
    assert "2 responses scored by the actor alone" in capsys.readouterr().out


def arrays(*rows):
    return [None if row is None else np.array(row, np.float32) for row in rows]


ENGINE = ((-1, -2, -3), (-1, -0.25))
ACTOR = ((-1.5, -2, -3), (-1.5, 0))  # half a nat from the engine: up to 1 is no news
ACTORS_RECORD = (None, (-1.5, 0))


def judged(engine=ENGINE, recorded=ENGINE, proximal=ACTORS_RECORD):
    """The four gaps, and the verdict."""
    records = []
    for sample, log_probs, theirs in zip(SAMPLES, recorded, arrays(*proximal), strict=True):
        whole = np.zeros(len(sample.written))
        whole[sample.written] = log_probs
        records.append(Recorded(replace(sample, behaviour_log_probs=whole), theirs))
    gaps = compared(records, arrays(*engine), arrays(*ACTOR))
    return gaps, verdict(*gaps[:3], version=2)


def test_where_the_records_are_confirmed_the_rest_is_quantization():
    gaps, sentence = judged()
    assert [len(gap.sizes) for gap in gaps] == [5, 2, 5, 2]
    assert sentence == (
        "the record is confirmed by a fresh engine and the actor, to 1 nats; "
        "engine and actor differ by up to 0.5 nats"
    )


WRONG_ENGINE, WRONG_ACTOR = ((-1, -2, -3), (-1, -2)), (None, (-1.5, 9))


@pytest.mark.parametrize(
    "recorded, proximal, expected",
    [
        (WRONG_ENGINE, ACTORS_RECORD, ["engine differ by more than 1 nats at 1 of 5"]),
        (ENGINE, WRONG_ACTOR, ["actor differ by more than 1 nats at 1 of 2"]),
        (
            *(((-9, -9, -9), (np.nan, -0.25)), (None, (np.nan, 9))),
            [
                "engine differ by more than 1 nats at 4 of 5",
                "actor differ by more than 1 nats at 2 of",
            ],
        ),
    ],
    ids=["engine", "actor", "both, and nan"],
)
def test_a_record_that_is_not_confirmed_says_whose(recorded, proximal, expected):
    gaps, sentence = judged(recorded=recorded, proximal=proximal)
    if recorded is WRONG_ENGINE:  # the second token of the second response
        assert gaps[0].places[gaps[0].worst].tolist() == [1, 1] and gaps[0].largest == 1.75
    assert all(part in sentence for part in expected)
    assert sentence.count("differ by") == len(expected) and "confirmed" not in sentence


def test_what_was_not_scored_or_not_recorded_is_left_out():
    gaps, sentence = judged(engine=(None, ENGINE[1]), proximal=(None, None))
    assert [len(gap.sizes) for gap in gaps] == [2, 0, 2, 0]
    assert "confirmed by a fresh engine, to" in sentence


def test_without_a_fresh_engine_the_one_that_sampled_is_compared_with_the_actor():
    gaps, sentence = judged(engine=(None, None))
    assert [len(gap.sizes) for gap in gaps] == [0, 2, 5, 2]
    assert sentence.startswith("the record is confirmed by the actor, to 1 nats; ")
