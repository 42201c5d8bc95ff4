"""Samples from scripted engines that fail in the middle of everything."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.collect import collect, greedy, sample_seed
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.types import Prompt
from tests.support.fake_engine import FakeEngine, token_at
from tests.support.publishing import fleet_of
from tests.support.waiting import PATIENCE_S, wait_until

PROMPTS = [Prompt(10 + i, tuple(range(2, 4 + i)), "", "") for i in range(12)]


def gather(fleet, prompts=PROMPTS, **options):
    return collect(fleet, prompts, fleet.config, seed=3, step=4, **options)


def asked(engine: FakeEngine) -> list[dict]:
    """The parameters of each response that was asked for."""
    return [params for body in engine.bodies("/generate") for params in body["sampling_params"]]


def check_whole(samples, prompts=PROMPTS, *, per_prompt=2, new=6):
    """Every sample once, in order, each token as if nothing had ever happened."""
    assert [s.prompt.index for s in samples] == [
        prompt.index for prompt in prompts for _ in range(per_prompt)
    ]
    for sample in samples:
        start = len(sample.prompt.input_ids)
        assert sample.response_ids.tolist() == [token_at(start + i) for i in range(new)]
        right = [np.float32(-t / 100) for t in sample.response_ids]
        assert sample.behaviour_log_probs.tolist() == right
        assert sample.finish_reason == "length"


def test_embedded_engines_get_all_of_their_prompts_in_one_request():
    a, b = FakeEngine(embedded=True), FakeEngine(embedded=True)
    with fleet_of(a, b, temperature=0.5) as fleet:
        check_whole(gather(fleet, PROMPTS[:3]), PROMPTS[:3])
        [body] = a.bodies("/generate")
        assert body["input_ids"] == [[2, 3], [2, 3], [2, 3, 4, 5], [2, 3, 4, 5]]
        assert [p["sampling_seed"] for p in body["sampling_params"]] == [
            sample_seed(3, 4, index, sample) for index in (10, 12) for sample in (0, 1)
        ]
        assert body["sampling_params"][0]["temperature"] == 0.5
        assert len(b.bodies("/generate")) == 1
        assert len(greedy(fleet, PROMPTS[:1], 5)) == 1
        assert len(b.bodies("/generate")) == 1  # an engine without work is not asked
        assert greedy(fleet, [], 5) == []


def test_what_an_embedded_engine_leaves_does_not_wait_for_room_on_another():
    bad, slow = FakeEngine(embedded=True), FakeEngine(embedded=True)
    with fleet_of(bad, slow, requests_per_engine=2) as fleet, ThreadPoolExecutor(1) as pool:
        bad.faults = ["500"]
        slow.paused.set()
        pending = pool.submit(gather, fleet)
        wait_until(lambda: slow.running == 24)  # they queue in the engine by themselves
        slow.paused.clear()
        check_whole(pending.result(PATIENCE_S))


def test_sglang_engines_get_a_request_per_prompt_no_more_than_they_hold_the_idle_one_first():
    slow, quick = FakeEngine(), FakeEngine()
    with fleet_of(slow, quick, requests_per_engine=4) as fleet, ThreadPoolExecutor(1) as pool:
        slow.paused.set()
        pending = pool.submit(gather, fleet)
        wait_until(lambda: len(quick.bodies("/generate")) == 10)  # all that are not the slow one's
        slow.paused.clear()
        check_whole(pending.result(PATIENCE_S))
        assert slow.most == quick.most == 4
        assert all(len(body["input_ids"]) == 2 for body in slow.bodies("/generate"))
        assert all(e.in_flight == e.tokens_in_flight == 0 for e in fleet.engines())


def test_more_requests_wait_at_an_engine_than_http_libraries_usually_connect():
    engine = FakeEngine()
    prompts = [Prompt(index, (2, 3), "", "") for index in range(120)]
    options = {"samples_per_prompt": 1, "requests_per_engine": 120}
    with fleet_of(engine, **options) as fleet, ThreadPoolExecutor(1) as pool:
        engine.paused.set()
        pending = pool.submit(gather, fleet, prompts)
        wait_until(lambda: engine.running == 120)
        engine.paused.clear()
        check_whole(pending.result(PATIENCE_S), prompts, per_prompt=1)


def test_the_next_request_goes_where_the_fewest_tokens_per_device_are_in_flight():
    with fleet_of(FakeEngine(), FakeEngine(tp=4)) as fleet:
        one, four = fleet.serving()
        assert (one.tp, four.tp) == (1, 4)
        fleet.take(300, 3, wanted=four)
        fleet.take(100, 1, wanted=one)
        assert fleet.take(200, 2) is four
        assert fleet.take(10, 1) is one
        assert fleet.take(10, 8, limit=8) is None


@pytest.mark.parametrize("fault", ["500", "cut", "mixed", "nan"])
@pytest.mark.parametrize("embedded", [True, False])
def test_what_an_engine_that_fails_leaves_undone_another_does(fault, embedded):
    bad, good = FakeEngine(embedded=embedded), FakeEngine(embedded=embedded)
    with fleet_of(bad, good) as fleet:
        bad.faults = [fault]
        samples = gather(fleet)
        check_whole(samples)
        assert {version for sample in samples for version in sample.token_versions} == {7}
        assert [e.url for e in fleet.serving()] == [good.url]
        events, metrics = fleet.drain()
        assert {"failed", "retried"} <= {event["event"] for event in events}
        assert {event["engine"] for event in events} == {"engine-0"}
        assert metrics["fleet/retries"] >= 1 and metrics["fleet/serving"] == 1
        # Nothing was answered twice: what the failing engine answered well was not asked again.
        asked = [
            tuple(ids) for e in (bad, good) for b in e.bodies("/generate") for ids in b["input_ids"]
        ]
        # (A request that is given up before the engine reads it is retried, too, but not counted.)
        assert len(samples) < len(asked) <= len(samples) + metrics["fleet/retries"]


@pytest.mark.parametrize("embedded", [True, False])
def test_each_prompt_is_told_of_once_when_it_is_whole_whatever_fails(embedded):
    engines = FakeEngine(embedded=embedded), FakeEngine(embedded=embedded)
    with fleet_of(*engines) as fleet:
        engines[0].faults = ["nan"]  # spoils one response of a request, the others stand
        told = []
        samples = gather(fleet, finished=told.append, top_p=0.9)
        asked = [p for e in engines for b in e.bodies("/generate") for p in b["sampling_params"]]
    assert all(params["top_p"] == 0.9 for params in asked)
    told.sort(key=lambda group: group[0].prompt.index)
    assert [sample for group in told for sample in group] == samples
    assert [len(group) for group in told] == [2] * len(PROMPTS)


def test_with_no_engine_left_the_error_says_what_happened_to_each():
    a, b = FakeEngine(), FakeEngine()
    with fleet_of(a, b) as fleet:
        a.faults, b.faults = ["500"], ["cut"]
        with pytest.raises(EngineError, match="no engine is serving") as error:
            gather(fleet)
        assert f"engine-0 ({a.url}) is stale: {a.url}/generate answered 500" in str(error.value)
        assert f"engine-1 ({b.url}) is stale: {b.url}/generate did not answer" in str(error.value)
        assert all(e.in_flight == 0 for e in fleet.engines())


def test_a_request_that_no_engine_can_answer_is_an_error_and_fails_no_engine():
    engine = FakeEngine()
    engine.generate = lambda body: (400, {"error": {"message": "the prompt is too long"}})
    with fleet_of(engine) as fleet:
        with pytest.raises(EngineError, match="answered 400: the prompt is too long"):
            gather(fleet)
        assert len(fleet.serving()) == 1


def test_a_request_that_never_gets_a_token_is_an_error():
    engine = FakeEngine()
    with fleet_of(engine) as fleet:
        engine.faults = ["nothing"] * 3
        with pytest.raises(EngineError, match="prompt 10 failed 3 times without a token.*told to"):
            gather(fleet, PROMPTS[:1])
        engine.faults = ["nothing"] * 2
        check_whole(gather(fleet, PROMPTS[:1]), PROMPTS[:1])


def test_a_response_that_a_pause_aborted_goes_on_with_the_next_version():
    engine = FakeEngine()
    with fleet_of(engine, max_new_tokens=20) as fleet, ThreadPoolExecutor(1) as pool:
        engine.stall_at = 3
        pending = pool.submit(gather, fleet, PROMPTS[:2])
        wait_until(lambda: engine.running == 4 and engine.generated == 3 * engine.running)
        with fleet.publication() as engines:
            engine.abort_request({"abort_all": True})
            fleet.each(lambda e: e.client.pause("abort"), "pausing", engines)
            wait_until(lambda: any(p["max_new_tokens"] < 20 for p in asked(engine)))
            engine.version, engine.stall_at = fleet.names.of(8), 0
            fleet.each(lambda e: e.client.resume(), "resuming", engines)
            fleet.confirm(engines, 8)
        samples = pending.result(PATIENCE_S)
        check_whole(samples, PROMPTS[:2], new=20)
        for sample in samples:
            assert [version for version, _ in sample.versions] == [7, 8]


def test_packed_answers_make_the_same_samples_and_a_server_without_them_is_soon_known():
    ours, another = FakeEngine(), FakeEngine()
    ours.packs = True
    with fleet_of(ours, another, requests_per_engine=6) as fleet:
        check_whole(gather(fleet))
        asked_in_vain = len(another.bodies("/qurl_generate"))
        ours.faults = ["500"]
        check_whole(gather(fleet))
    assert ours.bodies("/qurl_generate") and not ours.bodies("/generate")
    assert another.bodies("/generate") and len(another.bodies("/qurl_generate")) == asked_in_vain


def test_several_threads_may_collect_at_once():
    engines = FakeEngine(), FakeEngine()
    with fleet_of(*engines, requests_per_engine=6) as fleet, ThreadPoolExecutor(4) as pool:
        engines[0].faults = ["", "", "", "500"]
        for samples in pool.map(lambda _: gather(fleet), range(4)):
            check_whole(samples)
        assert all(e.in_flight == e.tokens_in_flight == 0 for e in fleet.engines())


def test_a_response_that_an_engine_has_no_room_for_is_cut_and_the_engine_stays():
    made = FakeEngine()
    made.room = 6
    with fleet_of(made) as fleet:
        samples = gather(fleet, PROMPTS[:3])
        assert [engine.state for engine in fleet.engines()] == ["serving"]
    for sample in samples:
        assert len(sample.prompt.input_ids) + len(sample.response_ids) == 6
        assert sample.finish_reason == "length"


def test_seeds_are_stable_and_differ():
    assert sample_seed(0, 0, 0, 0) == 8662518681111019217
    seeds = {
        sample_seed(a, b, c, d) for a in (0, 1) for b in (0, 1) for c in (0, 1) for d in (0, 1)
    }
    assert len(seeds) == 16 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(("embedded", "status"), [(True, 401), (False, 403)])
def test_an_engine_that_does_not_take_our_key_is_left_out_and_the_others_go_on(embedded, status):
    bad, good = FakeEngine(embedded=embedded), FakeEngine(embedded=embedded)
    with fleet_of(bad, good) as fleet:
        bad.generate = lambda body: (status, {"error": {"message": "who are you?"}})
        check_whole(gather(fleet))
        assert [engine.url for engine in fleet.engines()] == [good.url]
        [said] = [e["message"] for e in fleet.drain()[0] if e["event"] == "gave up"]
        assert f"{bad.url}/generate answered {status}: who are you?; give its API key" in said


def test_only_where_no_engine_takes_our_key_it_is_the_users_mistake():
    a, b = FakeEngine(), FakeEngine()
    with fleet_of(a, b) as fleet:
        a.api_key = b.api_key = "another"
        with pytest.raises(EngineError, match="no engine is serving"):
            gather(fleet)
        with pytest.raises(ConfigError, match="answered 401.*answered 401.*QURL_API_KEY"):
            fleet.await_recruits(1.0)


def test_a_run_begins_with_the_engines_that_take_its_key():
    refuses, good = FakeEngine(api_key="another"), FakeEngine()
    with fleet_of(refuses, good) as fleet:
        check_whole(gather(fleet))
        assert [engine.url for engine in fleet.engines()] == [good.url]
        assert "answered 401" in fleet.why_not()


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_request_that_only_one_engine_refuses_is_that_engines_fault(status):
    bad, good = FakeEngine(), FakeEngine()
    with fleet_of(bad, good) as fleet:
        bad.generate = lambda body: (status, {"error": {"message": "I do not like it"}})
        check_whole(gather(fleet))
        assert [engine.url for engine in fleet.serving()] == [good.url]
