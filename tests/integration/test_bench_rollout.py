"""``qurl bench rollout`` against real engines: those it starts, and one that is there already."""

import argparse
import os
import signal
import subprocess
import sys
import time

import pytest

from qurl_megatron.bench import rollout
from qurl_megatron.bench.options import BENCHMARKS, add_options
from qurl_megatron.bench.record import read
from qurl_megatron.bench.rollout_engines import Version, engine_config, model_folder, started
from qurl_megatron.fleet.client import EngineError
from tests.support.waiting import PATIENCE_S

QURL = [sys.executable, "-m", "qurl_megatron.cli"]
LOAD = ["--model", "tiny", "--prompts", "3", "--samples", "2", "--mean", "24", "--max", "60"]
NOISE = {"another load", "client-bound"}  # of a machine that has other work to do


def test_an_engine_that_it_starts_is_published_to_in_the_middle_of_its_load(tmp_path):
    # Some 50 times as long as a publication, so that the first ones are over before the load ends
    # even on a machine with other work; the last one may still come too late for a token.
    long = ["--mean", "600", "--max", "2400"]
    words = [*long, "--schemes", "int8", "--repeats", "2", "--publish-every", "600tokens"]
    command = [*QURL, "bench", "rollout", *LOAD, *words, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    (case,) = read(tmp_path / "rollout.json").cases
    assert set(case.reasons) <= NOISE
    assert case.keys["tokens"] == 6 * 600
    assert case.figure("paused to publish").median > 0
    assert case.figure("preemptions").median == 0  # a publication's are not counted
    assert len(case.figure("tokens/s").repeats) == 2
    assert case.figure("tokens/s").share < 1
    assert case.notes["identity"]["scheme"] == "int8"


def test_an_engine_that_died_and_that_the_fleet_has_given_up_is_told_as_gone(tmp_path):
    folder = model_folder("tiny", tmp_path)
    version = Version(folder, "none", "bfloat16", tmp_path / "versions")
    config = engine_config("embedded", tensor=1, threads=1, timeout_s=60.0, cache_gb=0.1)
    logs = tmp_path / "logs"
    with started(config, folder, version, logs) as target:
        before = target.identity()
        os.kill(before["process"], signal.SIGKILL)
        with pytest.raises(EngineError, match=f"see {logs}/engine-0.log"):
            target.publish()
        told, deadline = "", time.monotonic() + PATIENCE_S
        while "has left" not in told and time.monotonic() < deadline:  # the fleet starts another
            told = rollout.changed_since(before, target)
            assert told.startswith("it does not answer any more: ")
            time.sleep(0.05)
        assert "has left" in told


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    model, port = model_folder("tiny", folder), folder / "port"
    command = [*QURL, "serve", str(model), "--port-file", str(port), "--exit-with-stdin"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as engine:
        while not port.exists():
            assert engine.poll() is None
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port.read_text().strip()}"
        engine.stdin.close()


def test_an_engine_that_is_there_is_driven_and_its_answers_come_whole(url):
    parser = argparse.ArgumentParser()
    add_options(parser, BENCHMARKS["rollout"])
    words = ["--engine", url, "--schemes", "bf16", "--repeats", "1"]
    (case,) = rollout.run(parser.parse_args([*LOAD, *words, "--clients", "concurrency:3"]))
    assert set(case.reasons) <= NOISE
    assert case.keys["engine"] == url and case.keys["clients"] == "concurrency:3"
    assert case.figure("tokens/s").median > 0
    assert not [figure.name for figure in case.figures if "token, p" in figure.name]
