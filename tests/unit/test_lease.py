"""An engine belongs to one run: who gets it, who waits, who is refused, and who loses it."""

import json
import shutil
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from qurl_megatron.fleet import fleet as fleet_module
from qurl_megatron.fleet import tenancy
from qurl_megatron.fleet.client import EngineClient, EngineError
from qurl_megatron.fleet.collect import collect
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.fleet.tenancy import Leases
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import facts_of
from qurl_megatron.types import Prompt
from qurl_megatron.wire import lease
from qurl_megatron.wire.lease import OWNER, Lease, LeaseVerdict, Owner
from tests.support.engine_models import write_model
from tests.support.fake_engine import FakeEngine
from tests.support.publishing import adopting, publish
from tests.support.waiting import NEVER_S, PATIENCE_S, wait_until

PROMPTS = [Prompt(i, (5, 6), "", "") for i in range(4)]
ONE, OTHER = Owner("aa", "run one"), Owner("bb", "run other")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(fleet_module, "RETRY_S", 0.05)
    monkeypatch.setattr(tenancy, "LEASE_S", NEVER_S)  # none lapses because the machine is busy
    monkeypatch.setattr(tenancy, "RENEW_S", 0.1)


def fleet_of(*engines: FakeEngine, owner: Owner = ONE, **options) -> Fleet:
    return adopting(*engines, owner=owner, samples_per_prompt=1, max_new_tokens=4, **options)


def test_an_engine_of_a_run_that_lives_is_refused_in_a_sentence_that_names_it():
    with FakeEngine() as engine, fleet_of(engine) as first:
        publish(first, 1)
        with (
            pytest.raises(
                ConfigError,
                match=rf"{engine.url} belongs to a run that is at work \(run one\); .*take_over",
            ) as error,
            fleet_of(engine, owner=OTHER),
        ):
            pass
        assert "\n" not in str(error.value)
        assert len(collect(first, PROMPTS, first.config, seed=0, step=0)) == 4
        assert engine.version == "1@aa"


@pytest.mark.parametrize(
    "change", [{"rope_theta": 1e6}, {"eos_token_id": [1, 5]}, {"rope_scaling": {"factor": 8.0}}]
)
def test_an_engine_that_computes_another_model_is_refused_by_what_differs(tmp_path, change):
    facts = facts_of(write_model(tmp_path))
    with FakeEngine() as same, FakeEngine() as other:
        same.lease = Lease(json.loads(json.dumps(facts)))
        other.lease = Lease(json.loads(json.dumps(facts | change)))
        with fleet_of(same, facts=facts):
            pass
        with fleet_of(other):  # a run that knows no facts compares none
            pass
        (name,) = change
        refusal = rf"{other.url} computes another model .*: {name} is .* there and .* here; start"
        with pytest.raises(ConfigError, match=refusal) as error, fleet_of(same, other, facts=facts):
            pass
        assert str(error.value).count(" here") == 1
        wait_until(lambda: other.lease.ask(_asking(OTHER))["granted"])  # it was given back


def _asking(owner: Owner) -> dict:
    return {"run": owner.token, "label": owner.label, "seconds": 0}


@pytest.mark.parametrize("ended", [True, False], ids=["after another ended", "started again"])
def test_a_run_gets_engines_at_once_that_are_free_or_its_own(ended):
    with FakeEngine() as engine:
        if ended:
            with fleet_of(engine, owner=OTHER):
                pass
        else:
            EngineClient(engine.url).lease(ONE, NEVER_S, timeout_s=PATIENCE_S)
        start = time.monotonic()
        with fleet_of(engine) as fleet:
            publish(fleet, 1)
        assert time.monotonic() - start < PATIENCE_S


def test_the_engines_of_a_run_that_was_killed_are_free_when_its_lease_has_lapsed():
    with FakeEngine() as engine:
        start = time.monotonic()
        EngineClient(engine.url).lease(ONE, 0.7, timeout_s=PATIENCE_S)
        with fleet_of(engine, owner=OTHER) as second:
            assert time.monotonic() - start >= 0.7
            publish(second, 1)
        assert engine.version == "1@bb"


def test_who_waits_too_long_for_a_lease_to_lapse_is_told_whose_it_is():
    def clock() -> float:
        """Time is up once the engine has said whose it is."""
        return NEVER_S * any(engine.pulse.error for engine in fleet.engines())

    with FakeEngine() as engine:
        EngineClient(engine.url).lease(ONE, NEVER_S, timeout_s=PATIENCE_S)
        fleet = fleet_of(engine, owner=OTHER, clock=clock)
        with pytest.raises(EngineError, match=r"belongs to run one for (600|5\d\d) s more"):
            fleet.__enter__()


class Door:
    """A client of an engine that answers requests for a lease once it may."""

    url = "http://engine:1"

    def __init__(self, engine: Lease) -> None:
        self.engine = engine
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()

    def lease(self, owner, seconds, *, take_over=False, timeout_s) -> LeaseVerdict:
        self.asked.set()
        assert self.may_answer.wait(PATIENCE_S)
        return LeaseVerdict(**self.engine.ask(_asking(owner) | {"seconds": seconds}))


@pytest.fixture
def leases() -> Leases:
    return Leases(ONE, take_over=False, lost=lambda *_: None, clock=time.monotonic)


def test_a_claim_that_is_under_way_when_the_run_ends_leaves_no_lease(leases):
    door = Door(Lease())
    door.may_answer.clear()
    with ThreadPoolExecutor(2) as pool:
        claiming = pool.submit(leases.claim, door, lambda: True)
        assert door.asked.wait(PATIENCE_S)
        ending = pool.submit(leases.end)
        door.may_answer.set()
        claiming.result(PATIENCE_S)
        ending.result(PATIENCE_S)
    assert door.engine.ask(_asking(OTHER))["granted"]
    with pytest.raises(EngineError, match="is not wanted any more"):
        leases.claim(door, lambda: True)


def test_an_engine_that_leaves_the_fleet_is_free_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(fleet_module, "ABSENT_S", 0.0)
    with FakeEngine() as engine, FakeEngine() as other:
        for name, one in (("engine", engine), ("other", other)):
            (tmp_path / f"{name}.json").write_text(json.dumps({"url": one.url}))
        with fleet_of(rendezvous=str(tmp_path), engines=2) as fleet:
            one, two = (EngineClient(made.url) for made in (engine, other))
            assert not one.lease(OTHER, NEVER_S, timeout_s=PATIENCE_S).granted
            (tmp_path / "engine.json").unlink()
            wait_until(lambda: len(fleet.engines()) == 1)
            wait_until(lambda: one.lease(OTHER, NEVER_S, timeout_s=PATIENCE_S).granted)
            assert not two.lease(OTHER, NEVER_S, timeout_s=PATIENCE_S).granted


def test_an_engine_that_leaves_and_returns_is_not_given_back_late(leases):
    lease = Lease()
    first, second, third = Door(lease), Door(lease), Door(lease)
    leases.claim(first, lambda: True)
    first.asked.clear()
    first.may_answer.clear()
    leases.let_go(first)
    assert first.asked.wait(PATIENCE_S)  # in the engine
    with ThreadPoolExecutor(1) as pool:
        claiming = pool.submit(leases.claim, second, lambda: True)
        first.may_answer.set()
        claiming.result(PATIENCE_S)
    leases.claim(third, lambda: True)
    leases._give_back(leases._tenures[second.url], second)  # it was on its way here
    assert not lease.ask(_asking(OTHER))["granted"]
    leases.end()
    assert lease.ask(_asking(OTHER))["granted"]


def test_an_engine_that_is_taken_over_is_lost_to_the_run_that_had_it_and_to_nothing_else():
    with FakeEngine() as shared, FakeEngine() as own, fleet_of(shared, own) as first:
        publish(first, 1)
        with fleet_of(shared, owner=OTHER, take_over=True) as second:
            publish(second, 1)
            wait_until(lambda: len(first.engines()) == 1)
            assert f"{shared.url} was taken over by another run (run other)" in first.why_not()
            events = [(event["event"], event["engine"]) for event in first.drain()[0]]
            assert ("gave up", "engine-0") in events
            publish(first, 2)
            assert (shared.version, own.version) == ("1@bb", "2@aa")


def test_tokens_of_another_runs_weights_are_refused_and_generated_elsewhere():
    with FakeEngine() as shared, FakeEngine() as own, fleet_of(shared, own) as fleet:
        publish(fleet, 1)
        shared.version = "1@bb"
        samples = collect(fleet, PROMPTS, fleet.config, seed=0, step=0)
        assert len(samples) == 4 and {s.versions for s in samples} == {((1, 4),)}
        assert "weights 1@bb: another run publishes to this engine" in fleet.why_not()
        assert [engine.url for engine in fleet.serving()] == [own.url]


def test_whoever_only_asks_takes_no_lease_and_needs_none():
    with FakeEngine() as engine, fleet_of(engine) as first:
        publish(first, 3)
        with fleet_of(engine, owner=OTHER, fixed=True) as looking:
            samples = collect(looking, PROMPTS, looking.config, seed=0, step=0)
            assert {s.versions for s in samples} == {((3, 4),)}
        assert EngineClient(engine.url).lease(ONE, 1, timeout_s=PATIENCE_S).granted


def test_an_engine_that_keeps_no_leases_is_adopted_all_the_same():
    with FakeEngine() as engine:
        engine.post = lambda path, body: (
            (404, {}) if path == lease.ENDPOINT else FakeEngine.post(engine, path, body)
        )
        with fleet_of(engine) as fleet:
            publish(fleet, 1)
            assert len(fleet.serving()) == 1


@pytest.mark.parametrize(
    "answer", [{}, {"granted": 1}, {"granted": True, "label": "", "left_s": "x"}]
)
def test_nonsense_about_a_lease_is_that_engines_fault(answer):
    with FakeEngine() as engine:
        engine.lease.ask = lambda body: answer
        with pytest.raises(EngineError, match="malformed answer to a request for a lease") as error:
            EngineClient(engine.url).lease(ONE, 1, timeout_s=PATIENCE_S)
        assert error.value.faulty


def ask(made: Lease, run: str, seconds: float = 10, **more) -> tuple[bool, str, float]:
    answer = made.ask({"run": run, "label": f"run {run}", "seconds": seconds, **more})
    return answer["granted"], answer["label"], answer["left_s"]


def test_a_lease_is_one_runs_until_it_lapses_is_given_back_or_taken():
    now = 100.0
    made = Lease(clock=lambda: now)
    assert ask(made, "a") == (True, "run a", 10)
    assert ask(made, "b") == (False, "run a", 10)
    now += 4
    assert ask(made, "b") == (False, "run a", 6)
    assert ask(made, "a") == (True, "run a", 10)
    now += 10
    assert ask(made, "b") == (True, "run b", 10)
    assert ask(made, "a", take_over=True) == (True, "run a", 10)
    assert ask(made, "b") == (False, "run a", 10)
    ask(made, "a", 0)
    assert ask(made, "b") == (True, "run b", 10)


@pytest.mark.parametrize(
    "body",
    [None, [], {}, {"run": "a"}, {"run": "", "label": "", "seconds": 1}]
    + [{"run": "a", "label": "x", "seconds": s} for s in (-1, "1", None, 1e9, float("nan"), True)],
)
def test_a_request_for_a_lease_that_is_none_is_refused(body):
    with pytest.raises(ConfigError, match="a lease needs run and label"):
        Lease().ask(body)


def test_a_run_is_its_folder_and_a_copy_of_that_is_another_run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    made = Owner.of(folder)
    assert Owner.of(folder) == made and str(folder) in made.label
    assert stat.S_IMODE((folder / OWNER).stat().st_mode) == 0o600
    shutil.copytree(folder, tmp_path / "copy")
    assert Owner.of(tmp_path / "copy").token != made.token
    shutil.rmtree(folder)
    folder.mkdir()
    assert Owner.of(folder).token != made.token
    with pytest.raises(ConfigError, match="owner cannot be read or written"):
        Owner.of(tmp_path / "nowhere")
