"""Fault drills: two real SGLang engines, started and healed by a fleet, and a trainer that fails.

Every fault comes from outside: a signal, a changed file, a blob that one engine is not told of.
After each, a whole publication makes both engines answer as that version does.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from qurl_megatron.config.sections import RolloutConfig, SyncConfig
from qurl_megatron.engines.starting import API_KEY
from qurl_megatron.fleet.client import EngineClient, EngineError
from qurl_megatron.fleet.collect import collect
from qurl_megatron.fleet.fleet import EngineRecord, Fleet
from qurl_megatron.types import Prompt
from qurl_megatron.wire.group import GroupSender
from qurl_megatron.wire.lease import Names
from qurl_megatron.wire.shared_memory import MemorySender
from qurl_megatron.wire.store import host_store
from qurl_megatron.wire.transport import Sender
from tests.sglang.engines import PYTHON, START_S, Case, answers, checkpoints, difference, running
from tests.sglang.trainer import OWNER, file_senders, publish
from tests.support.generating import generate
from tests.support.runs import Run, make_recipe
from tests.support.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
UPDATE_S = 20.0  # an update takes a second on a quiet machine
# Its embedding is more than sockets hold by themselves: a transfer of it can be interrupted.
CASE = Case("qwen2", "int8", changes={"vocab_size": 65536})
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


class Drill:
    """A fleet, two versions of a model, and what engines answer under each."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet, self.folder = fleet, folder
        self.versions = checkpoints(CASE, folder, ["first", "second"])
        self.number = 0
        self.files = file_senders(folder / "sync")

    def start(self) -> None:
        self.expected = []
        for which in (0, 1):
            self.publish(which)
            self.expected.append(answers(self.fleet.serving()[0].client))
        assert difference(*self.expected) > 0.01
        self.fleet.drain()

    def publish(self, which: int, senders: list[Sender] | None = None, **faults) -> None:
        """Bring the engines to one of the two sets of weights, under the next number."""
        self.number += 1
        tensors = self.versions[which].tensors
        publish(self.fleet, tensors, self.number, senders or self.files, **faults)

    def correct(self, engine: EngineRecord, which: int) -> bool:
        """It serves the newest number, and answers as these weights do."""
        named = engine.client.weight_version() == self.fleet.names.of(self.number)
        named &= engine.version == self.number
        return named and self.answers(engine, which)

    def answers(self, engine: EngineRecord, which: int) -> bool:
        """It answers as these weights do, to the bit."""
        # A request that `mixed` gave up waits in the paused engine and may share the first batch.
        return any(difference(answers(engine.client), self.expected[which]) == 0 for _ in range(3))

    def mixed(self, engine: EngineRecord, names: Names | None = None) -> bool:
        """It calls its weights "updating-...", and answers nothing.

        Args:
            names: of the run that was updating it; None: the fleet's own.
        """
        try:
            patience = EngineClient(engine.url, timeout_s=2.0, api_key=self.fleet.run_key)
            generate(patience, [[1, 2, 3]], {"max_new_tokens": 1})
        except EngineError as error:
            assert "did not answer within" in str(error)
            names = names or self.fleet.names
            return engine.client.weight_version() == names.updating(self.number)
        return False

    def events(self) -> list[tuple[str, str]]:
        return [(event["engine"], event["event"]) for event in self.fleet.drain()[0]]


@pytest.fixture(scope="module")
def drill(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drills")
    config = RolloutConfig(
        backend="sglang",
        engines=2,
        engine_threads=1,
        sglang_python=str(PYTHON),
        start_timeout_s=START_S,
        update_timeout_s=UPDATE_S,
        health_every_s=1.0,
        health_timeout_s=UPDATE_S,
        max_restarts=20,
        samples_per_prompt=1,
        max_new_tokens=200,
    )
    fleet = Fleet(
        config,
        folder / "base",
        scheme="int8",
        dtype="float32",
        log_dir=folder / "logs",
        vocabulary=CASE.changes["vocab_size"],
    )
    drill = Drill(fleet, folder)
    with fleet:
        drill.start()
        yield drill


@pytest.fixture(autouse=True)
def mended(request):
    """After each drill both engines can be brought back, and then answer alike and rightly."""
    yield
    if "drill" not in request.fixturenames:
        return
    drill = request.getfixturevalue("drill")
    wait_until(lambda: len(drill.fleet.recruits()) == 2, START_S)
    drill.publish(0)
    first, second = drill.fleet.serving()
    assert drill.correct(first, 0) and drill.correct(second, 0)
    drill.fleet.drain()


def at(bucket: int, act):
    """Run ``act`` when the buckets before this one are loaded."""
    return lambda index, blobs: act() if index == bucket else None


def rejoins(drill: Drill, engine: EngineRecord, other: EngineRecord) -> None:
    """It is started again, gets no traffic, and comes back with the next version alone."""
    process = engine.process.popen.pid
    assert drill.fleet.serving() == [other] and drill.correct(other, 1)
    wait_until(lambda: engine.state == "ready", START_S)
    assert engine.process.popen.pid != process
    assert drill.fleet.serving() == [other]
    drill.publish(0)
    assert drill.fleet.serving() == drill.fleet.engines()
    assert drill.correct(engine, 0) and drill.correct(other, 0)


# First: the module's engines do not run yet.
@pytest.mark.slice
def test_a_run_that_loses_an_engine_loses_no_sample_and_has_it_back_some_steps_later(tmp_path):
    options = ["rollout.backend=sglang", f"rollout.sglang_python={PYTHON}"]
    run = Run(make_recipe(tmp_path), "run", *options)
    with run.process():
        run.wait(lambda: run.step() >= 2)
        run.kill(0)
        run.wait(lambda: run.happened("engine-0 joined") == 2)
        back = run.step()
        run.wait(lambda: run.step() >= back + 2)
        run.popen.send_signal(signal.SIGTERM)
        assert run.ended() == 128 + signal.SIGTERM, run.stderr()
        assert not run.left()
    (saved,) = run.saved()
    assert saved == run.step()
    run.assert_whole(saved)
    report = (run.dir / "report.html").read_text()
    for event in ("died", "restarted", "joined serves version"):
        assert f"engine-0 {event}" in report, event


@pytest.mark.thorough
def test_a_run_that_is_killed_takes_its_engines_along_though_one_is_stopped(tmp_path):
    options = ["rollout.backend=sglang", f"rollout.sglang_python={PYTHON}"]
    run = Run(make_recipe(tmp_path), "run", *options)
    with run.process() as launcher:
        run.wait(lambda: run.step() >= 1)
        assert len(run.processes()) > 6
        os.kill(run.engine(0), signal.SIGSTOP)
        launcher.kill()
        launcher.wait()
        assert run.left() == []


@pytest.mark.slice
def test_an_engine_killed_between_two_buckets_leaves_and_comes_back_with_the_next_version(drill):
    killed, other = drill.fleet.serving()
    pid = killed.process.popen.pid
    drill.publish(1, during=at(1, lambda: os.killpg(pid, signal.SIGKILL)))
    assert killed.state != "serving" and "exited with status -9" in killed.reason
    rejoins(drill, killed, other)
    own = [event for name, event in drill.events() if name == killed.name]
    assert own == ["failed", "died", "restarted", "joined"]


def test_an_engine_that_hangs_in_an_update_is_found_by_its_deadline_and_started_anew(drill):
    other, hung = drill.fleet.serving()
    pid = hung.process.popen.pid
    begun = time.monotonic()
    drill.publish(1, during=at(1, lambda: os.killpg(pid, signal.SIGSTOP)))
    assert UPDATE_S <= time.monotonic() - begun < UPDATE_S + PATIENCE_S
    assert "did not answer within" in hung.reason or "was not done within" in hung.reason
    rejoins(drill, hung, other)


def test_an_engine_that_stops_taking_bytes_does_not_keep_the_group_from_the_other(drill):
    """It is stopped when the training rank begins to send the last bucket, larger than what sockets
    hold: the rest of that has nowhere to go."""
    hung, other = drill.fleet.serving()
    pid = hung.process.popen.pid
    store = host_store("127.0.0.1", 60)
    sender = GroupSender(store, 0, 1, timeout_s=4.0)
    drill.publish(0, [sender])
    drill.publish(1, [sender])
    links = [link.id.rpartition("/")[2] for link in sender._links.values()]
    assert links == ["1", "1"]  # a link to each engine, kept for the second version
    begun = time.monotonic()
    drill.publish(1, [sender], during=at(2, lambda: os.killpg(pid, signal.SIGSTOP)))
    sender.close()
    assert time.monotonic() - begun < UPDATE_S + PATIENCE_S
    (failed,) = [event for event in drill.fleet.drain()[0] if event["event"] == "failed"]
    assert "did not take a bucket from training rank 0 within 4 s" in failed["message"]
    rejoins(drill, hung, other)


def damage(path: str | Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def the_piece(blobs):
    """Where one weight's bytes are."""
    found = [(blob, piece) for blob in blobs for piece in blob.pieces if piece.name == O_PROJ]
    return found[0] if found else (None, None)


def test_an_engine_that_reads_a_damaged_file_names_the_tensor_and_stays_out(drill):
    victim, other = drill.fleet.serving()

    def sees(engine, index, blobs):
        blob, piece = the_piece(blobs)
        if engine is not victim or blob is None:
            return blobs
        # As a network filesystem may show one machine what no other sees.
        copy = drill.folder / "damaged"
        shutil.copy(blob.where["path"], copy)
        damage(copy, piece.offset)
        where = {**blob.where, "path": str(copy)}
        return [msgspec.structs.replace(b, where=where) if b is blob else b for b in blobs]

    drill.publish(1, sees=sees)
    assert drill.fleet.serving() == [other] and drill.correct(other, 1)
    assert re.search(f"rejects version {drill.number}: .*{O_PROJ}.* is damaged", victim.reason)
    assert drill.mixed(victim)


def test_a_slot_of_memory_that_is_damaged_stops_the_version_everywhere(drill):
    senders = [MemorySender(f"drill-{os.getpid()}", rank, leads=rank == 0) for rank in range(2)]
    hit = []

    def during(index, blobs):
        blob, piece = the_piece(blobs)
        if blob is not None:
            damage(blob.where["slot"], piece.offset)
            hit.append(index)

    with pytest.raises(EngineError) as caught:
        drill.publish(1, senders, during=during)
    assert len(hit) == 1
    for engine in drill.fleet.engines():
        assert re.search(f"{engine.url} rejects version .*{O_PROJ}.* is damaged", str(caught.value))
        assert engine.state == "stale" and drill.mixed(engine)
    drill.publish(1, senders)
    assert all(drill.correct(engine, 1) for engine in drill.fleet.serving())
    assert len(drill.fleet.serving()) == 2
    for sender in senders:
        sender.close()


def test_an_engine_that_lacks_a_shard_names_tensors_and_stays_out(drill):
    other, victim = drill.fleet.serving()

    def sees(engine, index, blobs):
        return blobs[:1] if engine is victim and index == 1 else blobs

    drill.publish(1, sees=sees)
    assert drill.fleet.serving() == [other] and drill.correct(other, 1)
    assert "the update is incomplete" in victim.reason
    assert "(a part only of it arrived)" in victim.reason
    assert re.search(r"model\.\S+\.weight", victim.reason)
    assert drill.mixed(victim)


def run_trainer(order: dict, key: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", API_KEY: key}
    command = [sys.executable, "-m", "tests.sglang.trainer", json.dumps(order)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def test_a_trainer_killed_in_an_update_leaves_engines_silent_until_the_next_one_publishes(
    drill, tmp_path
):
    drill.number += 1
    order = {
        "model": str(drill.folder / "base"),
        "folder": str(tmp_path),
        "checkpoint": str(drill.versions[1].folder),
        "urls": [engine.url for engine in drill.fleet.engines()],
        "version": drill.number,
    }
    died = run_trainer(order | {"dies": True}, drill.fleet.run_key)
    assert died.returncode == -signal.SIGKILL, died.stderr
    names = Names(OWNER.token)
    for engine in drill.fleet.engines():
        assert drill.mixed(engine, names)

    again = run_trainer(order | {"dies": False}, drill.fleet.run_key)
    assert again.returncode == 0, again.stderr
    for engine in drill.fleet.engines():
        assert engine.client.weight_version() == names.of(drill.number)
        assert drill.answers(engine, 1)


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_32_answers_that_an_update_interrupts_are_old_then_new_and_never_in_between(drill, pause):
    old, new = drill.number, drill.number + 1
    prompts = [Prompt(i, (5 + i, 9, 11), "", "") for i in range(32)]
    samples = []

    def ask() -> None:
        samples.extend(collect(drill.fleet, prompts, drill.fleet.config, seed=0, step=new))

    drill.fleet.drain()
    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: sum(engine.in_flight for engine in drill.fleet.serving()) == 32)
    wait_until(lambda: all(running(engine.client) for engine in drill.fleet.serving()))
    for engine in drill.fleet.serving():  # what ran before this has tokens when it ends
        generate(engine.client, [[1, 2, 3]], {"max_new_tokens": 8, "ignore_eos": True})
    drill.publish(1, config=SyncConfig(pause=pause))
    asking.join()
    assert [sample.prompt.index for sample in samples] == list(range(32))
    kinds = set()
    for sample in samples:
        cut = sample.token_versions.count(old)
        assert sample.token_versions == [old] * cut + [new] * (len(sample.response_ids) - cut)
        assert len(sample.response_ids) == 200
        kinds.add((cut > 0, cut < 200))
    assert (True, True) in kinds
    # None came back with a version in between, was refused and made again.
    assert drill.events() == []
