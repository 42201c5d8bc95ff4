import asyncio
import gc
import socket
import time

import pytest

from qurl_megatron.fleet.answer import parsed
from qurl_megatron.fleet.client import EngineClient, EngineError, deadline
from tests.support.fake_engine import FakeEngine
from tests.support.names import unanswered
from tests.support.waiting import NEVER_S, PATIENCE_S


@pytest.fixture
def engine():
    with FakeEngine() as made:
        yield made


def test_a_session_for_weights_opens_loads_and_closes(engine):
    client = EngineClient(engine.url)
    client.begin_weight_update()
    client.begin_weight_update()  # a dead trainer left it open: that is fine
    client.update_weights_from_tensor(["a", "b"], "package.load")
    [body] = engine.bodies("/update_weights_from_tensor")
    assert body["serialized_named_tensors"] == ["a", "b"]
    assert (body["load_format"], body["flush_cache"]) == ("package.load", False)
    client.end_weight_update()
    with pytest.raises(EngineError, match="update_weights_from_tensor answered 400: no session"):
        client.update_weights_from_tensor([], "package.load")
    client.set_weight_version(12)
    assert client.weight_version() == "12"
    [body] = engine.bodies("/update_weight_version")
    assert body["abort_all_requests"] is False


def test_an_update_that_fails_with_status_200_is_an_error(engine):
    engine.end_weight_update = lambda body: (200, {"success": False, "message": "no disk"})
    with pytest.raises(EngineError, match=f"{engine.url}/end_weight_update failed: no disk"):
        EngineClient(engine.url).end_weight_update()


def test_an_engine_that_quotes_our_key_shows_it_to_nobody(engine):
    engine.end_weight_update = lambda body: (500, {"message": "got Bearer s3cret-key"})
    with pytest.raises(EngineError, match=r"Bearer \*\*\*") as error:
        EngineClient(engine.url, api_key="s3cret-key").end_weight_update()
    assert "s3cret" not in str(error.value)


def test_half_a_character_in_a_servers_settings_is_that_engines_fault(engine):
    engine.server_info = lambda: {"preferred_sampling_params": "\ud800"}
    with pytest.raises(EngineError, match="preferred_sampling_params") as error:
        EngineClient(engine.url).info()
    assert error.value.faulty


def test_a_reason_of_any_length_is_said_in_a_few_words(engine):
    engine.end_weight_update = lambda body: (200, {"message": ["x" * 900] * 900})
    with pytest.raises(EngineError, match="/end_weight_update failed: ") as error:
        EngineClient(engine.url).end_weight_update()
    assert len(str(error.value)) < 400


def test_the_version_is_asked_where_sglang_tells_the_present_one(engine):
    engine.version = "5"
    client = EngineClient(engine.url)
    assert client.server_info()["weight_version"] == "default"
    assert client.weight_version() == "5"


def test_an_engine_needs_room_for_one_more_token(engine):
    info, client = {}, EngineClient(engine.url)
    engine.server_info = lambda: info
    assert client.info().longest_input is None
    info |= {"max_total_num_tokens": 99, "context_length": None}
    assert client.info().longest_input == 98
    info |= {"context_length": 64, "max_req_input_len": 58}
    assert client.info().longest_input == 57
    info["max_req_input_len"] = "many"
    with pytest.raises(EngineError, match="max_req_input_len"):
        client.info()


def test_a_deadline_bounds_every_request_of_its_thread(engine):
    client = EngineClient(engine.url, timeout_s=NEVER_S)
    engine.deaf.set()
    start = time.monotonic()
    with deadline(0.3):
        with pytest.raises(EngineError, match="/pause_generation did not answer within"):
            client.pause()
        with pytest.raises(EngineError, match="was not asked: the deadline has passed"):
            client.resume()
    assert 0.3 <= time.monotonic() - start < PATIENCE_S
    engine.deaf.clear()
    client.resume()


def test_a_limit_holds_for_looking_up_a_name_too(engine, monkeypatch):
    client = EngineClient(engine.url.replace("127.0.0.1", "localhost"))
    assert client.server_info()
    start = time.monotonic()
    with unanswered():
        with pytest.raises(EngineError, match="/server_info did not answer within 0.3 s"):
            client.server_info(0.3)
        assert 0.3 <= time.monotonic() - start < PATIENCE_S

    def unknown(*arguments, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(EngineError, match="/flush_cache did not answer: .*not known"):
        client.flush()


def test_every_failure_names_url_endpoint_and_cause(engine):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EngineError, match=f"{url}/flush_cache did not answer: .*refused"):
            EngineClient(url).flush()
    client = EngineClient(engine.url, api_key="k")
    engine.api_key = "other"
    with pytest.raises(EngineError, match="/flush_cache answered 401") as error:
        client.flush()
    assert error.value.refused and not error.value.ours
    client.close()
    with pytest.raises(EngineError, match="was not asked"):
        client.flush()
    with pytest.raises(EngineError, match="is not an engine URL"):
        EngineClient("http://[::zz]:1")


@pytest.mark.parametrize("collecting", [True, False])
def test_the_garbage_collector_rests_while_answers_are_read_and_is_then_as_it_was(
    engine, collecting
):
    seen = []

    def read(content: bytes) -> int:
        seen.append(gc.isenabled())
        return len(parsed(content)[len(seen) - 1]["output_ids"])  # fails the second time

    async def ask() -> int:
        async with EngineClient(engine.url).session() as session:
            return await session.generate(
                [[5, 6]], [{"max_new_tokens": 3}], ["a"], read, limit=9999
            )

    if not collecting:
        gc.disable()
    try:
        assert asyncio.run(ask()) == 3
        assert gc.isenabled() == collecting
        with pytest.raises(IndexError):
            asyncio.run(ask())
        assert gc.isenabled() == collecting
    finally:
        gc.enable()
    assert seen == [False, False]
