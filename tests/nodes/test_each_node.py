"""Runs with engines on each of the trainer's nodes, beside the same layout on one machine."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.harness import read
from benchmarks.network import Node
from tests.nodes.runs import LIMIT_S, ROOT, Elastic, on_each
from tests.sglang.engines import PYTHON as SGLANG
from tests.support.runs import metrics

ONE_EACH = ("parallel.tensor=2", "rollout.each_node=true", "rollout.engines=2")


def run(nodes: list[Node], recipe: Path, name: str, ranks: int, *options: str) -> dict:
    """Two steps of ``ranks`` ranks by torchrun; what they measure."""
    run_dir = recipe.parent / name
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}"]
    torchrun += [f"--nproc-per-node={ranks // len(nodes)}", "--master-addr=train1"]
    train = ["-m", "qurl_megatron.cli", "train", recipe, f"train.run_dir={run_dir}"]
    train += ["rollout.each_node=true", "train.steps=2", *options]
    commands = [[*torchrun, f"--node-rank={number}", *train] for number, _ in enumerate(nodes)]
    on_each(nodes, commands, [{} for _ in nodes], recipe.parent)
    assert {log.parent.name for log in run_dir.glob("logs/*/engine-0.log")} == {
        node.name for node in nodes
    }
    assert not [*run_dir.glob("engines/*.json")]  # all have left
    return metrics(run_dir)


def assert_equal_but_for_sizes(apart: dict, together: dict, nodes: int) -> None:
    for sizes in (*apart.values(), *together.values()):
        assert sizes.pop("sync/buffer_mb") > 0
    for step in apart:  # put on each machine
        assert apart[step].pop("sync/bytes") == nodes * together[step].pop("sync/bytes")
    assert [*apart] == [1, 2] and apart == together


LAYOUTS = {
    "TP2": (2, 2, ["parallel.tensor=2", "rollout.engines=2"]),
    "TP2 PP2": (2, 4, ["parallel.tensor=2", "parallel.pipeline=2", "rollout.engines=4"]),
    "PP3": (3, 3, ["parallel.pipeline=3", "rollout.engines=3"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_of_each_node_serve_what_those_of_one_machine_do(layout, nodes, recipe):
    count, ranks, options = LAYOUTS[layout]
    apart = run(nodes[:count], recipe, f"{layout} apart", ranks, *options)
    together = run(nodes[:1], recipe, f"{layout} together", ranks, *options)
    assert_equal_but_for_sizes(apart, together, count)


@pytest.mark.skipif(not SGLANG.is_file(), reason="`make sglang` installs SGLang")
@pytest.mark.parametrize("tensor", [1, 2])
def test_engines_of_sglang_lend_their_memory_on_two_nodes(tensor, nodes, recipe):
    name = f"sglang of {tensor}"
    options = [f"rollout.sglang_python={SGLANG}", "rollout.backend=sglang", "rollout.engines=2"]
    options += ["rollout.colocate=true", f"rollout.engine_tensor={tensor}", "parallel.tensor=2"]
    for step in run(nodes[:2], recipe, name, 2, *options).values():  # SGLang draws by no seed here
        assert step["fleet/serving"] == 2 and step["rollout/kl_k3"] < 1e-5
    logs = [*(recipe.parent / name).glob("logs/*/engine-0.log")]
    asked = [re.findall(r"/(\w+)_memory_occupation HTTP/1.1. 200", log.read_text()) for log in logs]
    assert asked == [["release", "resume"] * 2] * 2


def test_a_run_whose_rank_was_killed_goes_on_as_if_nothing_had_been(nodes, recipe):
    whole = Elastic(nodes[:2], recipe, "whole", *ONE_EACH, "train.steps=6", restarts=0)
    killed = Elastic(nodes[:2], recipe, "killed", *ONE_EACH, "train.steps=6", restarts=1)
    for each in (whole, killed):
        each.start(0)
        each.start(1)
        if each is killed:
            each.wait_for_step(2)
            os.kill(each.rank(1), signal.SIGKILL)
        assert each.codes() == [0, 0], each.output()
    assert metrics(killed.run_dir) == metrics(whole.run_dir)


def test_an_engine_that_is_killed_on_the_second_node_is_started_again_there(nodes, recipe):
    endless = (*ONE_EACH, "train.steps=2000")
    run = Elastic(nodes[:2], recipe, "engine-killed", *endless, restarts=0)
    run.start(0)
    run.start(1)
    run.wait_for_step(2)
    (engine,) = run.engines(1)
    engine.kill()

    def serving() -> list[float]:
        return [step["fleet/serving"] for step in metrics(run.run_dir).values()]

    deadline = time.monotonic() + LIMIT_S
    while not re.search("1.*2", "".join(f"{count:.0f}" for count in serving())):
        assert time.monotonic() < deadline, run.output()
        time.sleep(0.5)
    assert run.engines(1) not in ([], [engine])
    run.kill(1)
    run.kill(0)
    assert "qurl: engine-0 exited with status -9" in run.output()


def test_a_byte_of_a_version_comes_to_a_node_once_as_the_plan_has_it(nodes, tmp_path):
    command = [sys.executable, "-m", "benchmarks.publish_nodes", "--model", "h1024", "--repeats=1"]
    subprocess.run([*command, "--out", tmp_path], cwd=ROOT, check=True)
    relay = read(tmp_path / "publish_nodes.json").cases[0]
    figures = {figure.name: figure.median for figure in relay.figures}
    assert figures["came to a node"] == pytest.approx(relay.notes["half_mb"], rel=0.02)
