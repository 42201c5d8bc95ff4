"""``qurl train`` on two nodes with the engine on a third, as torchrun and as srun start it.

The nodes call themselves 127.0.1.1, Slurm's own commands are absent, and when the run is resumed,
the second node sees the run's folder as it was before the last checkpoint.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.nodes.runs import KEY, LIMIT_S, Elastic, on_each, start
from tests.support.runs import QURL

STALE_S = 5.0
TWELVE = ("train.steps=12", "rollout.engines=1")
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def engine(nodes, recipe) -> str:
    """The URL of an engine on the third node."""
    node, log = nodes[2], recipe.parent / "engine.log"
    ready = recipe.parent / "port"
    serve = [*QURL, "serve", recipe.parent / "model", "--host", "0.0.0.0", "--port", "30000"]
    serve += ["--dtype", "float32", "--threads", "1", "--port-file", ready]
    with log.open("w") as file:
        process = start(node, serve, {}, file)
    deadline = time.monotonic() + LIMIT_S
    while not ready.exists():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return "http://train3:30000"


def train(recipe: Path, engine: str, steps: int) -> list[str]:
    """Arguments of ``qurl`` for a run whose folders all nodes share."""
    shared = recipe.parent
    return [
        *("train", str(recipe), f"train.run_dir={shared / 'run'}", f"train.steps={steps}"),
        *(f"rollout.urls=['{engine}']", "parallel.tensor=2", f"sync.dir={shared}"),
        *("rollout.samples_per_prompt=4", "data.prompts_per_step=4", "train.micro_batch=8"),
    ]


def steps(recipe: Path) -> list[int]:
    lines = (recipe.parent / "run/metrics.jsonl").read_text().splitlines()
    return sorted({json.loads(line)["step"] for line in lines})


@pytest.fixture(scope="module")
def two_steps(nodes, recipe, engine) -> str:
    """What a first run under torchrun prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--master-addr=train1", "--master-port=29500"]
    commands = [
        [*torchrun, f"--node-rank={rank}", "-m", "qurl_megatron.cli", *train(recipe, engine, 2)]
        for rank in (0, 1)
    ]
    return on_each(nodes[:2], commands, [{}, {}], recipe.parent)


def test_under_torchrun_two_nodes_train_with_an_engine_on_a_third(nodes, recipe, engine, two_steps):
    assert steps(recipe)[-2:] == [1, 2]
    ask = f"import httpx; print(httpx.get('{engine}/server_info', headers={HEADERS}).text)"
    answer = subprocess.run(
        nodes[0].command(sys.executable, "-c", ask), capture_output=True, text=True, check=True
    )
    assert json.loads(answer.stdout)["weight_version"].startswith("2@")


def test_under_srun_they_resume_where_rank_0_says_though_one_sees_old_folders(
    nodes, recipe, engine, two_steps
):
    """The second node finds the checkpoints of a while ago, which were none."""
    old = recipe.parent / "as-it-was"
    old.mkdir()
    checkpoints = recipe.parent / "run/checkpoints"
    nodes[1].do("mount", "--bind", old, checkpoints)
    written = recipe.parent / "run/.lock"  # by rank 0, once the ranks have met
    before, seen_again = written.stat().st_mtime, []

    def see_again() -> None:
        met = written.stat().st_mtime
        if not seen_again and before < met < time.time() - STALE_S:
            nodes[1].do("umount", "-l", checkpoints)
            seen_again.append(steps(recipe)[-1])

    slurm = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "train[1-2]",
        "SLURM_JOB_ID": "77",
        "SLURM_LOCALID": "0",
    }
    environments = [{**slurm, "SLURM_PROCID": str(rank)} for rank in (0, 1)]
    command = [*QURL, *train(recipe, engine, 3)]
    told = on_each(nodes[:2], [command, command], environments, recipe.parent, meanwhile=see_again)
    assert "after step 2" in told
    assert seen_again == [2]  # nobody went on meanwhile
    assert steps(recipe)[-1] == 3


def test_torchrun_restarts_a_run_after_a_killed_rank_and_after_a_node_that_was_lost(nodes, recipe):
    run = Elastic(nodes[:2], recipe, "elastic", *TWELVE, restarts=3)
    run.start(0)
    run.start(1)
    run.wait_for_step(2)
    os.kill(run.rank(1), signal.SIGKILL)
    run.wait_for_step(run.saved() + 2)
    run.crash(1)
    run.come_back(1)
    assert run.codes() == [0, 0], run.output()
    assert run.saved() == 12
    records = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(record)["step"] for record in records] == [*range(1, 13)]


def test_torchrun_with_one_store_for_all_attempts_is_refused(nodes, recipe):
    run = Elastic(nodes[:2], recipe, "refused", *TWELVE, restarts=1)
    run.start(0, {})
    run.start(1, {})
    assert 0 not in run.codes()
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in run.output()
