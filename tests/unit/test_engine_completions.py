"""OpenAI's endpoints, in the words in which SGLang answers them."""

import json
import re

import httpx
import pytest

from tests.unit.engine_models import LiveServer, write_model, write_tokenizer
from tests.unit.recorded import SGLANG, events, shape


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("model"), vocab_size=264)
    server = LiveServer(write_tokenizer(path))
    yield server
    server.close()


def names(value) -> object:
    """Those of a body's fields, without those of the usage so far, which has more on request."""
    if isinstance(value, list):
        return [names(one) for one in value[:1]]
    fields = value.items() if isinstance(value, dict) else ()
    return {name: names(one) for name, one in fields if name != "prompt_tokens_details"}


def complete(live, **body) -> dict:
    response = live.post("/v1/completions", {"prompt": [5, 6, 7], "ignore_eos": True, **body})
    assert response.status_code == 200, response.text
    return response.json()


def chunks(live, **body) -> list[dict]:
    body = {"prompt": [5, 6, 7], "ignore_eos": True, "stream": True, **body}
    return events(live.post("/v1/completions", body).text)


@pytest.mark.parametrize("case", ["completions", "completions_ids"])
def test_a_completion_has_the_shape_of_sglangs(live, case):
    theirs = json.loads(SGLANG[case]["raw"])
    ours = live.post("/v1/completions", SGLANG[case]["body"]).json()
    assert ours["usage"].pop("prompt_tokens_details") == {"cached_tokens": 0}  # on request there
    del theirs["usage"]["prompt_tokens_details"]
    assert shape(ours) == shape(theirs)
    assert ours["usage"] == theirs["usage"]


@pytest.mark.parametrize("case", ["completions_stream", "completions_stream_n"])
def test_chunks_have_the_shape_of_sglangs(live, case):
    theirs = events(SGLANG[case]["raw"])
    found = events(live.post("/v1/completions", SGLANG[case]["body"]).text)
    # A reader that is late finds several tokens in a chunk, so there may be fewer.
    assert {str(names(chunk)) for chunk in found} <= {str(names(chunk)) for chunk in theirs}
    assert names(found[0]) == names(theirs[0]) and names(found[-1]) == names(theirs[-1])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found[-1]["usage"][name] == theirs[-1]["usage"][name]


def test_a_completion_is_a_generation_in_other_words(live):
    params = {"max_new_tokens": 9, "temperature": 0.7, "top_p": 0.9, "sampling_seed": 4, "n": 2}
    body = {"input_ids": [5, 6, 7], "sampling_params": {**params, "ignore_eos": True}}
    native = live.post("/generate", {**body, "return_logprob": True}).json()
    asked = {"max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "seed": 4, "n": 2, "logprobs": 0}
    found = complete(live, **asked, return_token_ids=True)
    for choice, answer in zip(found["choices"], native, strict=True):
        assert choice["text"] == answer["text"]
        assert choice["token_ids"] == answer["output_ids"]
        pairs = answer["meta_info"]["output_token_logprobs"]
        assert choice["logprobs"]["token_logprobs"] == [value for value, _, _ in pairs]
    assert found["usage"]["prompt_tokens"] == 3 and found["usage"]["completion_tokens"] == 18


def test_chunks_join_to_the_completion(live):
    asked = {"max_tokens": 30, "seed": 4, "n": 2, "logprobs": 0, "return_token_ids": True}
    whole = complete(live, **asked)["choices"]
    found = chunks(live, **asked)
    for choice in whole:
        parts = [c for chunk in found for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert sum((part["token_ids"] for part in parts), []) == choice["token_ids"]
        log_probs = sum((part["logprobs"]["token_logprobs"] for part in parts), [])
        assert log_probs == choice["logprobs"]["token_logprobs"]
        assert [part["finish_reason"] for part in parts][-1] == "length"
        assert {part["finish_reason"] for part in parts[:-1]} <= {None}
    assert all(chunk["usage"] is None for chunk in found)


@pytest.mark.parametrize("given", [{"logprobs": False}, {"logprobs": None}, {}])
def test_log_probs_come_only_where_they_are_asked_for(live, given):
    (choice,) = complete(live, max_tokens=3, **given)["choices"]
    assert choice["logprobs"] is None


def test_text_and_its_ids_are_the_same_prompt(live):
    asked = {"max_tokens": 6, "temperature": 0}
    ids = [list(b"Hello"), list(b"you")]
    ids = [[token - 33 for token in prompt] for prompt in ids]  # bytes begin at "!"
    by_text = complete(live, prompt=["Hello", "you"], **asked)
    by_ids = complete(live, prompt=ids, **asked)
    assert by_text["choices"] == by_ids["choices"]
    assert by_text["usage"]["prompt_tokens"] == 8


def test_without_a_budget_there_are_openais_sixteen_tokens(live):
    assert complete(live)["usage"]["completion_tokens"] == 16


def test_a_stop_token_is_told_and_left_out_of_the_text(live):
    asked = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    (choice,) = complete(live, **asked)["choices"]
    stop = choice["token_ids"][2]
    (stopped,) = complete(live, **asked, stop_token_ids=[stop])["choices"]
    assert (stopped["finish_reason"], stopped["matched_stop"]) == ("stop", stop)
    assert choice["text"].startswith(stopped["text"])


@pytest.mark.parametrize(
    "body,message",
    [
        ({"prompt": None}, "prompt must be"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": ""}, "prompt must be"),
        ({"prompt": 5}, "prompt must be"),
        ({"prompt": [5, "a"]}, "token id"),
        ({"prompt": ["a", 5]}, "text must be"),
        ({"max_tokens": 0}, "max_tokens must be int >= 1, got 0"),
        ({"max_tokens": 9000}, "max_tokens 9000 exceed"),
        ({"seed": -1}, "^seed must be"),
        ({"temperature": "hot"}, "^temperature must be"),
        ({"frequency_penalty": 0.5}, "frequency_penalty = 0.5 is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"echo": True}, "echo = True"),
        ({"best_of": 4}, "best_of = 4"),
        ({"stop": ["."]}, "stop = "),
        ({"logprobs": 3}, "logprobs = 3"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stream_options": 3}, "stream_options must be"),
        ({"stream": "yes"}, "stream must be"),
    ],
)
def test_what_would_change_the_distribution_is_refused_by_name(live, body, message):
    response = live.post("/v1/completions", {"prompt": [5], **body})
    assert response.status_code == 400
    assert re.search(message, response.json()["error"]["message"]), response.text


def test_values_that_ask_for_nothing_are_taken(live):
    nothing = {"best_of": 1, "echo": False, "suffix": None, "logit_bias": {}, "stop": []}
    penalties = {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    assert complete(live, **nothing, **penalties, model="other", user="me")["model"] == "other"


def test_the_model_is_listed_as_sglang_lists_it(live):
    found = httpx.get(f"{live.url}/v1/models", trust_env=False).json()
    assert shape(found) == shape(SGLANG["models"])
    assert found["data"][0]["id"] == str(live.folder)
    assert found["data"][0]["max_model_len"] == 256


def test_without_a_tokenizer_there_are_ids_alone(tmp_path):
    server = LiveServer(write_model(tmp_path / "model"))
    try:
        assert "no tokenizer" in server.post("/v1/completions", {"prompt": "a"}).text
        (choice,) = complete(server, max_tokens=3, return_token_ids=True)["choices"]
        assert choice["text"] == "" and len(choice["token_ids"]) == 3
    finally:
        server.close()
