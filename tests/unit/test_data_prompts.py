"""The order of prompts: endless, reproducible, resumable."""

import json
from collections import Counter

import pytest

from qurl_megatron.config import DataConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.errors import ConfigError


class Letters:
    """A tokenizer with one token per character; stands in for the one in a model folder."""

    def encode(self, text, *, chat=False):
        return tuple(map(ord, f"<{text}>" if chat else text))


@pytest.fixture
def make(tmp_path):
    """A stream over questions a, bb, ccc, ... whose answers are their lengths."""

    def make(count=5, *, seed=0, **settings) -> PromptStream:
        path = tmp_path / "prompts.jsonl"
        rows = [{"prompt": chr(97 + i) * (i + 1), "answer": str(i + 1)} for i in range(count)]
        path.write_text("\n".join(map(json.dumps, rows)))
        config = DataConfig(path=str(path), eval_path=str(path), **settings)
        return PromptStream(config, Letters(), seed=seed)

    return make


def texts(prompts) -> list[str]:
    return [prompt.text for prompt in prompts]


def test_every_epoch_holds_every_prompt_once_in_an_order_of_its_own(make):
    prompts = make(20).next_batch(60)
    epochs = [texts(prompts[start : start + 20]) for start in (0, 20, 40)]
    assert all(Counter(epoch) == Counter(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [prompt.index for prompt in prompts] == list(range(60))
    assert prompts[0].input_ids == tuple(map(ord, prompts[0].text))
    assert all(prompt.answer == str(len(prompt.text)) for prompt in prompts)


def test_the_order_follows_from_the_seed_not_from_the_size_of_the_batches(make):
    whole, pieces = make().next_batch(12), make()
    assert whole == [prompt for n in (5, 1, 6) for prompt in pieces.next_batch(n)]
    assert texts(whole) != texts(make(seed=1).next_batch(12))


def test_without_shuffling_the_order_is_that_of_the_file(make):
    assert texts(make(3, shuffle=False).next_batch(5)) == ["a", "bb", "ccc", "a", "bb"]


@pytest.mark.parametrize("before", [0, 3, 5, 7, 11])
def test_a_resumed_stream_goes_on_as_if_never_interrupted(make, before):
    stream = make(max_prompt_tokens=4)
    stream.next_batch(before)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = make(max_prompt_tokens=4)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert resumed.next_batch(9) == stream.next_batch(9)
    assert resumed.dropped == stream.dropped


@pytest.mark.parametrize(
    "change", [{"count": 6}, {"seed": 1}, {"shuffle": False}, {"max_prompt_tokens": 3}]
)
def test_a_cursor_into_other_prompts_is_refused(make, change):
    state = make().state_dict()
    with pytest.raises(ConfigError, match="the checkpoint was made with other prompts"):
        make(**change).load_state_dict(state)


def test_long_prompts_are_passed_over_and_counted(make):
    stream = make(5, max_prompt_tokens=3)
    assert Counter(texts(stream.next_batch(6))) == {"a": 2, "bb": 2, "ccc": 2}
    stream.next_batch(3)
    assert 4 <= stream.dropped <= 6
    assert [prompt.index for prompt in stream.next_batch(2)] == [9, 10]


def test_data_of_which_every_prompt_is_too_long_is_refused(make):
    with pytest.raises(ConfigError, match="longer than data.max_prompt_tokens=2"):
        make(4, chat=True, max_prompt_tokens=2).next_batch(1)
    with pytest.raises(ConfigError, match="longer than data.max_prompt_tokens=2"):
        make(4, chat=True, max_prompt_tokens=2).held_out(1)


def test_held_out_prompts_are_the_same_whenever_they_are_asked_for(make):
    stream = make()
    first = stream.held_out(3)
    stream.next_batch(7)
    assert stream.held_out(3) == first
    assert texts(first) == ["a", "bb", "ccc"]
    assert [prompt.index for prompt in first] == [0, 1, 2]


def test_a_prompt_that_leaves_no_room_for_its_response_is_refused_before_it_comes(make):
    stream = make(5, max_prompt_tokens=5)
    stream.refuse_longer(5)
    message = r"prompt 'dddd' has 4 tokens.*room for 3 .*data.max_prompt_tokens=3 to leave such"
    with pytest.raises(ConfigError, match=message):
        stream.refuse_longer(3)
    make(5, max_prompt_tokens=3).refuse_longer(3)  # longer ones are dropped, as ever


def test_held_out_prompts_need_room_too(make, tmp_path):
    stream = make(2, max_prompt_tokens=9)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "eeeee", "answer": "5"}')
    stream.refuse_longer(3)
    with pytest.raises(ConfigError, match="'eeeee' has 5 tokens"):
        stream.refuse_longer(3, held_out=1)
