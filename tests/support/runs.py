"""``qurl train`` on a model that is small enough to lose engines many times a minute."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from qurl_megatron.fleet.process import port_file
from qurl_megatron.observe.timeline import Timeline
from tests.support.leftovers import Footprint
from tests.support.waiting import NEVER_S

QURL = [sys.executable, "-m", "qurl_megatron.cli"]
TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "0",
    "ROLE_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "PET_NPROC_PER_NODE": "8",
}
"""Variables of torchrun, as a rank has them."""
SAMPLES = 64  # of one step
TAKES_TIME = re.compile(r"time/|throughput/|sync/.*_s$")

MODEL = """
[model]
path = "{root}/model"
dtype = "float32"
[warmstart]
steps = WARM_STEPS
hidden = 64
layers = 2
heads = 4
kv_heads = 2
intermediate = 128
batch = 64
"""
SMALL = (
    MODEL
    + """[data]
task = "sort_digits"
task_args = {{ digits = 4 }}
task_size = TASK_SIZE
prompts_per_step = 8
[reward]
kind = "exact"
[optimizer]
lr = 1e-4
[rollout]
engines = ENGINES
samples_per_prompt = 8
max_new_tokens = 8
"""
)
"""What small runs have in common; it ends in the table of rollouts."""

RECIPE = (
    SMALL.replace("WARM_STEPS", "10").replace("TASK_SIZE", "4000").replace("ENGINES", "2")
    + """engine_threads = 1
[algo]
# So small a model earns nothing: this moves its weights all the same.
entropy_coef = 0.01
[checkpoint]
every = 0
[train]
steps = 2000
micro_batch = 32
save_rollouts = true
"""
)

LEARNING = (
    SMALL.replace("WARM_STEPS", "30").replace("TASK_SIZE", "2000").replace("ENGINES", "1")
    + """
[algo]
# So small a model earns nothing: these move its weights all the same.
entropy_coef = 0.01
kl_coef = 0.01
[train]
steps = 4
micro_batch = 16
eval_prompts = 16
"""
)
"""Four steps with evaluations."""

GUARDED = (
    MODEL.replace("WARM_STEPS", "12")
    + """[data]
task = "gcd"
task_args = {{ min_numbers = 2, max_numbers = 2, min_value = 1, max_value = 60 }}
task_size = 2000
prompts_per_step = 8
[rollout]
engines = 1
samples_per_prompt = 4
max_new_tokens = 4
[reward]
kind = "last_number"
[algo]
name = "dapo"
max_refills = 4
[optimizer]
lr = 1e-4
[guard]
rho_above = 0.5  # always crossed
patience = 2
[train]
steps = 3
micro_batch = 16
"""
)
"""Dynamic sampling, and a guard that trips in step 2."""


def make_recipe(root: Path) -> Path:
    path = root / "recipe.toml"
    path.write_text(RECIPE.format(root=root))
    return path


def qurl(*arguments: object, code: int = 0, **env: str) -> subprocess.CompletedProcess:
    """Run a command to its end, with this exit code.

    Args:
        env: added to the environment.
    """
    done = subprocess.run(
        [*QURL, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=NEVER_S,
        env=os.environ | env,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return a run's metrics by step, but for those that depend on the clock."""
    by_step: dict[int, dict[str, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        by_step.setdefault(record["step"], {}).update(
            {k: v for k, v in record["metrics"].items() if not TAKES_TIME.match(k)}
        )
    return by_step


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
    return max((json.loads(line)["step"] for line in whole.splitlines()[-3:]), default=0)


def rollouts(run_dir: Path, step: int) -> list[dict]:
    """Return the samples of one step."""
    lines = (run_dir / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def as_if_killed_after(step: int, run_dir: Path) -> Path:
    """Copy a run's folder, without the checkpoints after ``step``."""
    copy = run_dir.with_name(f"{run_dir.name}-{step}")
    shutil.copytree(run_dir, copy)
    for checkpoint in copy.glob("checkpoints/step_*"):
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)
    return copy


class Run:
    """One call of ``qurl train``, watched from outside."""

    def __init__(self, recipe: Path, name: str, *overrides: str, **env: str) -> None:
        self.dir = recipe.parent / name
        self._out, self._err = (recipe.parent / f"{name}.{end}" for end in ("out", "err"))
        self._command = [*QURL, "train", str(recipe), f"train.run_dir={self.dir}", *overrides]
        self.footprint = Footprint()
        self._env = self.footprint.env | env

    @contextlib.contextmanager
    def process(self, stdout: int | None = None) -> Iterator[subprocess.Popen]:
        """Whatever happens, nothing of it is left.

        Args:
            stdout: where it prints; None: what ``stdout()`` reads.
        """
        with self._out.open("w") as out, self._err.open("w") as err:
            self.popen = subprocess.Popen(
                self._command,
                stdout=out if stdout is None else stdout,
                stderr=err,
                env=self._env,
                start_new_session=True,
            )
        try:
            yield self.popen
        finally:
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.popen.wait()

    def finish(self, code: int = 0) -> None:
        """It ends by itself, with this code, and leaves nothing."""
        with self.process():
            assert self.ended() == code, self.stderr()
            assert self.left() == []

    def wait(self, condition: Callable[[], bool], seconds: float = 300.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.popen.poll() is None, self.stdout()[-2000:] + self.stderr()[-2000:]
            assert time.monotonic() < end, self.stdout()[-2000:]
            time.sleep(0.05)

    def ended(self, seconds: float = 300.0) -> int:
        return self.popen.wait(seconds)

    def kill(self, *engines: int) -> None:
        """With all that belongs to them."""
        for process in [self.engine(index) for index in engines]:
            os.killpg(process, signal.SIGKILL)

    def engine(self, index: int) -> int | None:
        """The process of one engine, the leader of its group; None where there is none."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                command = process.cmdline()
                if str(port_file(self.dir / "logs", f"engine-{index}")) in command:
                    return process.pid
        return None

    def rank(self, index: int) -> int:
        """The process of one rank that a fork server started; ranks lead groups of their own."""
        servers = [p for p in self.processes() if "multiprocessing.forkserver" in str(p.cmdline())]
        forked = [p.pid for p in servers if p.ppid() in {s.pid for s in servers}]
        return sorted(pid for pid in forked if os.getpgid(pid) == pid)[index]

    def stdout(self) -> str:
        return self._out.read_text()

    def stderr(self) -> str:
        return self._err.read_text()

    def step(self) -> int:
        """The last one that is measured."""
        return steps_done(self.dir)

    def happened(self, event: str) -> int:
        """How often the timeline tells of it."""
        spans = Timeline.read(self.dir / "timeline.jsonl")
        return sum(span.lane == "fleet" and span.name.startswith(event) for span in spans)

    def samples(self, step: int) -> list[dict]:
        return rollouts(self.dir, step)

    def assert_whole(self, steps: int) -> None:
        """Each step has all its samples, and all from the newest version."""
        for step in range(1, steps + 1):
            samples = self.samples(step)
            assert len(samples) == SAMPLES
            assert {s["prompt"]["index"] for s in samples} == set(range(8 * (step - 1), 8 * step))
            assert {v for s in samples for v in s["versions"]} == {step - 1}

    def metrics(self) -> dict[int, dict[str, float]]:
        return metrics(self.dir)

    def saved(self) -> list[int]:
        folders = (self.dir / "checkpoints").glob("step_*/state.json")
        return sorted(int(path.parent.name.removeprefix("step_")) for path in folders)

    def processes(self) -> list[psutil.Process]:
        """All that still run, engines included."""
        return self.footprint.look()

    def left(self) -> list[str]:
        """What a run that has ended leaves behind, a moment later."""
        return self.footprint.left(self.dir)
