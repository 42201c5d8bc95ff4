"""Answers that an engine must never give: a proxy in front of a real engine gives them all."""

import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.fleet.client import EngineClient, EngineError, deadline
from qurl_megatron.fleet.collect import collect
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.tensors.arch import StopIds
from qurl_megatron.types import Prompt
from qurl_megatron.wire.lease import Owner
from tests.support.engine_models import (
    TINY,
    LiveServer,
    published_tensors,
    random_tensors,
    write_model,
)
from tests.support.fake_engine import FakeEngine
from tests.support.proxy import FAULTS, LOCKED_OUT, Proxy
from tests.support.publishing import publish_tensors
from tests.support.waiting import NEVER_S, PATIENCE_S, wait_until

PROMPTS = [Prompt(i, (5 + i, 6, 7 + i), "", "") for i in range(4)]
OWNER = Owner("0a", "these tests")  # one run, whatever fleet it has
SILENT_S = 4.0  # for an honest engine's answer, which comes at once unless the machine is busy


class Stand:
    """A fleet of a proxy and a healthy engine, both before the same weights."""

    def __init__(self, fleet: Fleet, proxy: Proxy, weights, honest: list) -> None:
        self.fleet, self.proxy, self.weights, self.honest = fleet, proxy, weights, honest
        self.version = 0

    def publish(self) -> None:
        """Everybody is back in the traffic."""
        self.version += 1
        publish_tensors(self.fleet, self.version, self.weights)
        assert len(self.fleet.serving()) == 2
        self.fleet.drain()

    def collect(self) -> list:
        return collect(self.fleet, PROMPTS, self.fleet.config, seed=1, step=2)


@contextmanager
def fleet_of(*urls: str, fixed: bool = False, **changes):
    quick = {"samples_per_prompt": 2, "max_new_tokens": 5, "timeout_s": SILENT_S}
    config = RolloutConfig(urls=urls, **{**quick, "health_every_s": 60.0, **changes})
    options = {
        "scheme": "int8",
        "log_dir": "unused",
        "vocabulary": TINY["vocab_size"],
        "stops": StopIds(frozenset(), frozenset()),  # the model has no token that ends a response
        "fixed": fixed,
    }
    with Fleet(config, "unused", owner=OWNER, **options) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"), eos_token_id=None)
    weights = published_tensors(random_tensors(folder, seed=3), "int8")
    with LiveServer(folder) as one, LiveServer(folder) as other:
        yield (one, other), weights


@pytest.fixture(scope="module")
def stand(engines):
    (behind, good), weights = engines
    with Proxy(behind.url) as proxy, fleet_of(proxy.url, good.url) as fleet:
        made = Stand(fleet, proxy, weights, [])
        made.publish()
        made.honest = made.collect()
        yield made


def held(stand: Stand, name: str) -> None:
    """The samples are those of honest engines, and the user is told what the proxy said."""
    samples = stand.collect()
    for sample, honest in zip(samples, stand.honest, strict=True):
        assert sample.response_ids.tolist() == honest.response_ids.tolist()
        np.testing.assert_allclose(
            sample.behaviour_log_probs, honest.behaviour_log_probs, atol=1e-5
        )
        assert sample.versions == ((stand.version, 5),)
    assert stand.proxy.played[-1] == name
    events, _ = stand.fleet.drain()
    [said] = [e["message"] for e in events if e["event"] in ("failed", "gave up")]
    assert stand.proxy.url in said and re.search(FAULTS[name].says, said), said
    assert "\n" not in said and len(said) < 600
    assert [e.url for e in stand.fleet.serving()] != [] and stand.proxy.url not in {
        e.url for e in stand.fleet.serving()
    }


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in LOCKED_OUT])
def test_an_answer_that_an_engine_must_never_give_is_held(name, stand):
    stand.publish()
    stand.proxy.play([name])
    held(stand, name)


@pytest.mark.parametrize("name", LOCKED_OUT)
def test_an_engine_that_does_not_let_us_in_is_left_out(name, engines, stand):
    (behind, good), weights = engines
    with Proxy(behind.url) as proxy, fleet_of(proxy.url, good.url) as fleet:
        other = Stand(fleet, proxy, weights, stand.honest)
        other.publish()
        proxy.play([name])
        held(other, name)
        publish_tensors(fleet, 2, weights)
        assert [engine.url for engine in fleet.engines()] == [good.url]


def test_a_liar_alone_ends_the_collection_in_a_sentence(engines):
    (behind, _), weights = engines
    with Proxy(behind.url) as proxy, fleet_of(proxy.url) as fleet:
        publish_tensors(fleet, 1, weights)
        proxy.play(["id = vocabulary"])
        with pytest.raises(EngineError, match="no engine is serving: .*outside the vocabulary"):
            collect(fleet, PROMPTS, fleet.config, seed=1, step=2)


def test_two_liars_that_nobody_publishes_to_end_the_collection_too(engines):
    first, second = engines[0]
    with Proxy(first.url) as one, Proxy(second.url) as other:
        one.play(["id = vocabulary"] * 1000)
        other.play(["id = vocabulary"] * 1000)
        refusal = pytest.raises(EngineError, match="no engine is serving|failed 3 times")
        with fleet_of(one.url, other.url, fixed=True) as fleet, refusal:
            collect(fleet, PROMPTS, fleet.config, seed=1, step=2)


@pytest.mark.parametrize(
    "name,says",
    {
        "huge": "more than 16777216 bytes",
        "deep": "answer is not JSON",
        "noise": "answer is not JSON",
        "never": "did not answer within 0.6 s",
        "drip": "did not answer within 0.6 s",
        "headers drip": "did not answer within 0.6 s",
        "cut": "did not answer",
        "302": "answered 302",
    }.items(),
)
def test_what_is_asked_beside_generations_has_bounds_too(name, says, engines):
    limit_s = 0.6 if "0.6 s" in says else PATIENCE_S
    with Proxy(engines[0][0].url) as proxy:
        client, start = EngineClient(proxy.url), time.monotonic()
        proxy.play([name], at="/server_info")
        with pytest.raises(EngineError, match=says):
            client.server_info(timeout_s=limit_s)
        assert proxy.played == [name] and time.monotonic() - start < limit_s + 5
        assert client.server_info()["engine"] == "qurl-embedded"


CONTROL = {
    "/pause_generation": lambda client: client.pause("retract"),
    "/continue_generation": lambda client: client.resume(),
    "/flush_cache": lambda client: client.flush(),
    "/abort_request": lambda client: client.abort("a"),
    "/begin_weight_update": lambda client: client.begin_weight_update(),
    "/update_weights_from_tensor": lambda client: client.update_weights_from_tensor([]),
    "/end_weight_update": lambda client: client.end_weight_update(),
    "/qurl_lease": lambda client: client.lease(OWNER, 1, timeout_s=60),
    "/update_weight_version": lambda client: client.set_weight_version("1"),
    "/release_memory_occupation": lambda client: client.release_memory(),
    "/resume_memory_occupation": lambda client: client.resume_memory(),
    "/server_info": lambda client: client.server_info(),
    "/model_info": lambda client: client.weight_version(),
}


def test_a_deadline_holds_for_the_headers_of_every_control_request():
    with FakeEngine() as engine, Proxy(engine.url) as proxy, ThreadPoolExecutor(20) as pool:
        engine.post = lambda endpoint, body: (200, {"success": True})

        def ask(endpoint: str) -> float:
            proxy.play(["headers drip"], at=endpoint)
            start = time.monotonic()
            with deadline(0.3), pytest.raises(EngineError, match=f"{endpoint} did not answer wi"):
                CONTROL[endpoint](EngineClient(proxy.url))
            return time.monotonic() - start

        assert max(pool.map(ask, CONTROL)) < 5  # all of the headers take 7


@contextmanager
def silent_name_server():
    """Within the block, whoever asks for ``localhost`` is not answered."""
    known, over = socket.getaddrinfo, threading.Event()

    def resolve(host, *arguments, **options):
        if host in (b"localhost", "localhost"):
            over.wait(NEVER_S)
        return known(host, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve)
        try:
            yield
        finally:
            over.set()


@pytest.mark.parametrize("silence", ["headers drip", "a name server"])
def test_a_health_check_that_drips_or_waits_for_a_name_server_counts_as_silence(silence, engines):
    (behind, good), weights = engines
    watched = {"health_every_s": 0.05, "health_timeout_s": SILENT_S / 2}
    with Proxy(behind.url) as proxy, ExitStack() as stack:
        url = proxy.url.replace("127.0.0.1", "localhost")
        fleet = stack.enter_context(fleet_of(url, good.url, **watched))
        publish_tensors(fleet, 1, weights)
        if silence == "a name server":
            stack.enter_context(silent_name_server())
        else:
            proxy.play(["headers drip"] * 99, at="/server_info")
        wait_until(lambda: [engine.url for engine in fleet.serving()] == [good.url])
        assert "no health check was answered" in fleet.why_not()
