"""Answers that an engine must never give: a proxy in front of a real engine gives them all."""

import re
from contextlib import contextmanager

import numpy as np
import pytest

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.rollout.client import EngineClient, EngineError
from qurl_megatron.rollout.collect import collect
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.lease import Owner
from qurl_megatron.testing.proxy import FAULTS, LOCKED_OUT, Proxy
from qurl_megatron.types import Prompt
from tests.unit.engine_models import TINY, LiveServer, random_tensors, write_model, write_version

PROMPTS = [Prompt(i, (5 + i, 6, 7 + i), "", "") for i in range(4)]
OWNER = Owner("0a", "these tests")  # one run, whatever fleet it has


class Stand:
    """A fleet of a proxy and a healthy engine, both before the same weights."""

    def __init__(self, fleet: Fleet, proxy: Proxy, weights, honest: list) -> None:
        self.fleet, self.proxy, self.weights, self.honest = fleet, proxy, weights, honest
        self.version = 0

    def publish(self) -> None:
        """Everybody is back in the traffic."""
        self.version += 1
        self.fleet.publish(self.weights, self.version)
        assert len(self.fleet.serving()) == 2
        self.fleet.drain()

    def collect(self) -> list:
        return collect(self.fleet, PROMPTS, self.fleet.config, seed=1, step=2)


@contextmanager
def fleet_of(*urls: str, fixed: bool = False):
    config = RolloutConfig(
        urls=urls, samples_per_prompt=2, max_new_tokens=5, timeout_s=1.5, health_every_s=60.0
    )
    options = {
        "scheme": "int8",
        "log_dir": "unused",
        "vocabulary": TINY["vocab_size"],
        "fixed": fixed,
    }
    with Fleet(config, "unused", owner=OWNER, **options) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"), eos_token_id=None)
    weights = tmp_path_factory.mktemp("versions") / "v1"
    write_version(weights, random_tensors(folder, seed=3), 1, "int8")
    live = LiveServer(folder), LiveServer(folder)
    yield live, weights
    for one in live:
        one.close()


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
        fleet.publish(weights, 2)
        assert [engine.url for engine in fleet.engines()] == [good.url]


def test_a_liar_alone_ends_the_collection_in_a_sentence(engines):
    (behind, _), weights = engines
    with Proxy(behind.url) as proxy, fleet_of(proxy.url) as fleet:
        fleet.publish(weights, 1)
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


def test_what_is_asked_beside_generations_has_bounds_too(engines):
    with Proxy(engines[0][0].url) as proxy:
        client = EngineClient(proxy.url)
        honest = proxy.reply
        for name, says in {
            "huge": "more than 16777216 bytes",
            "deep": "answered no JSON",
            "noise": "answered no JSON",
            "drip": "did not answer within 1 s",
            "cut": "did not answer",
            "302": "answered 302",
        }.items():
            proxy.reply = lambda *_, fault=FAULTS[name]: fault.spoil([{"a": "b" * 20}])
            with pytest.raises(EngineError, match=says):
                client.server_info(timeout_s=0.6)
        proxy.reply = honest
        assert client.server_info()["engine"] == "qurl-embedded"
