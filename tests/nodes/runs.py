"""Commands on several nodes, and runs of ``qurl train`` under torchrun there."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.network import Node
from qurl_megatron.training.state import latest

ROOT = Path(__file__).parents[2]
KEY = "of-all-three-nodes"
OURS = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "QURL_API_KEY": KEY}
LIMIT_S = 300


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


class Elastic:
    """torchrun with restarts on two nodes, for one run that saves every other step."""

    def __init__(
        self, nodes: list[Node], recipe: Path, name: str, *options: str, restarts: int
    ) -> None:
        self.run_dir = recipe.parent / name
        self._nodes, self._agents = nodes, {}
        torchrun = ["--nnodes=2", "--nproc-per-node=1", f"--max-restarts={restarts}"]
        torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=train1:29501", f"--rdzv-id={name}"]
        train = ["train", recipe, f"train.run_dir={self.run_dir}", "parallel.tensor=2"]
        train += ["checkpoint.every=2", "train.eval_prompts=0", *options]
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

    def engines(self, number: int) -> list[psutil.Process]:
        """A node's engines, which its rank has started."""
        below = psutil.Process(self.rank(number)).children(recursive=True)
        return [each for each in below if "serve" in each.cmdline()]

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

    def kill(self, number: int) -> None:
        """Kill all that runs on a node."""
        agent = psutil.Process(self._agents[number].pid)
        for process in [agent, *agent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with another
                process.kill()
        self._agents[number].wait()

    def crash(self, number: int) -> None:
        """Have a node drop out: no connection is closed, none answers."""
        self._nodes[number].do("ip", "link", "set", "eth0", "down")
        self.kill(number)

    def come_back(self, number: int) -> None:
        self._nodes[number].do("ip", "link", "set", "eth0", "up")
        self.start(number)

    def output(self) -> str:
        return "\n".join(self._log(number).read_text() for number in (0, 1))

    def _log(self, number: int) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}-{number}.log")
