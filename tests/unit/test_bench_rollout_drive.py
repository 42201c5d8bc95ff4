"""The driver against a small server that streams as SGLang and OpenAI's protocol say."""

import asyncio
import json
import re
import threading
import time

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from qurl_megatron.bench import load_figures
from qurl_megatron.bench.drive import PROTOCOLS, DrivenLoad, Publishing
from qurl_megatron.bench.rollout_engines import read_look
from qurl_megatron.bench.rollout_load import Ask
from qurl_megatron.fleet.client import EngineClient, EngineError
from qurl_megatron.kit.errors import ConfigError


class Streams:
    """Token i of a response is i; what it shall do wrong is set by a test."""

    def __init__(self) -> None:
        self.token_s, self.version, self.most = 0.0, "1", 0
        self.cumulative, self.together, self.tells_ids = True, 1, True
        self.fault = ""
        self.may_send = lambda end: True
        """Streams wait before token ``end`` while it says no: what a test needs to happen in the
        middle of them does, however slow the machine is."""
        self.bodies: list[dict] = []
        self._running = 0
        paths = {"/generate": self.generate, "/v1/completions": self.completions}
        app = Starlette(routes=[Route(*item, methods=["POST"]) for item in paths.items()])
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def generate(self, request):
        body = await request.json()
        tokens = body["sampling_params"]["max_new_tokens"]
        return self._answer(body, tokens, self._native)

    async def completions(self, request):
        body = await request.json()
        return self._answer(body, body["max_tokens"], self._openai)

    def _answer(self, body, tokens, event):
        self.bodies.append(body)
        if self.fault == "refuse":
            return JSONResponse({"error": {"message": "no such parameter"}}, status_code=400)
        return StreamingResponse(self._stream(tokens, event), media_type="text/event-stream")

    async def _stream(self, tokens, event):
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            spans = []
            for end in [*range(self.together, tokens, self.together), tokens]:
                await asyncio.sleep(self.token_s)
                while not self.may_send(end):
                    await asyncio.sleep(0.002)
                if not spans or spans[-1]["version"] != self.version:
                    start = spans[-1]["end"] if spans else 0
                    spans.append({"version": self.version, "start": start})
                spans[-1]["end"] = end
                if self.fault == "cut" and end > tokens // 2:
                    return
                yield b"data: " + json.dumps(event(end, tokens, spans)).encode() + b"\n\n"
            if event == self._openai:
                usage = {"completion_tokens": tokens, "prompt_tokens": 4}
                yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            self._running -= 1

    def _native(self, end, tokens, spans):
        if self.fault == "malformed":
            return {"text": "no ids"}
        if self.fault == "abort" and end == tokens:
            finish = {"type": "abort", "message": "out of memory"}
        else:
            finish = {"type": "length"} if end == tokens else None
        meta = {
            "completion_tokens": end,
            "cached_tokens": 3,
            "num_retractions": 2,
            "finish_reason": finish,
            "weight_versions": spans,
        }
        begin = 0 if self.cumulative else (end - 1) // self.together * self.together
        return {"output_ids": list(range(begin, end)), "meta_info": meta}

    def _openai(self, end, tokens, spans):
        ids = list(range((end - 1) // self.together * self.together, end))
        choice = {"index": 0, "text": "x" * len(ids), "finish_reason": None}
        return {"choices": [choice | ({"token_ids": ids} if self.tells_ids else {})]}


@pytest.fixture(scope="module")
def running():
    server = Streams()
    yield server
    server.close()


@pytest.fixture
def server(running):
    running.__dict__.update(
        token_s=0.0,
        version="1",
        most=0,
        cumulative=True,
        together=1,
        tells_ids=True,
        fault="",
        may_send=lambda end: True,
        bodies=[],
    )
    return running


def drive(server, asks, *, protocol="sglang", at_once=0, **options):
    client = EngineClient(server.url, timeout_s=20)
    return DrivenLoad(client, PROTOCOLS[protocol], "toy", **options).drive(asks, at_once)


def ask(tokens):
    return Ask(0, (1, 2, 3, 4), tokens)


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("cumulative", [True, False])
def test_every_token_of_a_stream_is_seen_whether_all_or_only_new_ones_are_sent(
    server, cumulative, together
):
    server.cumulative, server.together, server.token_s = cumulative, together, 0.005
    (answer,) = drive(server, [ask(7)]).answers
    assert not answer.failure and answer.ids == list(range(7))
    # A busy machine may bring several events in one piece.
    assert answer.counts == sorted({*answer.counts} & {*range(together, 7, together), 7})
    assert answer.tokens == 7
    assert answer.times == sorted(answer.times) and answer.times[-1] <= answer.ended
    assert (answer.cached, answer.preempted) == (3, 2)
    (body,) = server.bodies
    assert body["input_ids"] == [1, 2, 3, 4] and body["stream"] is True
    params = body["sampling_params"]
    assert params == {"max_new_tokens": 7, "ignore_eos": True, "temperature": 1.0}


@pytest.mark.parametrize("tells_ids", [True, False])
def test_openai_streams_are_counted_by_ids_and_by_the_usage_at_the_end(server, tells_ids):
    server.tells_ids, server.together = tells_ids, 2
    (answer,) = drive(server, [ask(5)], protocol="openai").answers
    assert not answer.failure and answer.tokens == 5
    assert answer.ids == ([0, 1, 2, 3, 4] if tells_ids else [])
    (body,) = server.bodies
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("toy", [1, 2, 3, 4], 5)
    assert body["ignore_eos"] is True and body["stream_options"] == {"include_usage": True}


def test_a_closed_batch_has_all_requests_under_way_at_once(server):
    server.may_send = lambda end: server.most >= 120  # more than libraries usually connect
    outcome = drive(server, [ask(4)] * 120)
    assert all(not answer.failure for answer in outcome.answers)


def test_concurrency_is_kept_to_the_end(server):
    server.may_send = lambda end: server.most >= 4
    outcome = drive(server, [ask(3)] * 12, at_once=4)
    assert server.most == 4 and len(outcome.answers) == 12


@pytest.mark.parametrize(
    "fault, said",
    [
        ("cut", "generate (did not answer|ended its stream)"),
        ("refuse", "answered 400: no such parameter"),
        ("malformed", "/generate sent a malformed event"),
        ("abort", "aborted: out of memory"),
    ],
)
def test_a_failed_request_stays_failed_with_its_cause(server, fault, said):
    server.fault = fault
    outcome = drive(server, [ask(6), ask(6)])
    assert all(answer.failure for answer in outcome.answers)
    assert load_figures.tokens(outcome.answers) == 0
    assert re.search(said, outcome.answers[0].failure)


def test_a_publication_comes_in_the_middle_and_its_first_token_is_found(server):
    server.token_s = 0.01
    server.may_send = lambda end: end <= 15 or server.version == "2"

    def publish():
        server.version = "2"
        return "2", 0.125

    plan = Publishing(publish, tokens=20, once=True)
    outcome = drive(server, [ask(20), ask(20)], publishing=plan)
    (publication,) = outcome.publications
    assert publication.name == "2" and publication.paused_s == 0.125
    valid = load_figures.first_valid(publication, outcome.answers)
    assert 0 < valid < outcome.answers[0].ended - publication.began


def test_publications_repeat_until_the_load_is_over(server):
    server.token_s = 0.01
    server.may_send = lambda end: end < 25 or int(server.version) >= 3

    def publish():
        server.version = str(int(server.version) + 1)
        return server.version, 0.0

    outcome = drive(server, [ask(25)], publishing=Publishing(publish, seconds=0.05))
    assert len(outcome.publications) >= 2
    began = [publication.began for publication in outcome.publications]
    assert all(later - earlier >= 0.05 for earlier, later in zip(began, began[1:], strict=False))


@pytest.mark.parametrize("kind", [EngineError, ConfigError, OSError])
def test_a_publication_that_fails_is_told_and_the_load_goes_on(server, kind):
    tried = []
    server.may_send = lambda end: end <= 4 or tried

    def publish():
        tried.append("2")
        raise kind("engine-0 rejects version 2")

    outcome = drive(server, [ask(8)], publishing=Publishing(publish, tokens=2))
    assert outcome.unpublished == "engine-0 rejects version 2"
    assert not outcome.answers[0].failure and outcome.publications == []


def test_the_engine_is_looked_at_and_this_sides_own_work_is_measured(server):
    server.token_s, looks = 0.01, []
    server.may_send = lambda end: end < 20 or looks

    async def look(session):
        looks.append(1)
        return read_look({"num_used_tokens": 30, "max_total_num_tokens": 120})

    outcome = drive(server, [ask(20)], look=look)
    assert load_figures.occupancy(outcome) == (0.25, 0.25)
    assert outcome.client_cpu_s > 0


@pytest.mark.parametrize("fault", [KeyError("loads"), ValueError("not a number")], ids=repr)
def test_a_look_that_cannot_be_read_is_told_once_and_ends_the_looking(server, fault):
    server.token_s, looks = 0.02, []
    server.may_send = lambda end: looks

    async def look(session):
        looks.append(1)
        raise fault

    outcome = drive(server, [ask(20)], look=look)
    assert not outcome.answers[0].failure and len(looks) == 1
    assert outcome.unseen == f"what the engine says of itself cannot be read ({fault!r})"


def test_an_engine_that_is_too_busy_to_be_looked_at_is_looked_at_again_and_that_is_told(server):
    looks = []
    server.may_send = lambda end: end < 20 or len(looks) >= 2

    async def look(session):
        looks.append(1)
        if len(looks) == 1:
            raise EngineError("/server_info did not answer")
        return read_look({"num_used_tokens": 30, "max_total_num_tokens": 120})

    outcome = drive(server, [ask(20)], look=look)
    assert load_figures.occupancy(outcome) == (0.25, 0.25)
    assert outcome.unseen == "/server_info did not answer"


def test_the_embedded_engines_own_names_are_read():
    told = {"num_running_reqs": 3, "num_waiting_reqs": 2, "num_retractions": 4}
    look = read_look(told)
    assert (look.running, look.waiting, look.preemptions) == (3, 2, 4)
