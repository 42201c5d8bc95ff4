"""An engine's process: started with its own log, told where to write its port, ended with its kin.

What its environment says of ranks is left out (``runtime.children``), and it has all of the job's
cores. It is in a session of its own, so Ctrl-C in the terminal reaches the trainer alone, which can
save first; and it leaves when the trainer is gone, however that happened: it watches its standard
input, a pipe whose other end only the trainer holds, and where it is stopped or stuck, it and all
that it started are killed (``runtime.undertaker``).
"""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.engines.sglang.command_line import API_KEY, Launch, engine_launch
from qurl_megatron.errors import ConfigError
from qurl_megatron.runtime.children import children_cores, on_cores, without_launcher
from qurl_megatron.runtime.filesystem import free
from qurl_megatron.runtime.undertaker import bury, remove, shared_by, spare

SERVE_COMMAND = (sys.executable, "-m", "qurl_megatron.cli", "serve")
PORT = re.compile(r"[1-9][0-9]{0,4}")
LOG_TAIL = 20  # lines quoted when an engine dies
LOG_ROOM = 1 << 16  # bytes, below which a disk is full: the last words may not fit

# How long an OpenMP thread spins before it sleeps. The default, several milliseconds, makes
# decoding up to 20 times slower where others compete for the cores: the spinning thread uses up its
# time slice, and the whole team waits for it. This value costs nothing on a quiet machine.
SPIN_COUNT = "30000"


class EngineProcess:
    """Starts again under the same name; its log goes on where the last process left it."""

    def __init__(self, name: str, launch: Launch, folder: Path) -> None:
        """
        Args:
            launch: how to start it; makes it write its port to ``port_file(folder, name)``.
            folder: gets NAME.log.
        """
        self.name = name
        self.log = folder / f"{name}.log"
        self._port_file = port_file(folder, name)
        self.launch = launch  # of the next start
        self._mode = "wb"
        self._heard = (0, 0.0)  # size of the log, and when it came to that
        self._shared: set[str] = set()  # files in memory
        self._looking = threading.Lock()  # what is found is of a process that is not yet forgotten
        self.popen: subprocess.Popen | None = None

    def start(self) -> None:
        """
        Raises:
            ConfigError: the command cannot be run.
        """
        self._port_file.unlink(missing_ok=True)
        self._forget()
        try:
            with self.log.open(self._mode) as out, on_cores(children_cores()):
                self.popen = subprocess.Popen(
                    self.launch.command,
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**without_launcher(os.environ), **self.launch.env},
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"{self.launch.command[0]} cannot be started: {error}") from None
        bury(self.popen.pid)
        self._mode = "ab"
        self._heard = (0, time.monotonic())

    def heard(self) -> float:
        """When its log last grew, of the monotonic clock, as far as the calls of this can tell."""
        with contextlib.suppress(FileNotFoundError):
            size = self.log.stat().st_size
            if size != self._heard[0]:
                self._heard = size, time.monotonic()
        return self._heard[1]

    def last_line(self) -> str:
        """Of its log; a progress bar counts as it stands now."""
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - 4096))
            lines = log.read().decode("utf-8", "replace").replace("\r", "\n").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    def port(self) -> int | None:
        """Where it listens; None until it says so."""
        with contextlib.suppress(FileNotFoundError):
            said = self._port_file.read_text(encoding="utf-8", errors="replace").strip()
            return int(said) if PORT.fullmatch(said) else None
        return None

    def exited(self, wait_s: float = 0.0) -> str | None:
        """A line about its death, then the end of its log; None while it lives."""
        popen = self.popen  # ``stop`` may take it away meanwhile
        if popen is None:
            return None
        try:
            status = popen.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL:]
        if not lines and (room := free(self.log)) < LOG_ROOM:
            return (
                f"exited with status {status} and could not write {self.log}: {room} bytes are free"
                " on its disk; free some, or name a folder on another"
            )
        return f"exited with status {status}; see {self.log}:\n" + "\n".join(lines)

    def look(self) -> None:
        """Remember what its processes share in memory: once they are gone, nothing else tells.

        Takes as long as the machine has processes; hold no lock that others wait for.
        """
        with self._looking:
            if self.popen is not None:
                for file in shared_by([self.popen.pid]) - self._shared:
                    bury(Path(file))
                    self._shared.add(file)

    def leave(self) -> None:
        """Ask it to end by itself."""
        self.look()
        with contextlib.suppress(BrokenPipeError):  # it is gone already
            self.popen.stdin.close()
        self.popen.terminate()

    def kill(self) -> None:
        """At once, with every process it started: a stopped one heeds no other signal."""
        self.look()
        if self.popen is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.kill()  # also what it may have left behind
        self.popen.wait()
        self._forget()

    def _forget(self) -> None:
        with self._looking:
            if self.popen is not None:
                spare(self.popen.pid)
                while self._shared:
                    remove(Path(self._shared.pop()))
                self.popen = None


def stop(processes: Sequence[EngineProcess], grace_s: float) -> None:
    """Ask all to leave, wait together, then insist."""
    running = [process for process in processes if process.popen is not None]
    for process in running:
        process.leave()
    deadline = time.monotonic() + grace_s
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(max(0.0, deadline - time.monotonic()))
        process.end()


def port_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.port"


def launches(
    config: RolloutConfig,
    model_dir: Path | str,
    folder: Path,
    *,
    scheme: str,
    dtype: str,
    api_key: str,
    empty: bool = True,
    trainer_ranks: int = 0,
    serve_command: Sequence[str] = SERVE_COMMAND,
    text: bool = False,
) -> dict[str, Launch]:
    """How to start each engine of this machine, by its name.

    Args:
        empty: SGLang engines start without weights, for the first version brings them.
        trainer_ranks: training ranks on this machine, each on the GPU of its number.
        text: they read and write text beside token ids.

    Raises:
        ConfigError: ``rollout.sglang_python`` does not exist; there are too few GPUs, or the
            trainer's are among them.
    """
    names = [f"engine-{index}" for index in range(config.engines)]
    cores = len(children_cores())
    threads = config.engine_threads or max(1, cores // _engine_ranks(config))
    if config.backend == "embedded":
        made = [
            _embedded(config, model_dir, port_file(folder, name), scheme, dtype, threads, text)
            for name in names
        ]
        key = {API_KEY: api_key}
        return {
            name: Launch((*serve_command, *one.command), {**one.env, **key})
            for name, one in zip(names, made, strict=True)
        }
    python = sglang_python(config.sglang_python)
    if (gpus := torch.cuda.device_count()) and (wrong := misplaced(config, gpus, trainer_ranks)):
        raise ConfigError(wrong)
    return {
        name: engine_launch(
            python,
            model_dir,
            scheme=scheme,
            dtype=dtype,
            tensor=config.engine_tensor,
            threads=threads,
            host=config.engine_host,
            port_file=port_file(folder, name),
            api_key=api_key,
            empty=empty,
            text=text,
            extra=[*_devices(config, index), *config.engine_args],
        )
        for index, name in enumerate(names)
    }


def _embedded(
    config: RolloutConfig,
    model_dir: Path | str,
    port: Path,
    scheme: str,
    dtype: str,
    threads: int,
    text: bool,
) -> Launch:
    options = {
        "--scheme": scheme,
        "--dtype": dtype,
        "--host": config.engine_host,
        "--port-file": port,
        "--threads": threads,
        "--cache-gb": config.engine_memory_gb,
    }
    flat = [str(part) for pair in options.items() for part in pair]
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    spin = os.environ.get("GOMP_SPINCOUNT", SPIN_COUNT)
    env = {**dict.fromkeys(names, str(threads)), "GOMP_SPINCOUNT": spin}
    ids_only = () if text else ("--skip-tokenizer-init",)  # as trainer and engine speak
    return Launch((str(model_dir), *flat, "--exit-with-stdin", *ids_only), env)


def _devices(config: RolloutConfig, index: int) -> list[str]:
    """Options that give one SGLang engine its GPUs, and let it give their memory back."""
    if not torch.cuda.device_count():
        return []
    first = config.engine_first_gpu + index * config.engine_tensor
    return [
        *("--base-gpu-id", str(first)),
        *(["--enable-memory-saver"] if config.colocate else []),
    ]


def misplaced(config: RolloutConfig, gpus: int, trainer_ranks: int) -> str | None:
    """Why the engines cannot be on the GPUs that they would get, in a sentence; None: they can.

    Args:
        gpus: that the leading rank sees.
        trainer_ranks: on this machine.
    """
    first, last = config.engine_first_gpu, config.engine_first_gpu + _engine_ranks(config) - 1
    if last >= gpus:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        return (
            f"rollout.engines={config.engines} of rollout.engine_tensor={config.engine_tensor} "
            f"from rollout.engine_first_gpu={first} on need {last + 1} GPUs, but the leading rank "
            f"sees {gpus}{f' (CUDA_VISIBLE_DEVICES={shown})' if shown else ''}; start fewer "
            "engines, or, where a batch system hides GPUs from the rank, ask it for "
            "--gpus-per-node instead of --gpus-per-task and no --gpu-bind"
        )
    if not config.colocate and first < trainer_ranks:
        return (
            f"rollout.engine_first_gpu={first} puts engines on GPUs of the trainer, which has "
            f"{trainer_ranks} ranks on this machine; set rollout.engine_first_gpu={trainer_ranks}, "
            "or rollout.colocate=true to take turns"
        )
    return None


def _engine_ranks(config: RolloutConfig) -> int:
    """Ranks of all engines."""
    return config.engines * config.engine_tensor


def sglang_python(given: str) -> Path:
    if given:
        if not Path(given).is_file():
            raise ConfigError(
                f"rollout.sglang_python = {given} does not exist; `make sglang` makes the "
                "environment .venv-sglang"
            )
        return Path(given)
    usual = Path(".venv-sglang/bin/python")
    if usual.is_file():
        return usual.absolute()  # not resolved: the link is what makes it the environment's
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            "rollout.backend=sglang needs SGLang: neither .venv-sglang exists here nor is it "
            "installed beside this package; run `make sglang`, or set rollout.sglang_python"
        )
    return Path(sys.executable)
