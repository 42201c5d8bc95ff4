import asyncio
import base64
import json
import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from socket import IPPROTO_TCP, TCP_NODELAY

import httpx
import pytest

from qurl_megatron.engines.embedded.endpoints import bound
from qurl_megatron.engines.kinds import LOADER
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.tensors.arch import facts_of
from qurl_megatron.wire.lease import ENDPOINT
from qurl_megatron.wire.message import Message, payload
from tests.support.engine_models import LiveServer, write_model
from tests.support.generating import generate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return write_model(path, max_position_embeddings=8192)


@pytest.fixture
def live(folder):
    with LiveServer(folder) as server:
        yield server


LONG = {"max_new_tokens": 4000, "ignore_eos": True}
SLOW_S = 0.01  # a token, where more has to happen before the last one
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def test_with_its_lease_an_engine_says_what_its_model_computes(live, folder):
    body = {"run": "aa", "label": "this test", "seconds": 0, "take_over": False}
    assert live.post(ENDPOINT, body).json()["computes"] == facts_of(folder)


def test_a_single_prompt_gets_one_object_of_sglangs_shape(live):
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
        "rid": "mine",
    }
    answer = live.post("/generate", body).json()
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 4
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 4)
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [
        [token, None] for token in answer["output_ids"]
    ]
    del body["return_logprob"]
    assert "output_token_logprobs" not in live.post("/generate", body).json()["meta_info"]


def test_a_batch_gets_a_list_in_its_order(live):
    params = [{**GREEDY, "max_new_tokens": 3}, GREEDY]
    body = {"input_ids": [[5, 6], [7, 8]], "sampling_params": params, "rid": ["a", "b"]}
    answers = live.post("/generate", body).json()
    assert [a["meta_info"]["id"] for a in answers] == ["a", "b"]
    assert [len(a["output_ids"]) for a in answers] == [3, 6]


def test_a_seeded_request_repeats_and_its_samples_differ(live):
    params = [{"sampling_seed": s, "max_new_tokens": 12, "ignore_eos": True} for s in range(4)]
    body = {"input_ids": [[5, 6, 7]] * 4, "sampling_params": params}
    first, second = (
        [answer["output_ids"] for answer in live.post("/generate", body).json()] for _ in range(2)
    )
    assert first == second and len(set(map(tuple, first))) == 4


@pytest.mark.parametrize(
    "body,message",
    [
        ({"text": "hello"}, "unknown field `text`"),
        ({"input_ids": []}, "length >= 1 - at `.*input_ids"),
        ({"input_ids": [[]]}, "input_ids is not .* length >= 1"),
        ({"input_ids": [5, 96]}, r"\[0, 96\)"),
        ({"input_ids": [5, True]}, "Expected `int`, got `bool`"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 9000}}, "9000 exceed the 8192"),
        ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        (
            {"input_ids": [5], "sampling_params": {"regex": "a*"}},
            "sampling_params .* field `regex`",
        ),
        ({"input_ids": [5], "sampling_params": {"min_p": 0.1}}, "<= 0.0 - at `.*min_p`"),
        (
            {"input_ids": [5], "sampling_params": 7},
            "sampling_params .* Expected `object`, got `int`",
        ),
        (
            {"input_ids": [5], "sampling_params": {"stop_token_ids": "a"}},
            "Expected `array`, got `str` - at `.*stop_token_ids`",
        ),
        ({"input_ids": [5], "rid": 7}, "rid is not .* Expected `str"),
        ({"input_ids": [[5], [6]], "sampling_params": [{}]}, "1 entries for 2 prompts"),
        (
            {"input_ids": [5], "stream": True},
            "not as the embedded engine takes it: .* field `stream`",
        ),
    ],
)
def test_a_bad_request_is_refused_with_a_sentence(live, body, message):
    response = live.post("/generate", body)
    assert response.status_code == 400
    assert re.search(message, response.json()["error"]["message"])


def test_a_stop_id_ends_a_response_and_belongs_to_it(live):
    body = {"input_ids": [5, 6, 7], "sampling_params": GREEDY}
    free = live.post("/generate", body).json()["output_ids"]
    token = free[2]
    body["sampling_params"] = {**GREEDY, "stop_token_ids": [token, 96]}
    answer = live.post("/generate", body).json()
    assert answer["output_ids"] == free[: free.index(token) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}


def test_abort_by_prefix_returns_what_was_generated(live):
    live.token_s = SLOW_S
    with ThreadPoolExecutor(1) as pool:
        prompts = [[5, 6], [7, 8], [9, 10]]
        pending = pool.submit(generate, live.client, prompts, LONG, rid=["x-0", "x-1", "y-0"])
        live.wait_for("num_running_reqs", 3)
        live.client.abort("x-")
        live.wait_for("num_running_reqs", 1)
        live.post("/abort_request", {"abort_all": True})
        reasons = [a["meta_info"]["finish_reason"]["type"] for a in pending.result()]
    assert reasons == ["abort"] * 3


def test_a_client_that_leaves_takes_its_requests_along(live):
    live.token_s = SLOW_S
    client = HTTPConnection(live.url.removeprefix("http://"))
    client.request("POST", "/generate", json.dumps({"input_ids": [5, 6], "sampling_params": LONG}))
    live.wait_for("num_running_reqs", 1)
    client.close()
    live.wait_for("num_running_reqs", 0)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_stops_generation_until_continued(live, mode):
    live.token_s = SLOW_S
    with ThreadPoolExecutor(1) as pool:
        params = {**LONG, "max_new_tokens": 400}
        pending = pool.submit(generate, live.client, [[5, 6]], params)
        live.wait_for("num_running_reqs", 1)
        live.client.pause(mode)
        before = live.client.server_info()
        assert before["is_paused"]
        assert before["num_running_reqs"] == (mode == "in_place")
        assert before["num_waiting_reqs"] == (mode == "retract")
        # Another step would come between the two looks.
        assert live.client.server_info()["num_generated_tokens"] == before["num_generated_tokens"]
        live.token_s = 0.0
        live.client.resume()
        meta = pending.result()[0]["meta_info"]
    assert meta["finish_reason"]["type"] == "length"


class Bomb:
    """Unpickled, it would run."""

    def __reduce__(self):
        return os.system, ("exit 1",)


def test_messages_of_an_update_are_read_and_nothing_is_unpickled(live, monkeypatch):
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("unpickled"))
    monkeypatch.setattr(pickle, "load", lambda *_: pytest.fail("unpickled"))
    text = payload(Message("check", "one"))
    body = {"load_format": LOADER, "serialized_named_tensors": [text]}
    bomb = base64.b64encode(pickle.dumps([Bomb(), "{}"])).decode()
    live.post("/begin_weight_update", {})
    for change, says in (
        ({"load_format": None}, "load_format must be"),
        ({"load_format": "flattened_bucket"}, "load_format must be"),
        ({"serialized_named_tensors": "abc"}, "must be a list of one text"),
        ({"serialized_named_tensors": [text, text]}, "must be a list of one text"),
        ({"serialized_named_tensors": ["gASVAAAA"]}, "weight update is malformed"),
        ({"serialized_named_tensors": [bomb]}, "weight update is malformed"),
    ):
        response = live.post("/update_weights_from_tensor", body | change)
        assert response.status_code == 400, change
        assert says in response.text
    assert live.post("/update_weights_from_tensor", body).json()["success"]
    assert live.client.weight_version() == "default"


def test_a_route_that_is_not_there_names_the_one_that_is(live):
    for path in ("/v1/completions", "/v1/models", "/update_weights_from_disk"):
        response = live.post(path, {})
        assert response.status_code == 404
        said = response.json()["error"]["message"]
        assert said == f"the embedded engine has no {path}; send token ids to /generate"


def test_health_info_and_flush(live):
    for endpoint in ("/health", "/model_info"):
        assert httpx.get(live.url + endpoint, timeout=30, trust_env=False).status_code == 200
    info = live.client.server_info()
    assert (info["scheme"], info["weight_version"]) == ("int8", "default")
    assert info["model_path"] == str(live.folder)
    assert info["num_generated_tokens"] == 0
    assert info["decode_step"] == live.worker.engine.decode_step
    live.client.flush()
    assert live.post("/pause_generation", {"mode": "retract"}).status_code == 200
    assert live.post("/pause_generation", {"mode": "abort"}).status_code == 400


def test_answers_on_a_connection_that_is_kept_are_not_delayed():
    async def delays_answers() -> bool:
        connected = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(
            lambda _, writer: connected.set_result(writer.transport), sock=bound("127.0.0.1", 0)
        )
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            transport = await connected
            delays = transport.get_extra_info("socket").getsockopt(IPPROTO_TCP, TCP_NODELAY) == 0
            writer.close()
            transport.close()
        return delays

    assert not asyncio.run(delays_answers())


def test_an_api_key_guards_everything_but_health(folder):
    with LiveServer(folder, api_key="secret") as guarded:
        assert httpx.get(guarded.url + "/health", trust_env=False).status_code == 200
        assert guarded.post("/generate", {"input_ids": [5]}).status_code == 401
        assert guarded.client.server_info()["scheme"] == "int8"


def test_a_failing_step_fails_its_requests_and_the_health_check(live):
    live.worker.engine.decoder.forward = None
    with pytest.raises(EngineError, match="500"):
        generate(live.client, [[5]], {"max_new_tokens": 2})
    assert httpx.get(live.url + "/health", trust_env=False).status_code == 503
