"""One Slurm for all tests of a process, a small model for their runs, and questions to a run."""

import contextlib
import fcntl
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from qurl_megatron.cluster import folder
from qurl_megatron.observe.sinks import read_metrics
from tests.slurm.cluster import CannotStart, Cluster, cluster
from tests.support.leftovers import MARK, Footprint
from tests.support.runs import QURL, TAKES_TIME, steps_done

ROOT = Path(__file__).parents[2]
SMALL = (
    *("warmstart.steps=20", "warmstart.hidden=64", "warmstart.layers=2"),
    *("warmstart.intermediate=128", "rollout.engines=1", "rollout.engine_threads=1"),
    *("data.prompts_per_step=8", "train.max_tokens=256", "train.eval_prompts=8"),
    *("train.eval_samples=1", "train.eval_every=0"),
)
"""What makes the quickstart a matter of seconds."""
STEPS = 16
OPTIONS = (f"train.steps={STEPS}", "checkpoint.every=5")
"""Of the run that ``undisturbed`` has the metrics of."""
ENDLESS = ("train.steps=100000", "checkpoint.every=0")
ONE_RANK = "parallel.tensor=1"
"""Where it is not about ranks: a second one takes ten seconds to start."""


class User:
    """Somebody with a recipe, a cluster file, and a folder to submit from."""

    def __init__(self, slurm: Cluster, folder: Path, model: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.shared = json.dumps([str(folder), str(model)])
        self.footprint = Footprint()
        self.overrides = [*SMALL, f"model.path={model}"]
        self.cluster_file = folder / "cluster.toml"
        self.describe()

    def describe(self, node: Mapping[str, object] | None = None, **job: object) -> None:
        """Write the cluster file, with other values in [job] and [node]."""
        bin = self.folder / "bin"
        bin.mkdir(exist_ok=True)
        command = bin / "qurl"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m qurl_megatron.cli "$@"\n')
        command.chmod(0o755)
        usual = {"partition": "main", "time_limit": "00:20:00", "signal_s": 60, "examine_s": 0}
        values = {**usual, **job}
        nodes = {"gpu": "h100", "cpus": 128, **(node or {})}
        mark = self.footprint.env[MARK]
        self.cluster_file.write_text(
            f"[job]\n{_toml(values)}[node]\n{_toml(nodes)}"
            f'[site]\nshared = {self.shared}\nprolog = ["export PATH={bin}:$PATH"]\n'
            f'[site.environment]\nPYTHONPATH = "{ROOT}"\nOMP_NUM_THREADS = "1"\n'
            f'{MARK} = "{mark}"\n'
        )

    def slurms(self, *words: object) -> subprocess.CompletedProcess:
        """``qurl slurm ...``"""
        return self.slurm.call(*QURL, "slurm", *words, cwd=self.folder)

    def submit(self, name: str, *overrides: str) -> tuple[int, Path]:
        """
        Returns:
            The job, and the run's folder.
        """
        recipe = ROOT / "launch/recipes/quickstart.toml"
        run_dir = self.folder / name
        done = self.slurms(
            *("submit", recipe, *self.overrides, f"train.run_dir={run_dir}", *overrides),
            *("--cluster", self.cluster_file),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((run_dir / "slurm/job.json").read_text())["job"], run_dir

    def told(self, *words: object) -> str:
        """What ``qurl slurm ...`` says where it ends well."""
        done = self.slurms(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def assert_no_command_has_key(self, meeting: Path) -> None:
        """The engines' key is in no command line of the run's processes, which all users see."""
        key = (meeting / "key").read_text()
        commands = []
        for process in self.footprint.look():
            with contextlib.suppress(psutil.NoSuchProcess):
                commands.append(" ".join(process.cmdline()))
        for part in ("slurm attempt", "srun", "slurm task", "slurm offer"):
            assert any(part in command for command in commands), f"{part} does not run"
        assert [command for command in commands if key in command] == []

    def assert_key_is_kept(self, job: int, run_dir: Path, meeting: Path) -> None:
        """The engines' key is in one file, for its owner; and no engine is offered any more."""
        assert list(meeting.glob("*.json")) == []
        key = (meeting / "key").read_bytes()
        assert (meeting / "key").stat().st_mode & 0o777 == 0o600
        written = [path for path in run_dir.rglob("*") if path.is_file()]
        assert {path for path in written if key in path.read_bytes()} == {meeting / "key"}
        assert key.decode() not in self.slurm.call("scontrol", "show", "job", job).stdout

    def log(self, run_dir: Path) -> str:
        """What an operator reads when something is wrong."""
        files = [run_dir / "slurm/job.log", *sorted(run_dir.glob("slurm/attempts/*/*.log"))]
        return "\n".join(f"== {p}\n{p.read_text()[-4000:]}" for p in files if p.exists())


def _toml(values: Mapping[str, object]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(cluster(tmp_path_factory.mktemp("slurm")))
        except CannotStart as why:
            pytest.skip(f"no Slurm: {why}")
        yield made


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A run that ``qurl train`` did on this machine, without Slurm, and beside it its model."""
    own = tmp_path_factory.getbasetemp()
    root = (own if worker_id == "master" else own.parent) / "undisturbed"  # one for all processes
    root.mkdir(exist_ok=True)
    recipe = ROOT / "launch/recipes/quickstart.toml"
    words = (*SMALL, *OPTIONS, f"model.path={root}/model", f"train.run_dir={root}/run")
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "run/report.html").exists():
            subprocess.run([*QURL, "train", str(recipe), *words], check=True, capture_output=True)
    return root / "run"


@pytest.fixture(scope="session")
def model(undisturbed: Path) -> Path:
    return undisturbed.with_name("model")


# Of the whole session, since a run takes half a minute: tests give theirs names of their own.
@pytest.fixture
def user(slurm: Cluster, model: Path, tmp_path: Path) -> User:
    return User(slurm, tmp_path, model)


# ---- runs


def measured(run_dir: Path) -> dict[int, dict[str, float]]:
    """By step, without what depends on the clock."""
    return {
        record.step: {k: v for k, v in record.metrics.items() if not TAKES_TIME.match(k)}
        for record in read_metrics(run_dir / "metrics.jsonl")
    }


def but_published(steps: dict[int, dict[str, float]], step: int) -> dict[int, dict[str, float]]:
    """The metrics, but for those of one step's publication."""
    rest = {k: v for k, v in steps[step].items() if not re.match("quant/|sync/|fleet/", k)}
    return {**steps, step: rest}


def reaches(user: User, run_dir: Path, step: int, seconds: float = 180.0) -> None:
    user.slurm.wait(lambda: steps_done(run_dir) >= step, seconds, f"step {step} of {run_dir}")


def said(run_dir: Path, attempt: int | None = None) -> str:
    """What the supervisor and srun have said, of all attempts or of one."""
    path = run_dir / "slurm/job.log"
    text = path.read_text() if path.exists() else ""
    return text if attempt is None else text.partition(f"qurl: attempt {attempt}, job ")[2]


def ended_attempts(run_dir: Path) -> list[folder.Attempt]:
    return [attempt for attempt in folder.attempts(run_dir) if attempt.ended]


def decisions(run_dir: Path) -> list[str]:
    return [attempt.decision for attempt in ended_attempts(run_dir)]


def rank(user: User, number: int) -> psutil.Process:
    """The process that srun has started for a rank of the user's only run, once there is one."""
    found: list[psutil.Process] = []

    def there() -> bool:
        found[:] = [p for p in user.footprint.look() if _is_rank(p, number)]
        return bool(found)

    user.slurm.wait(there, 60, f"rank {number}")
    return found[0]


def _is_rank(process: psutil.Process, number: int) -> bool:
    """None of those that a rank has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        words = process.cmdline()
        procid = process.environ().get("SLURM_PROCID")
        return words[-3:-1] == ["slurm", "task"] and procid == str(number)
    return False


def time_is_up(user: User, job: int) -> None:
    """What --signal=B:USR1@N does, at a moment that is known."""
    done = user.slurm.call("scancel", "--batch", "--signal=USR1", job)
    assert done.returncode == 0, done.stderr


def ends_in(user: User, job: int, seconds: int) -> None:
    """Cut a running job's time short, as an operator does."""
    user.slurm.update(f"JobId={job}", f"EndTime=now+{seconds}")
