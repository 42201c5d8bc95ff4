"""``qurl train`` on two nodes with the engine on a third, as torchrun and as srun start it.

The nodes call themselves 127.0.1.1, Slurm's own commands are absent, and when the run is resumed,
the second node sees the run's folder as it was before the last checkpoint.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from qurl_megatron.config import load
from qurl_megatron.training.state import latest
from qurl_megatron.training.warmstart import warmstart
from tests.nodes.network import CannotMake, Node, network
from tests.support.runs import RECIPE, metrics

ROOT = Path(__file__).parents[2]
QURL = [sys.executable, "-m", "qurl_megatron.cli"]
LIMIT_S = 300
STALE_S = 5.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    try:
        with network(tmp_path_factory.mktemp("network"), "train1", "train2", "rollout") as made:
            yield made
    except CannotMake as error:
        pytest.skip(f"no network namespaces can be made here ({error}); they need root on Linux")


KEY = "of-all-three-nodes"
OURS = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "QURL_API_KEY": KEY}
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("run")
    path = root / "recipe.toml"
    path.write_text(RECIPE.format(root=root))
    config = load(path, ["warmstart.steps=2"])
    warmstart(root / "model", config.data, config.warmstart, log=lambda line: None)
    return path


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
    return "http://rollout:30000"


def start(node: Node, command: list, environment: dict[str, str], log) -> subprocess.Popen:
    # As a fresh login has it: what a launcher sets is the test's to say.
    strange = ("SLURM_", "TORCHELASTIC_", "MASTER_", "GLOO_", "NCCL_")
    plain = {k: v for k, v in os.environ.items() if not k.startswith(strange)}
    return subprocess.Popen(
        node.command(*command, cwd=ROOT),
        env={**plain, **OURS, **environment},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def on_each(
    nodes: list[Node],
    commands: list,
    environments: list[dict],
    folder: Path,
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> str:
    """Run a command on each node; what they print, once all have ended well."""
    logs = [folder / f"{node.name}.log" for node in nodes]
    started = []
    for node, command, environment, log in zip(nodes, commands, environments, logs, strict=True):
        with log.open("w") as file:
            started.append(start(node, command, environment, file))
    deadline = time.monotonic() + LIMIT_S
    while any(process.poll() is None for process in started):
        told = "\n".join(log.read_text() for log in logs)
        assert time.monotonic() < deadline, told
        assert not any(process.poll() for process in started), told
        meanwhile()
        time.sleep(0.2)
    told = "\n".join(log.read_text() for log in logs)
    assert not any(process.returncode for process in started), told
    return told


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


def test_engines_of_each_node_serve_what_those_of_one_machine_do(nodes, recipe):
    """Two steps of TP2, and an engine for each rank: by torchrun on two nodes, then on one."""

    def run(name: str, where: list[Node]) -> dict[int, dict[str, float]]:
        run_dir = recipe.parent / name
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(where)}"]
        torchrun += [f"--nproc-per-node={2 // len(where)}", "--master-addr=train1"]
        options = [f"train.run_dir={run_dir}", "rollout.each_node=true", "rollout.engines=2"]
        options += ["parallel.tensor=2", "train.steps=2"]
        train = ["-m", "qurl_megatron.cli", "train", recipe, *options]
        commands = [[*torchrun, f"--node-rank={rank}", *train] for rank, _ in enumerate(where)]
        on_each(where, commands, [{} for _ in where], recipe.parent)
        assert {log.parent.name for log in run_dir.glob("logs/*/engine-0.log")} == {
            node.name for node in where
        }
        assert not [*run_dir.glob("engines/*.json")]  # all have left
        return metrics(run_dir)

    two, one = run("two-nodes", nodes[:2]), run("one-node", nodes[:1])
    for sizes in (*two.values(), *one.values()):
        assert sizes.pop("sync/buffer_mb") > 0
    for step in two:  # put on two machines instead of one
        assert two[step].pop("sync/bytes") == 2 * one[step].pop("sync/bytes")
    assert [*two] == [1, 2] and two == one


class Elastic:
    """torchrun with restarts on two nodes, for one run of 12 steps."""

    def __init__(self, nodes: list[Node], recipe: Path, name: str, restarts: int) -> None:
        self.run_dir = recipe.parent / name
        self._nodes, self._agents = nodes, {}
        torchrun = ["--nnodes=2", "--nproc-per-node=1", f"--max-restarts={restarts}"]
        torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=train1:29501", f"--rdzv-id={name}"]
        train = ["train", recipe, f"train.run_dir={self.run_dir}", "parallel.tensor=2"]
        train += ["checkpoint.every=2", "train.steps=12", "train.eval_prompts=0"]
        train += ["rollout.engines=1"]
        self._command = [sys.executable, "-m", "torch.distributed.run", *torchrun]
        self._command += ["-m", "qurl_megatron.cli", *train]

    def start(self, number: int, environment: dict[str, str] | None = None) -> None:
        if environment is None:
            environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self._log(number).open("a") as log:
            agent = start(self._nodes[number], self._command, environment, log)
        self._agents[number] = agent

    def rank(self, number: int) -> int:
        """The process of a node's rank; torchrun has no other child."""
        (rank,) = psutil.Process(self._agents[number].pid).children()
        return rank.pid

    def saved(self) -> int:
        newest = latest(self.run_dir)
        return int(newest.name.removeprefix("step_")) if newest else 0

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.saved() < step:
            assert time.monotonic() < deadline, self.output()
            assert all(agent.poll() is None for agent in self._agents.values()), self.output()
            time.sleep(0.05)

    def codes(self) -> list[int]:
        """The exit codes of both nodes' torchrun, once they have ended."""
        return [self._agents[number].wait(LIMIT_S) for number in (0, 1)]

    def crash(self, number: int) -> None:
        """Have a node drop out with all that runs there: no connection is closed, none answers."""
        agent = psutil.Process(self._agents[number].pid)
        self._nodes[number].do("ip", "link", "set", "eth0", "down")
        for process in [agent, *agent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with another
                process.kill()
        self._agents[number].wait()

    def come_back(self, number: int) -> None:
        self._nodes[number].do("ip", "link", "set", "eth0", "up")
        self.start(number)

    def output(self) -> str:
        return "\n".join(self._log(number).read_text() for number in (0, 1))

    def _log(self, number: int) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}-{number}.log")


def test_torchrun_restarts_a_run_after_a_killed_rank_and_after_a_node_that_was_lost(nodes, recipe):
    run = Elastic(nodes[:2], recipe, "elastic", restarts=3)
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
    run = Elastic(nodes[:2], recipe, "refused", restarts=1)
    run.start(0, {})
    run.start(1, {})
    assert 0 not in run.codes()
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in run.output()
