"""Samples are values; a step's arrays hold them exactly, whole and in parts."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from qurl_megatron.data.responses import Responses
from qurl_megatron.kit.errors import Unscored
from qurl_megatron.types import Prompt, Sample, in_a_row
from tests.support.models import random_samples

SAMPLES = [*random_samples(12), Sample(Prompt(12, (1, 2), "", ""), (), (), "length", ())]
WHOLE = Responses.of(SAMPLES)


def test_samples_of_equal_values_are_equal_and_those_that_differ_anywhere_are_not():
    sample = SAMPLES[0]
    assert sample == replace(sample) == pickle.loads(pickle.dumps(sample))
    log_probs = sample.behaviour_log_probs
    ids = sample.response_ids
    changes = [
        dict(prompt=Prompt(99, sample.prompt.input_ids, "", "")),
        dict(response_ids=ids + 1),
        dict(behaviour_log_probs=np.nextafter(log_probs, np.float32(-9))),
        dict(versions=((1, len(ids)),)),
        dict(written=[False, *[True] * (len(ids) - 1)], versions=((0, len(ids) - 1),)),
        dict(failure=Unscored("timeouts", "")),
        dict(left_out=True),
        dict(finish_reason="length"),
        dict(text="x"),
        dict(reward=0.5),
    ]
    assert all(replace(sample, **change) != sample for change in changes)


def test_nobody_changes_the_tokens_of_a_sample():
    mine = np.array([5, 6], np.int32)
    sample = Sample(Prompt(0, (1,), "", ""), mine, (-1.0, -2.0), "stop", ((3, 2),))
    mine[0] = 9  # what the sample was made from
    assert sample.response_ids.tolist() == [5, 6]
    for array in (sample.response_ids, sample.behaviour_log_probs, sample.written):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert replace(sample, text="x").response_ids is sample.response_ids


def test_versions_are_kept_as_short_as_they_can_be():
    assert in_a_row([(7, 1), (7, 2), (8, 0), (7, 1), (8, 3)]) == ((7, 4), (8, 3))
    sample = Sample(Prompt(0, (1,), "", ""), (1, 2, 3), (-1.0,) * 3, "stop", ((7, 1), (8, 2)))
    assert sample.token_versions == [7, 8, 8]
    assert replace(sample, versions=((7, 1), (8, 1), (8, 1))) == sample
    with pytest.raises(AssertionError, match="differ in length"):
        replace(sample, versions=((7, 2),))


def test_versions_are_of_the_tokens_that_the_policy_wrote():
    mine = [True, True, False, False, True]
    ids, versions = (5, 6, 7, 8, 9), ((3, 2), (4, 1))
    sample = Sample(Prompt(0, (1,), "", ""), ids, (-1.0,) * 5, "stop", versions, written=mine)
    assert sample.token_versions == [3, 3, None, None, 4]
    assert [turn.tolist() for turn in sample.turns] == [[5, 6], [9]]
    with pytest.raises(AssertionError, match="written tokens"):
        replace(sample, written=None)
    empty = Sample(Prompt(0, (1,), "", ""), (), (), "stop", ())
    assert empty.turns == [] and empty.token_versions == []


def test_a_log_prob_is_the_float32_that_is_nearest_to_what_the_engine_said():
    said = [-0.1, -1e-9, -123.456789]
    sample = Sample(Prompt(0, (1,), "", ""), (1, 2, 3), said, "stop", ((0, 3),))
    assert torch.equal(Responses.of([sample]).behaviour, torch.tensor(said).float())


def test_what_goes_into_the_arrays_comes_out_again():
    for i, sample in enumerate(SAMPLES):
        expected = [*sample.prompt.input_ids, *sample.response_ids]
        assert WHOLE.tokens_of[i].tolist() == expected
        assert WHOLE.mask_of[i].tolist() == sample.written.tolist()
        log_probs = sample.behaviour_log_probs[sample.written]
        assert WHOLE.behaviour_of[i].tolist() == log_probs.tolist()
    summary = WHOLE.summary
    assert summary.lengths == [len(s.response_ids) for s in SAMPLES] and summary.lengths[-1] == 0
    prompts = [len(s.prompt.input_ids) for s in SAMPLES]
    assert summary.totals == [p + n for p, n in zip(prompts, summary.lengths, strict=True)]
    assert summary.written == [s.written_tokens for s in SAMPLES] != summary.lengths
    assert summary.rewards_R.tolist() == [s.reward for s in SAMPLES]
    assert summary.truncated_R.tolist() == [s.truncated for s in SAMPLES]
    assert (WHOLE.tokens.dtype, WHOLE.behaviour.dtype) == (torch.int32, torch.float32)


def test_room_for_responses_is_as_large_as_they_are():
    room = Responses.empty(WHOLE.summary)
    for name in ("tokens", "mask", "behaviour"):
        expected = getattr(WHOLE, name)
        assert (getattr(room, name).shape, getattr(room, name).dtype) == (
            expected.shape,
            expected.dtype,
        )
