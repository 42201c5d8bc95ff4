"""The engines of one run: started here as processes of their own, or adopted by URL.

An engine is in a session of its own, so Ctrl-C in the terminal reaches the trainer alone, which can
save first; and it watches its standard input, a pipe whose other end only the trainer holds, so it
leaves when the trainer is gone, however that happened.

A version is published to all engines or the call fails: pause, update, ask every engine what it now
serves, continue. An engine that is not on the new version stays paused and is named in the error.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.rollout.client import EngineClient, EngineError

SERVE_COMMAND = (sys.executable, "-m", "qurl_megatron.cli", "serve")
POLL_S = 0.05
GRACE_S = 10.0  # between SIGTERM and SIGKILL
LOG_TAIL = 20  # lines quoted when an engine dies

# How long an OpenMP thread spins before it sleeps. The default, several milliseconds, makes
# decoding up to 20 times slower where others compete for the cores: the spinning thread uses up its
# time slice, and the whole team waits for it. This value costs nothing on a quiet machine.
SPIN_COUNT = "30000"


@dataclass
class _Process:
    popen: subprocess.Popen
    log: Path
    port_file: Path

    def exited(self) -> str | None:
        """A sentence about its death, with the end of its log; None while it lives."""
        status = self.popen.poll()
        if status is None:
            return None
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL:]
        return f"exited with status {status}; the end of {self.log}:\n" + "\n".join(lines)


class Fleet:
    """Context manager around embedded engines started here, or the servers at ``config.urls``."""

    def __init__(
        self,
        config: RolloutConfig,
        model_dir: Path | str,
        *,
        scheme: str,
        dtype: str = "bfloat16",
        log_dir: Path | str,
        start_timeout_s: float = 180.0,
        serve_command: Sequence[str] = SERVE_COMMAND,
        api_key: str | None = None,
    ) -> None:
        """
        Args:
            model_dir: Hugging Face folder that started engines load first.
            log_dir: gets ``engine-i.log`` per started engine.
            start_timeout_s: engines that are not healthy by then are an error.
            serve_command: what to start; the options of ``qurl serve`` are appended.
            api_key: bearer token for adopted servers.
        """
        self.config = config
        self._model_dir, self._scheme, self._dtype = str(model_dir), scheme, dtype
        self._log_dir, self._start_timeout_s = Path(log_dir), start_timeout_s
        self._serve_command, self._api_key = tuple(serve_command), api_key
        self._processes: list[_Process] = []
        self.clients: list[EngineClient] = []

    def __enter__(self) -> "Fleet":
        try:
            deadline = time.monotonic() + self._start_timeout_s
            urls = list(self.config.urls) or self._start(deadline)
            self.clients = [
                EngineClient(url, timeout_s=self.config.timeout_s, api_key=self._api_key)
                for url in urls
            ]
            for client in self.clients:
                self._await_health(client, deadline)
        except BaseException:
            self.close()  # __exit__ does not run when __enter__ fails
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def publish(self, folder: Path | str, version: int) -> None:
        """Bring every engine to the weights in ``folder``, under the name ``version``.

        Raises:
            EngineError: names every engine that is not confirmed to serve the version; those stay
                paused, the others continue.
        """

        def update(client: EngineClient) -> None:
            client.pause("retract")
            client.update_weights_from_disk(folder, version)
            served = client.weight_version()
            if served != str(version):
                raise EngineError(f"{client.url} serves version {served!r} after the update")
            client.resume()

        self.each(update, f"publishing version {version}")

    def each(self, act: Callable[[EngineClient], object], purpose: str) -> list:
        """``act`` on all engines in parallel; one error that names every engine that failed."""
        with ThreadPoolExecutor(len(self.clients)) as pool:
            futures = [pool.submit(act, client) for client in self.clients]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None and not isinstance(error, EngineError):
                raise error
        failed = [str(error) for error in errors if error is not None]
        if failed:
            self.check()
            raise EngineError(f"{purpose} failed on {len(failed)} engines: " + "; ".join(failed))
        return [future.result() for future in futures]

    def check(self) -> None:
        """Raise an EngineError that quotes the log if an engine we started has died."""
        for index, process in enumerate(self._processes):
            if death := process.exited():
                raise EngineError(f"engine {index} {death}")

    def close(self) -> None:
        """Terminate the engines that were started here; adopted ones are left alone."""
        for client in self.clients:
            client.close()
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # it is gone already
                process.popen.stdin.close()
            process.popen.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()
        self._processes, self.clients = [], []

    def _start(self, deadline: float) -> list[str]:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        cores = len(os.sched_getaffinity(0))
        threads = self.config.engine_threads or max(1, cores // self.config.engines)
        for index in range(self.config.engines):
            self._processes.append(self._spawn(index, threads))
        return [
            f"http://127.0.0.1:{self._await_port(index, deadline)}"
            for index in range(self.config.engines)
        ]

    def _spawn(self, index: int, threads: int) -> _Process:
        log = self._log_dir / f"engine-{index}.log"
        port_file = self._log_dir / f"engine-{index}.port"
        port_file.unlink(missing_ok=True)
        options = {
            "--scheme": self._scheme,
            "--dtype": self._dtype,
            "--port-file": port_file,
            "--threads": threads,
            "--cache-gb": self.config.engine_memory_gb,
        }
        flat = [str(part) for pair in options.items() for part in pair]
        command = [*self._serve_command, self._model_dir, *flat, "--exit-with-stdin"]
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        with log.open("wb") as out:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={
                    "GOMP_SPINCOUNT": SPIN_COUNT,
                    **os.environ,
                    **dict.fromkeys(names, str(threads)),
                },
                start_new_session=True,
            )
        return _Process(popen, log, port_file)

    def _await_port(self, index: int, deadline: float) -> int:
        process = self._processes[index]
        while not process.port_file.exists():
            self.check()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"engine {index} did not start within {self._start_timeout_s:.0f} s; "
                    f"see {process.log}"
                )
            time.sleep(POLL_S)
        return int(process.port_file.read_text(encoding="utf-8"))

    def _await_health(self, client: EngineClient, deadline: float) -> None:
        while not client.healthy():
            self.check()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{client.url} is not healthy after {self._start_timeout_s:.0f} s"
                )
            time.sleep(POLL_S)
