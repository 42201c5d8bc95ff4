"""Start engines on this machine: the settings for every kind, and the resulting command."""

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.kit.children import children_cores
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.schemes import ROLLOUT, SCHEMES

API_KEY = "QURL_API_KEY"
"""Environment variable that carries the key: every user can read command lines."""
SERVE_COMMAND = (sys.executable, "-m", "qurl_megatron.cli", "serve")


def given_key(env: Mapping[str, str]) -> str | None:
    """Return the engines' API key; None if the environment has none.

    Raises:
        ConfigError: no request can carry it: it is empty, or not plain ASCII.
    """
    key = env.get(API_KEY)
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise ConfigError(
            f"{API_KEY} is set, but {'empty' if not key.strip() else 'has characters no key has'}; "
            "unset it, or set it to the key of the engines"
        )
    return key


def refuse_not_installed(config: RolloutConfig) -> None:
    """Raise ``ConfigError`` if engines are to be started here and are not installed."""
    if not config.adopts:
        importlib.import_module(config.kind.start).refuse_not_installed(config)


def refuse_without_gpu(config: RolloutConfig, scheme: str) -> None:
    """Raise ``ConfigError`` if engines to be started here need a GPU for a scheme and lack one."""
    if config.adopts or not config.kind.takes_gpus or not SCHEMES[scheme].block:
        return
    import torch

    if not torch.cuda.device_count():
        raise ConfigError(
            f"rollout.backend={config.backend} computes quant.scheme={scheme} on GPUs alone, and "
            "none is here; set rollout.backend=embedded, or quant.scheme to int8 or fp8"
        )


@dataclass(frozen=True)
class Launch:
    command: tuple[str, ...]
    env: dict[str, str] = field(repr=False)  # added to our environment; may have the key


def port_file(folder: Path, name: str) -> Path:
    """Return the file to which an engine writes its port once it answers requests."""
    return folder / f"{name}.port"


@dataclass(frozen=True, kw_only=True)
class Start:
    """Settings for one machine's engines."""

    config: RolloutConfig
    model_dir: Path
    folder: Path
    """Folder of their port files."""

    scheme: str
    dtype: str
    api_key: str
    empty: bool = True
    """Start without weights, which the first version brings, if the kind can."""

    routed: bool = False
    """Answers are to name each token's experts."""

    trainer_ranks: int = 0
    """Training ranks on this machine; rank i has GPU i."""

    serve_command: Sequence[str] = SERVE_COMMAND
    """Starts an embedded engine; the options of ``qurl serve`` follow."""

    def launches(self) -> dict[str, Launch]:
        """Return how to start each engine, by its name.

        Raises:
            ConfigError: such engines cannot be started here.
        """
        kind = importlib.import_module(self.config.kind.start)
        return dict(zip(self.port_files, kind.launches(self), strict=True))

    @property
    def port_files(self) -> dict[str, Path]:
        """Port files by the engines' names."""
        names = [f"engine-{index}" for index in range(self.config.engines)]
        return {name: port_file(self.folder, name) for name in names}

    @property
    def threads(self) -> int:
        """Threads of each rank of an engine."""
        ranks = self.config.engines * self.config.engine_tensor
        return self.config.engine_threads or max(1, len(children_cores()) // ranks)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the number of threads and the key."""
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        return {**dict.fromkeys(names, str(self.threads)), API_KEY: self.api_key}


def wait_for_end_of_stdin() -> None:
    """Return when standard input closes: the process that started this one is gone.

    Reads the bare descriptor: a thread inside ``sys.stdin``'s lock would keep Python from exiting.
    """
    while os.read(0, 4096):
        pass


def add_serve_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("model_dir", type=Path, help="Hugging Face checkpoint folder")
    command.add_argument("--scheme", choices=ROLLOUT, default="int8")
    command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    command.add_argument("--host", default="127.0.0.1")
    command.add_argument("--port", type=int, help="default 30000, or a free one with --port-file")
    command.add_argument(
        "--port-file", type=Path, help="the port is written here once the engine is ready"
    )
    command.add_argument(
        "--threads", type=int, default=0, help="CPU threads; 0 leaves torch's default"
    )
    command.add_argument("--cache-gb", type=float, default=2.0, help="key/value cache, GiB")
    command.add_argument(
        "--exit-with-stdin",
        action="store_true",
        help="leave when standard input closes (set by qurl train)",
    )


def serve(arguments: argparse.Namespace) -> int:
    """Serve a model with the embedded engine, by SGLang's /generate; an API key that requests
    must bring is taken from QURL_API_KEY."""
    from qurl_megatron.engines.embedded.endpoints import serve as run

    port, api_key = arguments.port, given_key(os.environ)
    if port is None:
        port = 0 if arguments.port_file else 30000
    if api_key is None and arguments.host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(
            f"--host {arguments.host} without a key: whoever reaches it could load weights into "
            f"this engine; set {API_KEY} here and where requests come from, or leave --host out"
        )
    run(arguments, port, api_key)
    # Python would take half a second to take torch apart, while somebody waits for the exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
