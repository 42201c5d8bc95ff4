import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.fleet import fleet as fleet_module
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.collect import Interrupted, collect, greedy
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.types import Prompt
from tests.support.engine_models import published_tensors, random_tensors, write_model
from tests.support.publishing import publish_tensors
from tests.support.waiting import NEVER_S, PATIENCE_S

CONFIG = RolloutConfig(
    engines=2, engine_threads=1, engine_memory_gb=0.01, samples_per_prompt=3, max_new_tokens=8
)
PROMPTS = [Prompt(i, (5 + i, 6, 7 + i), "", "") for i in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Without an end-of-sequence token every response runs to its limit, so a stop finds work.
    path = tmp_path_factory.mktemp("model")
    return write_model(path, max_position_embeddings=8192, eos_token_id=None)


@pytest.fixture(scope="module")
def fleet(folder, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    with Fleet(
        CONFIG, folder, scheme="int8", vocabulary=96, dtype="float32", log_dir=logs
    ) as started:
        yield started


def clients_of(fleet: Fleet) -> list:
    return [engine.api for engine in fleet.engines()]


def test_a_version_that_is_not_whole_leaves_engines_paused_until_a_whole_one_comes(fleet, folder):
    whole = published_tensors(random_tensors(folder, seed=4), "int8")
    lacking = {name: value for name, value in whole.items() if name != "model.norm.weight"}
    with pytest.raises(EngineError, match="committing version 9 failed on 2 engines") as error:
        publish_tensors(fleet, 9, lacking)
    assert str(error.value).count("the update is incomplete: model.norm.weight (none of it") == 2
    assert all(client.url in str(error.value) for client in clients_of(fleet))
    named = [fleet.names.updating(9)] * 2
    assert [client.weight_version() for client in clients_of(fleet)] == named
    assert all(client.server_info()["is_paused"] for client in clients_of(fleet))
    assert fleet.serving() == []
    publish_tensors(fleet, 10, whole)
    assert not any(client.server_info()["is_paused"] for client in clients_of(fleet))
    assert [engine.version for engine in fleet.serving()] == [10, 10]


def test_every_run_has_a_key_of_its_own_that_nobody_sees(fleet):
    key = fleet.run_key
    assert len(key) >= 32
    for engine in fleet.engines():
        pid = engine.process.popen.pid
        assert key not in Path(f"/proc/{pid}/cmdline").read_text()
        assert key not in engine.process.log.read_text()
        assert key not in repr(vars(engine)) + repr(vars(engine.process))
        refused = httpx.get(f"{engine.url}/server_info", trust_env=False)
        assert refused.status_code == 401
        assert httpx.get(f"{engine.url}/health", trust_env=False).status_code == 200
    assert engine.client.server_info()["scheme"] == "int8"


def test_collect_repeats_bit_for_bit_and_keeps_the_order(fleet):
    runs = [collect(fleet, PROMPTS, CONFIG, seed=1, step=2) for _ in range(2)]
    assert runs[0] == runs[1]
    assert [s.prompt.index for s in runs[0]] == [i for i in range(5) for _ in range(3)]
    assert collect(fleet, PROMPTS, CONFIG, seed=1, step=3) != runs[0]
    # Seeds belong to the prompt's index: half of the prompts give the same responses.
    part = collect(fleet, PROMPTS[::2], CONFIG, seed=1, step=2)
    kept = [s.response_ids.tolist() for s in runs[0] if s.prompt.index % 2 == 0]
    assert [s.response_ids.tolist() for s in part] == kept


def test_a_stop_aborts_the_requests_and_raises(fleet):
    config = RolloutConfig(samples_per_prompt=1, max_new_tokens=8000)
    calls = []

    def stop() -> bool:
        calls.append(time.monotonic())
        return len(calls) > 1

    start = time.monotonic()
    with pytest.raises(Interrupted):
        collect(fleet, PROMPTS, config, seed=0, step=0, stop=stop)
    assert time.monotonic() - start < PATIENCE_S
    for client in clients_of(fleet):
        info = client.server_info()
        assert (info["num_running_reqs"], info["num_waiting_reqs"]) == (0, 0)


def test_an_engine_that_cannot_start_is_an_error_with_the_end_of_its_log(folder, tmp_path):
    dies = [sys.executable, "-c", "import sys; print('no such weights'); sys.exit(3)"]
    with (
        pytest.raises(EngineError, match=r"(?s)engine-\d exited with status 3.*no such weights"),
        Fleet(CONFIG, folder, scheme="int8", vocabulary=96, log_dir=tmp_path, serve_command=dies),
    ):
        pass


def test_an_engine_that_never_answers_is_an_error_and_is_not_left_behind(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(fleet_module, "GRACE_S", NEVER_S)  # SIGTERM is enough to end it
    sleeps = ["sh", "-c", "echo loading; exec sleep 600"]
    skipped_s = 0

    def clock() -> float:
        """Real time until both have said something; a minute more with every look after that."""
        nonlocal skipped_s
        logs = [log.read_text() for log in tmp_path.glob("*.log")]
        if len(logs) == 2 and all(logs):
            skipped_s += 60
        return time.monotonic() + skipped_s

    config = replace(CONFIG, start_timeout_s=1000)
    options = {"scheme": "int8", "vocabulary": 96, "log_dir": tmp_path, "clock": clock}
    fleet = Fleet(config, folder, serve_command=sleeps, **options)
    start = time.monotonic()
    with pytest.raises(
        EngineError,
        match=r"engine-[01] did not start: waited \d+ s for it to report its port, and its log "
        r"has not grown for \d+ s; the limit is 1000 s without a new line in its log, and 4000 s "
        r"in total \(rollout.start_timeout_s\); see .*engine-[01].log, whose last line is: loading",
    ):
        fleet.__enter__()
    assert fleet.engines() == []
    assert time.monotonic() - start < PATIENCE_S


def test_engines_leave_cleanly_when_asked_and_when_their_parent_is_gone(folder, tmp_path):
    config = replace(CONFIG, max_restarts=0)
    with Fleet(
        config, folder, scheme="int8", vocabulary=96, dtype="float32", log_dir=tmp_path
    ) as fleet:
        asked, orphaned = (engine.process.popen for engine in fleet.engines())
        asked.send_signal(signal.SIGTERM)
        orphaned.stdin.close()
        assert (asked.wait(PATIENCE_S), orphaned.wait(PATIENCE_S)) == (0, 0)
        with pytest.raises(EngineError, match="engine-0 .*exited with status 0"):
            greedy(fleet, PROMPTS, 2)
