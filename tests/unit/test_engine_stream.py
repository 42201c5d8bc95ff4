"""Following a request: SGLang's server-sent events, and the same tokens as without."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from qurl_megatron.cli import main
from qurl_megatron.engines.embedded.endpoints import Speech
from qurl_megatron.engines.embedded.engine import Engine, Job
from qurl_megatron.engines.embedded.protocol import Generation, RequestLimits, parse_generate
from qurl_megatron.engines.embedded.stream import Bell, Stream
from qurl_megatron.engines.embedded.text_codec import GrowingText, TextCodec
from tests.unit.engine_models import (
    LiveServer,
    engine_for,
    finish,
    random_tensors,
    sequence,
    write_model,
    write_tokenizer,
    write_version,
)
from tests.unit.recorded import SGLANG, events, shape

LONG = {"max_new_tokens": 4000, "ignore_eos": True}
SLOW_S = 0.02  # a token, until the first event has come and what follows on it is done


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return write_tokenizer(write_model(path, vocab_size=264, max_position_embeddings=8192))


@pytest.fixture(scope="module")
def codec(folder):
    return TextCodec.of(folder)


@pytest.fixture(scope="module")
def limits():
    return RequestLimits(264, 4096, (1,))


@pytest.fixture
def live(folder):
    server = LiveServer(folder)
    yield server
    server.close()


@pytest.fixture(scope="module")
def shared(folder):
    """One server for the tests that must not change it."""
    server = LiveServer(folder)
    yield server
    server.close()


async def _followed(engine: Engine, generation: Generation, codec, incremental: bool) -> list:
    """Every event, with a reader that looks after each step of the engine."""
    interval = generation.interval or 1
    stream = Stream(generation.sequences, generation.styles, codec, interval, Bell())
    job = Job(generation.sequences)
    found = []

    async def read():
        async for index, progress in stream.pieces(job.future):
            found.append(generation.event(index, progress, incremental=incremental))

    reader = asyncio.ensure_future(read())
    engine.add(generation.sequences)
    while engine.busy:
        await asyncio.sleep(0)
        engine.step()
        for _ in range(5):  # the wake-up, the reader, its next wait
            await asyncio.sleep(0)
    await reader
    return found


def followed(folder, generation: Generation, codec=None, *, incremental=False) -> list:
    return asyncio.run(_followed(engine_for(folder), generation, codec, incremental))


@pytest.mark.parametrize("case", ["single", "batch_n", "interval"])
def test_a_stream_has_the_events_that_sglang_has(folder, codec, limits, case):
    recorded = SGLANG[case]
    theirs = events(recorded["raw"])
    ours = followed(folder, parse_generate(recorded["body"], limits, codec), codec)

    def by_index(found):  # the order of sequences within a step is not fixed
        return sorted(found, key=lambda event: event.get("index", 0))

    assert len(ours) == len(theirs)
    assert json.loads(json.dumps(shape(by_index(ours)))) == shape(by_index(theirs))


def test_every_event_has_all_there_is_so_far_and_the_last_is_the_answer(folder, codec, limits):
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 9, "sampling_seed": 3}}
    body |= {"return_logprob": True, "rid": "mine"}
    found = followed(folder, parse_generate({**body, "stream": True}, limits, codec), codec)
    generation = parse_generate(body, limits, codec)
    engine = engine_for(folder)
    Job(generation.sequences)
    engine.add(generation.sequences)
    while engine.busy:
        engine.step()
    assert found[-1] == generation.answer(codec)
    for one, following in zip(found, found[1:], strict=False):
        count = len(one["output_ids"])
        assert following["output_ids"][:count] == one["output_ids"]
        assert following["text"].startswith(one["text"])
        pairs = [event["meta_info"]["output_token_logprobs"] for event in (one, following)]
        assert pairs[1][:count] == pairs[0]


def test_the_last_token_is_told_with_the_end_and_not_before(folder):
    heard = []

    class Ear:
        def token(self, token, log_prob, version):
            heard.append(token)

        def ended(self):
            heard.append("ended")

    whole, broken = (sequence([5, 6, 7], 4, listener=Ear()) for _ in range(2))
    finish(engine_for(folder), whole)
    assert heard == [*whole.output_ids[:-1], "ended"] and len(heard) == 4
    heard.clear()
    engine = engine_for(folder)
    engine.decoder.logits = lambda hidden_BH: torch.full((len(hidden_BH), 264), float("nan"))
    finish(engine, broken)  # what is drawn from nan means nothing
    assert (heard, broken.output_ids) == (["ended"], [])


def test_incremental_events_join_to_the_cumulative_ones(folder, codec, limits):
    params = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 5, "n": 2}
    body = {"input_ids": [5, 6, 7], "sampling_params": params, "return_logprob": True}
    whole = followed(folder, parse_generate(body, limits, codec), codec)
    parts = followed(folder, parse_generate(body, limits, codec), codec, incremental=True)
    for index in (0, 1):
        mine = [event for event in parts if event["index"] == index]
        last = [event for event in whole if event["index"] == index][-1]
        assert sum((event["output_ids"] for event in mine), []) == last["output_ids"]
        assert "".join(event["text"] for event in mine) == last["text"]
        triples = [event["meta_info"]["output_token_logprobs"] for event in mine]
        assert sum(triples, []) == last["meta_info"]["output_token_logprobs"]
        assert [e["meta_info"]["completion_tokens"] for e in mine] == list(range(1, 13))


def test_text_ends_before_a_character_that_is_not_whole(codec):
    ids = codec.encode("aé€")
    growing = GrowingText(codec, skip_special=True)
    texts = [growing.grow(ids[:count]) for count in range(1, len(ids) + 1)]
    assert texts == ["a", "a", "aé", "aé", "aé", "aé€"]
    growing = GrowingText(codec, skip_special=True)
    assert [growing.grow(ids[:2]), growing.grow(ids[:2], last=True)] == ["", "a\ufffd"]


def streamed(live, body: dict, endpoint: str = "/generate") -> httpx.Response:
    return live.post(endpoint, {**body, "stream": True})


def test_a_streamed_request_has_the_tokens_and_log_probs_of_one_that_is_not(live):
    params = {"n": 3, "sampling_seed": 11, "max_new_tokens": 40, "ignore_eos": True}
    body = {"input_ids": [[5, 6, 7], [8, 9]], "sampling_params": params, "return_logprob": True}
    response = streamed(live, body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    last = {event["index"]: event for event in events(response.text)}
    plain = live.post("/generate", body).json()
    assert len(plain) == len(last) == 6
    for index, answer in enumerate(plain):
        assert last[index]["output_ids"] == answer["output_ids"]
        ours, theirs = (one["meta_info"] for one in (last[index], answer))
        assert ours["output_token_logprobs"] == theirs["output_token_logprobs"]
        assert last[index]["text"] == answer["text"]


def test_a_response_that_a_stop_token_ends_leaves_it_out_of_the_text(shared, codec):
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    body = {"text": "abc", "sampling_params": params}
    answer = shared.post("/generate", body).json()
    assert answer["meta_info"]["prompt_tokens"] == 3
    assert answer["text"] == codec.decode(answer["output_ids"])
    stop = answer["output_ids"][3]
    count = answer["output_ids"].index(stop)
    for extra, kept in (({}, count), ({"no_stop_trim": True}, count + 1)):
        params = {**params, "stop_token_ids": [stop], **extra}
        stopped = shared.post("/generate", {**body, "sampling_params": params}).json()
        assert stopped["output_ids"] == answer["output_ids"][: count + 1]
        assert stopped["text"] == codec.decode(answer["output_ids"][:kept])
        (*_, last) = events(streamed(shared, {**body, "sampling_params": params}).text)
        assert last["text"] == stopped["text"]


def test_a_bad_request_for_a_stream_gets_a_status_not_an_event(shared):
    response = streamed(shared, {"input_ids": [5], "sampling_params": {"temperature": -1}})
    assert response.status_code == 400
    assert "temperature" in response.json()["error"]["message"]


def first_event(live, body: dict, then) -> str:
    """Read one event, do something, and read the rest."""
    live.token_s = SLOW_S
    with httpx.stream(
        "POST", f"{live.url}/generate", json={**body, "stream": True}, timeout=60, trust_env=False
    ) as response:
        pieces = response.iter_text()
        text = next(pieces)
        then()
        live.token_s = 0.0
        return text + "".join(pieces)


def test_a_reader_that_leaves_takes_its_sequences_along(live):
    with pytest.raises(ZeroDivisionError):
        first_event(live, {"input_ids": [[5, 6], [7]], "sampling_params": LONG}, lambda: 1 / 0)
    live.wait_for("num_running_reqs", 0)
    assert live.client.server_info()["num_generated_tokens"] < 2 * 4000


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_holds_a_stream_as_it_holds_any_request(live, mode):
    def pause():
        live.client.pause(mode)
        before = live.client.server_info()
        time.sleep(0.05)
        after = live.client.server_info()
        assert after["num_generated_tokens"] == before["num_generated_tokens"]
        assert after["num_running_reqs"] == (mode == "in_place")
        live.client.resume()

    params = {**LONG, "max_new_tokens": 120, "sampling_seed": 3}
    body = {"input_ids": [5, 6], "sampling_params": params, "return_logprob": True}
    last = events(first_event(live, body, pause))[-1]
    meta = last["meta_info"]
    assert meta["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
    assert meta["num_retractions"] == live.client.server_info()["num_retractions"]
    assert len(meta["output_token_logprobs"]) == len(last["output_ids"])
    plain = live.post("/generate", body).json()
    assert last["output_ids"] == plain["output_ids"][: len(last["output_ids"])]


def test_an_abort_ends_a_stream_with_what_was_generated(live):
    body = {"input_ids": [5, 6], "sampling_params": LONG, "rid": "x"}
    last = events(first_event(live, body, lambda: live.client.abort("x")))[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(last["output_ids"]) == last["meta_info"]["completion_tokens"] < 4000


def test_an_update_shows_in_the_stream_from_its_first_token_on(live, folder, tmp_path):
    version = write_version(tmp_path / "v3", random_tensors(folder, seed=5), 3, "int8")

    def update():
        assert live.load(version, 3, flush_cache=False).status_code == 200

    params = {**LONG, "max_new_tokens": 600}
    found = events(first_event(live, {"input_ids": [5, 6], "sampling_params": params}, update))
    first, second = found[-1]["meta_info"]["weight_versions"]
    assert (first["version"], second["version"]) == ("default", "3")
    for event in found[:-1]:
        count = event["meta_info"]["completion_tokens"]
        expected = "default" if count <= first["end"] else "3"
        assert event["meta_info"]["weight_version"] == expected


def test_an_engine_that_fails_says_so_in_its_streams(folder):
    server = LiveServer(folder)
    logits = server.worker.engine.decoder.logits

    def fail():
        def broken(*args):
            raise ArithmeticError("planted")

        server.worker.engine.decoder.logits = broken

    try:
        found = events(first_event(server, {"input_ids": [5, 6], "sampling_params": LONG}, fail))
        assert found[-1]["error"]["code"] == 500 and "planted" in found[-1]["error"]["message"]
    finally:
        server.worker.engine.decoder.logits = logits
        server.close()


def test_many_streams_at_once_end_whole(live):
    def one(seed):
        params = {"max_new_tokens": 5 + seed % 7, "ignore_eos": True, "sampling_seed": seed}
        return events(streamed(live, {"input_ids": [5, seed], "sampling_params": params}).text)

    with ThreadPoolExecutor(16) as pool:
        counts = [len(found[-1]["output_ids"]) for found in pool.map(one, range(48))]
    assert counts == [5 + seed % 7 for seed in range(48)]


def test_an_engine_without_text_speaks_ids_alone(folder):
    server = LiveServer(folder, speech=Speech(skip_tokenizer_init=True, stream_interval=4))
    try:
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        assert server.post("/generate", body).json()["text"] == ""
        assert len(events(streamed(server, body).text)) <= 3  # 1, 5, all
        assert server.post("/generate", {"text": "a"}).status_code == 400
        assert server.client.server_info()["tokenizer_path"] is None
    finally:
        server.close()


def test_an_interval_of_no_tokens_is_refused(folder, capsys):
    assert main(["serve", str(folder), "--stream-interval", "0"]) == 2
    assert "--stream-interval must be >= 1, got 0" in capsys.readouterr().err


def test_server_info_says_what_the_cache_holds(live):
    total = live.client.server_info()["max_total_num_tokens"]
    idle = live.client.server_info()
    assert (idle["num_used_tokens"], idle["token_usage"], idle["cache_hit_rate"]) == (0, 0, 0)
    load = httpx.get(f"{live.url}/v1/loads", trust_env=False).json()["loads"][0]
    theirs = SGLANG["loads"]["loads"][0]
    for name, value in load.items():
        assert name in theirs, name
        assert isinstance(value, dict) or type(value) is type(theirs[name]), name

    def look():
        info = live.client.server_info()
        assert info["num_used_tokens"] >= 4 + 1
        assert info["token_usage"] == round(info["num_used_tokens"] / total, 4)
        live.client.abort(everything=True)

    first_event(live, {"input_ids": [5, 6, 7, 8], "sampling_params": LONG}, look)
