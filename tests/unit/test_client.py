import gc
import socket
import threading

import pytest

from qurl_megatron.engines.kinds import LOADER
from qurl_megatron.fleet.answer import uncollected
from qurl_megatron.fleet.client import EngineClient, EngineError, deadline
from tests.support.fake_engine import FakeEngine, _EngineHandler
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def engine():
    with FakeEngine() as made:
        yield made


def test_a_session_for_weights_opens_loads_and_closes(engine):
    client = EngineClient(engine.url)
    client.begin_weight_update()
    client.begin_weight_update()  # a dead trainer left it open: that is fine
    client.update_weights_from_tensor(["a", "b"])
    [body] = engine.bodies("/update_weights_from_tensor")
    assert body["serialized_named_tensors"] == ["a", "b"]
    assert (body["load_format"], body["flush_cache"]) == (LOADER, False)
    client.end_weight_update()
    with pytest.raises(EngineError, match="update_weights_from_tensor answered 400: no session"):
        client.update_weights_from_tensor([])
    client.set_weight_version("12")
    assert client.weight_version() == "12"
    [body] = engine.bodies("/update_weight_version")
    assert body["abort_all_requests"] is False


@pytest.mark.parametrize("reason", ["no disk", ["x" * 900] * 900])
def test_an_update_that_fails_with_status_200_is_an_error_in_a_few_words(reason, engine):
    engine.end_weight_update = lambda body: (200, {"success": False, "message": reason})
    failed = f"{engine.url}/end_weight_update failed: {'no disk' * (reason == 'no disk')}"
    with pytest.raises(EngineError, match=failed) as error:
        EngineClient(engine.url).end_weight_update()
    assert len(str(error.value)) < 400


def test_an_engine_that_quotes_our_key_shows_it_to_nobody(engine):
    engine.end_weight_update = lambda body: (500, {"message": "got Bearer s3cret-key"})
    with pytest.raises(EngineError, match=r"Bearer \*\*\*") as error:
        EngineClient(engine.url, api_key="s3cret-key").end_weight_update()
    assert "s3cret" not in str(error.value)


def test_the_version_is_asked_where_sglang_tells_the_present_one(engine):
    engine.version = "5"
    client = EngineClient(engine.url)
    assert client.server_info()["weight_version"] == "default"
    assert client.weight_version() == "5"


def test_a_name_that_nobody_knows_is_said(engine, monkeypatch):
    def unknown(*arguments, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    client = EngineClient(engine.url.replace("127.0.0.1", "localhost"))
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
    with deadline(0), pytest.raises(EngineError, match="was not asked: the deadline has passed"):
        client.flush()
    client.close()
    with pytest.raises(EngineError, match="was not asked: the engine has left"):
        client.flush()
    for impossible in ("http://[::zz]:1", "http://a..b:1"):
        with pytest.raises(EngineError, match="is not an engine URL"):
            EngineClient(impossible)
    EngineClient("http://[::1]:1")


@pytest.mark.parametrize("collecting", [True, False])
def test_the_garbage_collector_rests_while_answers_are_read_and_is_then_as_it_was(collecting):
    if not collecting:
        gc.disable()
    try:
        with pytest.raises(KeyError), uncollected():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == collecting
    finally:
        gc.enable()


def test_control_requests_keep_their_connection_and_do_without_it_once_it_is_closed(monkeypatch):
    monkeypatch.setattr(_EngineHandler, "protocol_version", "HTTP/1.1")
    ports, respond = [], _EngineHandler._respond

    def noting(handler, act) -> None:
        ports.append(handler.client_address[1])
        respond(handler, act)
        handler.close_connection = len(ports) == 2  # without a word

    monkeypatch.setattr(_EngineHandler, "_respond", noting)
    with FakeEngine() as engine:
        for _ in range(3):
            EngineClient(engine.url).pause("retract")
    assert ports[0] == ports[1] != ports[2]


def test_a_look_up_that_hangs_holds_up_no_later_request(engine, monkeypatch):
    over, known, asked = threading.Event(), socket.getaddrinfo, []

    def look_up(*where, **hints):
        asked.append(where)
        if len(asked) == 1:
            over.wait(PATIENCE_S)
        return known(*where, **hints)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    client = EngineClient(engine.url.replace("127.0.0.1", "localhost"))
    with deadline(0.2), pytest.raises(EngineError, match="did not answer within 0.2 s"):
        client.server_info()
    assert client.server_info()["model_path"] == "fake"
    over.set()
