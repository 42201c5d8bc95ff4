"""What a load asks for: lengths, prompts, arrivals."""

import json

import numpy as np
import pytest

from qurl_megatron.bench.rollout_load import groups, long_tailed, recorded, serial_digits
from qurl_megatron.kit.errors import ConfigError


@pytest.mark.parametrize("mean, sigma, longest", [(64, 1.0, 256), (300, 1.5, 8192), (3, 0.5, 9)])
def test_lengths_have_the_mean_that_they_are_called_by_though_they_are_cut_off(
    mean, sigma, longest
):
    lengths = long_tailed(512, mean=mean, sigma=sigma, longest=longest, seed=0)
    assert np.mean(lengths) == pytest.approx(mean, rel=0.01)
    assert min(lengths) >= 1 and max(lengths) <= longest


def test_lengths_are_those_of_a_log_normal():
    logs = np.log(long_tailed(4096, mean=1000, sigma=0.5, longest=10**9, seed=0))
    assert logs.std() == pytest.approx(0.5, rel=0.01)
    assert np.median(logs) == pytest.approx(logs.mean(), abs=0.01)
    assert np.exp(logs.mean() + 0.5**2 / 2) == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize("longest, percent", [(10**9, 9), (256, 4)])
def test_sigma_1_gives_the_longest_hundredth_the_share_of_tokens_that_is_documented(
    longest, percent
):
    lengths = sorted(long_tailed(6400, mean=64, sigma=1, longest=longest, seed=0))
    assert round(100 * sum(lengths[-64:]) / sum(lengths)) == percent
    assert f"{percent} %" in long_tailed.__doc__


def test_a_seed_decides_the_order_of_lengths_and_nothing_else():
    one, other = (long_tailed(64, mean=20, sigma=1, longest=99, seed=seed) for seed in (1, 2))
    assert one == long_tailed(64, mean=20, sigma=1, longest=99, seed=1)
    assert one != other and sorted(one) == sorted(other)


def test_all_lengths_are_alike_without_sigma_or_at_the_longest():
    assert long_tailed(5, mean=7, sigma=0, longest=9, seed=0) == [7] * 5
    assert long_tailed(5, mean=9, sigma=1, longest=9, seed=0) == [9] * 5


def test_a_mean_beyond_the_longest_is_refused():
    with pytest.raises(ConfigError, match="--mean 64 --sigma 1 --max 32"):
        long_tailed(8, mean=64, sigma=1.0, longest=32, seed=0)


def _rollouts(folder, step, counts):
    (folder / "rollouts").mkdir(exist_ok=True)
    lines = [json.dumps({"response_ids": [1] * count}) for count in counts]
    (folder / f"rollouts/step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")


def test_lengths_of_a_run_are_those_of_its_last_step(tmp_path):
    _rollouts(tmp_path, 2, [3, 4])
    _rollouts(tmp_path, 10, [5, 0, 6])
    assert sorted(recorded(tmp_path, 2, seed=0)) == [5, 6]


def test_all_recorded_lengths_are_drawn_before_one_comes_again(tmp_path):
    _rollouts(tmp_path, 1, range(1, 11))
    drawn = recorded(tmp_path, 25, seed=3)
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == list(range(1, 11))
    assert len(drawn) == 25


def test_a_damaged_line_of_lengths_is_named(tmp_path):
    _rollouts(tmp_path, 1, [3])
    with (tmp_path / "rollouts/step_000001.jsonl").open("a") as file:
        file.write('{"respon')
    with pytest.raises(ConfigError, match="step_000001.jsonl line 2 is not JSON"):
        recorded(tmp_path, 4, seed=0)


def test_a_run_without_lengths_is_told_what_records_them(tmp_path):
    with pytest.raises(ConfigError, match=f"--lengths {tmp_path} .*train.save_rollouts=true"):
        recorded(tmp_path, 4, seed=0)


def test_samples_of_a_group_share_its_prompt_and_have_lengths_of_their_own():
    asks = groups([4, 5, 6, 7], samples=2, prompt=8, vocab=64, first=0, seed=0)
    assert [(ask.group, ask.tokens) for ask in asks] == [(0, 4), (0, 5), (1, 6), (1, 7)]
    assert asks[0].prompt == asks[1].prompt != asks[2].prompt
    assert {len(ask.prompt) for ask in asks} == {8}


def test_no_prompt_comes_twice_nor_begins_like_another_over_all_repeats():
    vocab, seen = 12, []
    for repeat in range(5):
        asks = groups([1] * 30, samples=1, prompt=16, vocab=vocab, first=30 * repeat, seed=7)
        seen += [ask.prompt for ask in asks]
    digits = serial_digits(vocab)
    assert len({prompt[:digits] for prompt in seen}) == 150
    # Whatever their random ids are: those that are asked for together begin with other tokens.
    for start in range(len(seen) - vocab + 2):
        assert len({prompt[0] for prompt in seen[start : start + vocab - 2]}) == vocab - 2
    assert all(0 < token < vocab - 1 for prompt in seen for token in prompt)


def test_prompts_too_short_to_differ_are_refused():
    with pytest.raises(ConfigError, match="--prompt 1 is too short: of 48 tokens"):
        groups([1], samples=1, prompt=1, vocab=50, first=0, seed=0)
