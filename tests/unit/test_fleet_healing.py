"""Engines that die, hang, fail updates, appear and leave; scripted ones, some in real processes."""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from qurl_megatron.config import SyncConfig
from qurl_megatron.fleet import fleet as fleet_module
from qurl_megatron.fleet.answer import Routed
from qurl_megatron.fleet.client import EngineError, in_parallel
from qurl_megatron.fleet.collect import collect, greedy
from qurl_megatron.fleet.fleet import EngineRecord, Fleet
from qurl_megatron.kit.errors import ConfigError, Interrupted
from qurl_megatron.publish.update import Update
from qurl_megatron.types import Prompt
from qurl_megatron.wire.message import Blob, encoded, message_in
from tests.support.fake_engine import FakeEngine
from tests.support.publishing import adopting, publish
from tests.support.waiting import NEVER_S, PATIENCE_S, Clock, wait_until

PROMPTS = [Prompt(i, (5 + i, 6, 7 + i), "", "") for i in range(6)]
SILENT_S = 2.5  # for tests of silence: soon over, and more than a healthy engine needs


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(fleet_module, "LOOK_S", 0.05)
    monkeypatch.setattr(fleet_module, "RETRY_S", 0.05)
    monkeypatch.setattr(fleet_module, "BACK_OFF_S", 0.2)
    monkeypatch.setattr(fleet_module, "ABSENT_S", 0.1)
    monkeypatch.setattr(fleet_module, "PROBE_S", 0.5)
    monkeypatch.setattr(fleet_module, "GRACE_S", 1.0)


def local_fleet(tmp_path, *options, **changes) -> Fleet:
    """Two engines in processes of their own."""
    command = [sys.executable, "-m", "tests.support.fake_engine", *map(str, options)]
    return adopting(**{"engines": 2, "log_dir": tmp_path, "serve_command": command, **changes})


def offer(folder: Path, name: str, engine: FakeEngine, **more) -> Path:
    """Its entry in the rendezvous."""
    entry = folder / f"{name}.json"
    entry.write_text(json.dumps({"url": engine.url, **more}))
    return entry


def look_after(fleet: Fleet) -> None:
    """One round of the supervisor, on another thread than a publication's."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(fleet.look_after).result(PATIENCE_S)


def test_ranks_quantize_the_next_bucket_while_engines_are_still_asked_to_begin():
    with FakeEngine(tp=2) as engine, adopting(engine) as fleet, fleet.publication() as engines:
        engine.deaf.set()
        with Update(fleet, engines, 1, SyncConfig(), lambda engine, ranks: {}) as update:
            own = [encoded([Blob({"rank": rank}, 0, ())]) for rank in range(2)]
            update.bucket(lambda engine, rank: own[rank])
            assert not engine.bodies("/pause_generation")
            engine.deaf.clear()
            update.bucket(lambda engine, rank: own[1])
            update.wait()
        places = []
        for body in engine.bodies("/update_weights_from_tensor"):
            messages = map(message_in, body["serialized_named_tensors"])
            places.append([message.blobs[0].where["rank"] for message in messages])
    assert places == [[0, 1], [1, 1]]


def events(fleet) -> list[tuple[str, str]]:
    return [(event["engine"], event["event"]) for event in fleet.drain()[0]]


def test_an_engine_whose_parameters_moved_serves_only_when_it_was_started_again(tmp_path):
    with local_fleet(tmp_path, engines=1) as fleet:
        publish(fleet, 0, places="here")
        [engine] = fleet.serving()
        old = engine.process.popen.pid
        with pytest.raises(EngineError, match="moved its parameters"):
            publish(fleet, 1, places="there")
        wait_until(lambda: engine.state == "ready")
        assert engine.process.popen.pid != old
        publish(fleet, 1, places="there")
        assert fleet.serving() == [engine]


def test_an_engine_that_fails_while_another_commits_is_not_put_back(tmp_path):
    with FakeEngine() as quick, FakeEngine() as slow, adopting(quick, slow) as fleet:
        failing, other = fleet.serving()

        def committing(session: str) -> None:
            if other.name in session and failing.state == "serving":
                wait_until(lambda: not quick.paused.is_set())  # it has committed and goes on
                fleet.fail(failing, EngineError("its answer makes no sense"))

        publish(fleet, 1, committing=committing)
        assert fleet.serving() == [other]
        assert (failing.state, failing.reason) == ("stale", "its answer makes no sense")


def test_an_engine_that_was_killed_comes_back_and_joins_with_the_next_publication(tmp_path):
    with local_fleet(tmp_path) as fleet:
        publish(fleet, 1)
        killed, other = fleet.serving()
        fleet.drain()
        old_url, log = killed.url, killed.process.log
        os.kill(killed.process.popen.pid, signal.SIGKILL)
        wait_until(lambda: killed.state == "ready")
        assert fleet.serving() == [other]
        assert killed.url != old_url and killed.restarts == 1
        assert log.read_text().count("listening") == 2
        samples = collect(fleet, PROMPTS, fleet.config, seed=0, step=0)
        assert {v for s in samples for v in s.token_versions} == {1}
        publish(fleet, 2)
        assert fleet.serving() == [killed, other]
        assert killed.version == 2 and killed.client.weight_version() == fleet.names.of(2)
        seen, metrics = fleet.drain()
        mine = [event for event in seen if event["engine"] == "engine-0"]
        assert [event["event"] for event in mine[-3:]] == ["died", "restarted", "joined"]
        assert mine[-3]["message"].startswith("exited with status -9; see ")
        assert "listening" in mine[-3]["message"]
        assert metrics["fleet/restarts"] == 1
        assert fleet.drain()[1]["fleet/restarts"] == 0


def test_an_engine_of_ours_that_says_what_cannot_be_is_started_anew_and_the_reason_is_kept(
    tmp_path,
):
    with local_fleet(tmp_path, "--fault", "nan") as fleet:
        publish(fleet, 1)
        with pytest.raises(EngineError, match="no engine is serving: .*log-prob nan is not"):
            collect(fleet, PROMPTS, fleet.config, seed=0, step=0)
        bad = fleet.engines()
        assert not any(engine.state == "stale" for engine in fleet.recruits())
        wait_until(lambda: all(e.restarts == 1 and e.state == "ready" for e in bad))
        told = [e["message"] for e in fleet.drain()[0] if e["event"] == "failed"]
        assert len(told) == 2 and all("log-prob nan" in message for message in told)


@pytest.mark.parametrize(
    "log_grew, now, expected",
    [
        (0, 10, False),  # started or asked at 0, with a limit of 10
        (0, 11, True),
        (35, 39, False),  # loading weights, compiling
        (25, 36, True),  # quiet since
        (41, 41, True),  # no amount of writing buys more than 4 limits
    ],
)
def test_an_engine_is_overdue_by_its_log_and_in_the_end_by_the_clock(log_grew, now, expected):
    engine = EngineRecord("engine-0", process=SimpleNamespace(heard=lambda: log_grew))
    assert engine.overdue(since=0, limit_s=10, now=now) == expected


def test_restarts_are_forgotten_of_an_engine_that_has_served_three_versions_whole():
    with FakeEngine() as engine, adopting(engine) as fleet:
        [record] = fleet.engines()
        record.restarts = 1
        remaining = []
        for version in range(1, 5):
            publish(fleet, version)
            remaining.append(record.restarts)
        assert remaining == [1, 1, 1, 0]


def test_an_engine_that_fails_in_every_second_version_never_gets_its_restarts_back():
    with FakeEngine() as liar, adopting(liar) as fleet:
        engine = fleet.engines()[0]
        engine.restarts = 1
        for version in range(1, 20):
            publish(fleet, version)
            if version % 2:
                fleet.fail(engine, "it said what cannot be")
                wait_until(lambda: engine.pulse.healthy)
        assert engine.state == "stale" and engine.restarts == 1


def test_a_stopped_process_is_found_by_its_deadline_killed_and_started_again(tmp_path):
    with local_fleet(tmp_path, "--token-s", 0.05, health_timeout_s=SILENT_S) as fleet:
        publish(fleet, 1)
        stopped, other = fleet.serving()
        pid = stopped.process.popen.pid
        threading.Timer(0.1, os.kill, (pid, signal.SIGSTOP)).start()
        start = time.monotonic()
        samples = collect(fleet, PROMPTS, fleet.config, seed=0, step=0)
        assert time.monotonic() - start > SILENT_S
        assert [s.prompt.index for s in samples] == [i for i in range(6) for _ in range(2)]
        assert fleet.serving() == [other]
        wait_until(lambda: stopped.state == "ready")
        assert stopped.process.popen.pid != pid
        assert ("engine-0", "failed") in events(fleet)
        publish(fleet, 2)
        assert fleet.serving() == [stopped, other]


def test_an_engine_that_hangs_in_an_update_fails_by_its_deadline_and_the_others_go_on():
    hung, good = FakeEngine(), FakeEngine()
    with hung, good, adopting(hung, good) as fleet:
        publish(fleet, 1)
        hung.update_fault, usual = "hang", fleet.config
        fleet.config = replace(usual, update_timeout_s=5.0)
        start = time.monotonic()
        publish(fleet, 2)
        fleet.config = usual
        assert time.monotonic() - start < PATIENCE_S
        assert [e.url for e in fleet.serving()] == [good.url]
        assert hung.paused.is_set()  # not told to go on: it might have half of the weights
        assert hung.version == fleet.names.updating(2)
        assert "did not answer within" in fleet.why_not()
        hung.update_fault = ""
        publish(fleet, 3)
        assert len(fleet.serving()) == 2 and hung.version == fleet.names.of(3)


def test_an_engine_that_says_yes_but_serves_the_old_version_is_named_and_stays_paused():
    with FakeEngine() as liar, adopting(liar) as fleet:
        liar.update_fault = "lie"
        with pytest.raises(EngineError, match=f"{liar.url} serves version 'updating-2@"):
            publish(fleet, 2)
        assert liar.paused.is_set() and fleet.serving() == []


def test_an_engine_of_ours_that_keeps_failing_updates_is_started_anew(tmp_path):
    with local_fleet(tmp_path) as fleet:
        bad, good = fleet.serving()
        for _ in range(2):
            with fleet.publication() as engines:

                def act(engine):
                    if engine is bad:
                        raise EngineError("its loader is broken")

                fleet.confirm(fleet.each(act, "updating", engines), 1)
            wait_until(lambda: bad.state in ("ready", "stale") and bad.pulse.healthy)
        wait_until(lambda: bad.restarts == 1 and bad.state == "ready")
        assert fleet.serving() == [good]


def test_nothing_is_restarted_while_a_publication_is_under_way(tmp_path):
    with local_fleet(tmp_path) as fleet:
        with fleet.publication() as engines:
            engines[0].process.kill()
            assert engines[0].process.exited(PATIENCE_S)
            look_after(fleet)
            assert (engines[0].state, engines[0].restarts) == ("serving", 0)
            done = fleet.each(lambda e: e.client.weight_version(), "asking", engines)
            assert list(done) == [engines[1]]
            fleet.confirm(done, 1)
        wait_until(lambda: engines[0].state == "ready")


def test_silence_during_a_publication_is_not_held_against_an_engine():
    clock = Clock()
    with FakeEngine() as engine, adopting(engine, clock=clock, health_timeout_s=NEVER_S) as fleet:
        [record] = fleet.engines()
        engine.deaf.set()  # as one that is busy loading weights
        wait_until(lambda: record.pulse.sent is not None)
        before = record.pulse
        with fleet.publication() as engines:
            clock.skipped_s += 100 * NEVER_S
            engine.deaf.clear()
            fleet.confirm(engines, 1)
        wait_until(lambda: record.pulse is not before and record.pulse.healthy)
        assert len(fleet.serving()) == 1
        assert "failed" not in [name for _, name in events(fleet)]


OLD, UNSAID = "qurl_megatron.rollout.sglang.loader.load", "unsaid"


@pytest.mark.parametrize(
    "embedded, said, refusal",
    [
        (
            False,
            {"preferred_sampling_params": {"regex": "[0-9]+"}},
            "samples from another distribution .*'regex': .*start it without",
        ),
        (True, {"custom_weight_loader": UNSAID}, "weight loader of this version.* with qurl serve"),
        (False, {"custom_weight_loader": [OLD]}, "weight loader of this version.* with python"),
        (False, {"custom_weight_loader": None}, "weight loader of this version.* with python"),
        (True, {"scheme": "int4"}, "takes weights of scheme int4.*none"),
    ],
)
def test_an_engine_with_a_loader_scheme_or_settings_of_its_own_is_refused(embedded, said, refusal):
    with FakeEngine(embedded=embedded) as engine:
        info = engine.server_info()
        engine.server_info = lambda: {k: v for k, v in (info | said).items() if v != UNSAID}
        with pytest.raises(ConfigError, match=f"{engine.url} .*{refusal}"):
            adopting(engine).__enter__()
        assert not engine.calls
        said = {"scheme": "none"}
        with adopting(engine) as fleet:
            assert [one.url for one in fleet.serving()] == [engine.url]


def test_an_engine_that_moves_experts_is_refused_where_the_model_has_some():
    with FakeEngine() as engine:
        info = engine.server_info() | {"enable_eplb": True}
        engine.server_info = lambda: info
        with adopting(engine, facts={"experts": None}) as fleet:
            assert fleet.serving()
        message = f"{engine.url} keeps experts .* its own enable_eplb = True; .*-backend triton"
        with pytest.raises(ConfigError, match=message):
            adopting(engine, facts={"experts": {"count": 8}}).__enter__()


def test_an_engine_that_does_not_record_its_experts_is_refused_where_they_are_replayed():
    with FakeEngine() as engine:
        info = engine.server_info()
        for records in (None, True):
            engine.server_info = lambda says=records: info | {"enable_return_routed_experts": says}
            with adopting(engine, routed=Routed(2, 2, 8)) as fleet:
                assert fleet.serving()
        engine.server_info = lambda: info | {"enable_return_routed_experts": False}
        message = f"{engine.url} does not record .* with --enable-return-routed-experts"
        with pytest.raises(ConfigError, match=message):
            adopting(engine, routed=Routed(2, 2, 8)).__enter__()


def test_engines_come_and_go_with_the_rendezvous(tmp_path):
    with FakeEngine() as first, FakeEngine(api_key="secret") as second:
        (tmp_path / "key").write_text("secret\n")
        entry = offer(tmp_path, "a", first)
        with adopting(rendezvous=str(tmp_path)) as fleet:
            publish(fleet, 1)
            (tmp_path / "b.json").write_text('{"url": "http')  # a writer in the middle of it
            wait_until(lambda: any("b.json is not" in e["message"] for e in fleet.drain()[0]))
            assert len(fleet.engines()) == 1
            offer(tmp_path, "b", second, api_key_file="key")
            wait_until(lambda: len(fleet.engines()) == 2 and fleet.engines()[1].state == "ready")
            assert [e.url for e in fleet.serving()] == [first.url]
            publish(fleet, 2)
            assert [e.url for e in fleet.serving()] == [first.url, second.url]
            entry.unlink()
            wait_until(lambda: len(fleet.engines()) == 1)
            assert len(greedy(fleet, PROMPTS, 2)) == 6
            assert not first.bodies("/generate")
            names = events(fleet)
            assert ("engine-1", "joined") in names and ("engine-0", "left") in names


def test_a_file_as_rendezvous_is_refused(tmp_path):
    file = tmp_path / "engines.jsonl"
    file.touch()
    with pytest.raises(ConfigError, match=f"{file} is a file; name a folder with one JSON file"):
        adopting(rendezvous=str(file))


@pytest.mark.parametrize("patience_s", [0.0, NEVER_S])
def test_an_engine_may_leave_and_return_or_seem_to_while_others_are_waited_for(
    patience_s, tmp_path, monkeypatch
):
    monkeypatch.setattr(fleet_module, "ABSENT_S", patience_s)
    with FakeEngine() as first, FakeEngine() as second, ThreadPoolExecutor(1) as pool:
        entry = offer(tmp_path, "first", first)
        fleet = adopting(rendezvous=str(tmp_path), engines=2)
        pending = pool.submit(fleet.__enter__)
        try:
            wait_until(lambda: fleet.serving())
            entry.write_text("")
            seen = first.looks
            if patience_s:
                wait_until(lambda: first.looks > seen + 5 or not fleet.engines())
                assert fleet.serving()
            else:
                wait_until(lambda: not fleet.engines())
            offer(tmp_path, "first", first)
            offer(tmp_path, "second", second)
            assert len(pending.result(PATIENCE_S).serving()) == 2
        finally:
            fleet.close()


@pytest.mark.parametrize(
    "wrong,complaint",
    [
        ({"url": "http://127.0.0.1:1", "api_key_file": "absent"}, "API key of http://127.0.0.1:1"),
        ({"uri": "http://127.0.0.1:1"}, "wrong.json is not"),
    ],
)
def test_a_wrong_entry_of_the_rendezvous_keeps_nobody_from_coming_or_going(
    wrong, complaint, tmp_path
):
    with FakeEngine() as first, FakeEngine() as second:
        entry = offer(tmp_path, "first", first)
        with adopting(rendezvous=str(tmp_path)) as fleet:
            (tmp_path / "wrong.json").write_text(json.dumps(wrong))
            offer(tmp_path, "younger", second)
            wait_until(lambda: len(fleet.engines()) == 2)
            entry.unlink()
            wait_until(lambda: [engine.url for engine in fleet.engines()] == [second.url])
            told = [event["message"] for event in fleet.drain()[0]]
            assert sum(complaint in message for message in told) == 1


def test_a_run_waits_for_the_engines_it_begins_with_and_says_how_many_came(tmp_path):
    with FakeEngine() as engine:
        offer(tmp_path, "engine", engine)

        def clock() -> float:
            """Time is up once the one engine is there."""
            return time.monotonic() + (2 * NEVER_S if fleet.serving() else 0)

        waits = {"engines": 2, "start_timeout_s": NEVER_S, "clock": clock}
        fleet = adopting(rendezvous=str(tmp_path), **waits)
        with pytest.raises(EngineError, match="offers 1 of 2 engines after 600 s"):
            fleet.__enter__()


@pytest.fixture
def nobody() -> SimpleNamespace:
    """An address at which no engine is."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return SimpleNamespace(url=f"http://127.0.0.1:{listener.getsockname()[1]}")


def test_a_run_says_once_whom_it_waits_for_and_how_long(nobody, capsys):
    skipped_s = 0

    def clock() -> float:
        """A minute more with every look at an engine that is known to refuse."""
        nonlocal skipped_s
        if any(engine.pulse.error for engine in fleet.engines()):
            skipped_s += 60
        return time.monotonic() + skipped_s

    fleet = adopting(nobody, start_timeout_s=3000, clock=clock)
    with pytest.raises(EngineError, match="did not answer within 3000 s"):
        fleet.__enter__()
    (told,) = capsys.readouterr().out.splitlines()
    limit = r"for 3000 s at most \(rollout\.start_timeout_s\)"
    assert re.match(rf"waiting for {nobody.url} {limit}: .*refused", told), told


def test_a_stop_is_heard_while_the_first_engines_are_waited_for(nobody):
    looks = iter([False] * 3 + [True])
    with pytest.raises(Interrupted, match="stopped while engines were waited for"):
        adopting(nobody, stop=lambda: next(looks)).__enter__()


def test_an_adopted_engine_gets_the_key_of_the_environment(monkeypatch):
    monkeypatch.setenv("QURL_API_KEY", "secret")
    with FakeEngine(api_key="secret") as engine, adopting(engine) as fleet:
        assert len(fleet.serving()) == 1


def test_nothing_is_started_in_memory_that_is_the_trainers(tmp_path):
    clock = Clock()
    with local_fleet(tmp_path, clock=clock) as fleet:
        fleet.released = True
        victim = fleet.serving()[0]
        victim.process.kill()
        wait_until(lambda: victim.start_at is not None)
        clock.skipped_s += 0.5  # more than the pause before a restart
        look_after(fleet)
        assert victim.restarts == 0
        fleet.released = False
        wait_until(lambda: victim.restarts == 1)


def test_engines_that_all_die_while_their_memory_is_lent_come_back_for_the_next_version(tmp_path):
    with local_fleet(tmp_path) as fleet:
        publish(fleet, 1)
        fleet.release()
        for engine in fleet.engines():
            os.kill(engine.process.popen.pid, signal.SIGKILL)
        wait_until(lambda: all(engine.start_at is not None for engine in fleet.engines()))
        with pytest.raises(EngineError, match="no engine to publish to"):
            publish(fleet, 2)
        assert fleet.await_recruits(PATIENCE_S)
        publish(fleet, 2)
        assert fleet.serving()


def test_an_engine_that_was_silent_when_memory_came_back_has_its_own_before_it_gets_weights():
    away, other = FakeEngine(), FakeEngine()
    with away, other, adopting(away, other, health_timeout_s=SILENT_S) as fleet:
        publish(fleet, 1)
        fleet.release()
        away.deaf.set()
        wait_until(lambda: len(fleet.serving()) == 1)
        publish(fleet, 2)
        assert [engine.url for engine in fleet.serving()] == [other.url]
        away.deaf.clear()
        wait_until(lambda: fleet.engines()[0].pulse.healthy)
        assert fleet.engines()[0].state == "stale"
        away.calls.clear()
        greedy(fleet, PROMPTS, 2)
        assert not away.calls  # no traffic before the next publication
        publish(fleet, 3)
        assert len(fleet.serving()) == 2
        assert away.calls[0][0] == "/resume_memory_occupation"
        assert [path for path, _ in other.calls if "memory" in path] == [
            *("/release_memory_occupation", "/resume_memory_occupation")
        ]


def test_what_an_engine_does_too_late_changes_nothing():
    late, threads, going = EngineRecord("late"), [], threading.Event()

    def act(engine: EngineRecord) -> None:
        threads.append(threading.current_thread())
        going.wait(PATIENCE_S)
        raise KeyError("too late")

    results, errors = in_parallel(act, [late], 0.01)
    wait_until(lambda: threads)
    going.set()
    threads[0].join()
    assert results == {} and "was not done within" in str(errors[late])
    with pytest.raises(ZeroDivisionError):  # a mistake of ours is no engine's failure
        in_parallel(lambda one: 1 / 0, [late], PATIENCE_S)
