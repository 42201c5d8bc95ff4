"""The order of prompts: endless, reproducible, resumable."""

import json
from collections import Counter

import pytest

from qurl_megatron.config import DataConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.kit.errors import ConfigError


class Letters:
    """A tokenizer with one token per character; stands in for the one in a model folder."""

    def read(self, questions, *, chat):
        for question in questions:
            if question.turns:
                raise ConfigError(f"{question.place}: no template")
            yield tuple(map(ord, f"<{question.text}>" if chat else question.text))


@pytest.fixture
def make(tmp_path):
    """A stream over questions a, bb, ccc, ... whose answers are their lengths."""

    def make(count=5, *, seed=0, held_out=0, held_out_of=range(5), **settings):
        for name, sizes in (("prompts", range(count)), ("held_out", held_out_of)):
            rows = [{"prompt": chr(97 + i) * (i + 1), "answer": i + 1} for i in sizes]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        paths = {"path": "prompts", "eval_path": "held_out"}
        paths = {key: str(tmp_path / f"{name}.jsonl") for key, name in paths.items()}
        config = DataConfig(**paths, **settings)
        return PromptStream(config, Letters(), seed=seed, held_out=held_out)

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


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"shuffle": False}, {"max_prompt_tokens": 3}, {"chat": True}]
)
def test_a_cursor_into_other_prompts_is_refused(make, change):
    state = make().state_dict()
    with pytest.raises(ConfigError, match="the checkpoint was made with other prompts"):
        make(**change).load_state_dict(state)


@pytest.mark.parametrize(
    "change, file",
    [
        ({"count": 6}, "data.path=.*prompts"),
        ({"held_out_of": range(6)}, "data.eval_path=.*held_out"),
    ],
)
def test_a_file_that_changed_under_a_run_is_named_with_both_ways_out(make, change, file):
    state = json.loads(json.dumps(make(held_out=2).state_dict()))
    make(held_out=2).load_state_dict(state)
    with pytest.raises(
        ConfigError,
        match=rf"{file}\.jsonl has changed since the checkpoint was made; restore the file, "
        r"start from scratch in another train\.run_dir, or go on in another with --fork",
    ):
        make(held_out=2, **change).load_state_dict(state)
    make(held_out_of=range(6)).load_state_dict(state)  # of a run that does not read it


def test_long_prompts_are_passed_over(make):
    stream = make(5, max_prompt_tokens=3)
    assert Counter(texts(stream.next_batch(6))) == {"a": 2, "bb": 2, "ccc": 2}
    stream.next_batch(3)
    assert [prompt.index for prompt in stream.next_batch(2)] == [9, 10]


def test_prompts_that_are_left_out_are_told_before_the_run(make):
    stream = make(7, held_out=5, max_prompt_tokens=3)
    assert (len(stream.too_long), stream.held_out_too_long) == (4, 2)
    files, training, held_out = stream.remarks()[1:]
    assert files.startswith("data.eval_path=")
    assert training == (
        "4 of 7 training prompts are longer than data.max_prompt_tokens=3 and left out; "
        "the longest has 7 tokens"
    )
    assert held_out.startswith("2 of 5 held-out prompts are longer than data.max_prompt_tokens=3")
    [file] = make(3, max_prompt_tokens=3).remarks()
    assert file.endswith("prompts.jsonl: 3 prompts in prompt, answers in answer")


def test_data_of_which_every_prompt_is_too_long_is_refused(make):
    with pytest.raises(ConfigError, match="every training prompt is longer than .*_tokens=2"):
        make(4, chat=True, max_prompt_tokens=2)
    with pytest.raises(ConfigError, match="every held-out prompt is longer than .*_tokens=1"):
        make(2, held_out=2, held_out_of=range(1, 4), max_prompt_tokens=1)


def test_held_out_prompts_are_the_same_whenever_they_are_asked_for(make):
    held_out = make(held_out=3).held_out
    assert texts(held_out) == ["a", "bb", "ccc"]
    assert [prompt.index for prompt in held_out] == [0, 1, 2]
    assert not make().held_out


def test_other_columns_come_with_a_prompt_and_a_chats_mistake_with_its_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    row = {"prompt": "a", "answer": "1", "level": 3}
    path.write_text(json.dumps(row))
    [prompt] = PromptStream(DataConfig(path=str(path)), Letters(), seed=0).next_batch(1)
    assert prompt.metadata == {"level": 3} and hash(prompt)
    chat = {**row, "prompt": [{"role": "user", "content": "a"}]}
    path.write_text("\n".join(map(json.dumps, (row, chat))))
    with pytest.raises(ConfigError, match=r"data.path=.*prompts.jsonl line 2: no template"):
        PromptStream(DataConfig(path=str(path)), Letters(), seed=0)


def test_a_prompt_that_leaves_no_room_for_its_response_is_refused_before_it_comes(make):
    stream = make(5, max_prompt_tokens=5)
    stream.refuse_longer(5)
    message = r"prompt 'dddd' has 4 tokens.*room for 3 .*data.max_prompt_tokens=3 to leave such"
    with pytest.raises(ConfigError, match=message):
        stream.refuse_longer(3)
    make(5, max_prompt_tokens=3).refuse_longer(3)  # longer ones are dropped, as ever
    with pytest.raises(ConfigError, match="'ccc' has 3 tokens"):  # of the held-out prompts
        make(2, max_prompt_tokens=9, held_out=3).refuse_longer(2)
