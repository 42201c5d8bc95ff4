"""How the embedded engines of this machine are started: ``qurl serve``, a process each."""

import os

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.engines.starting import Launch, Start

# How long an OpenMP thread spins before it sleeps. The default, several milliseconds, makes
# decoding much slower where others compete for the cores: the spinning thread uses up its time
# slice, and the whole team waits for it.
SPIN_COUNT = "30000"


def refuse_not_installed(config: RolloutConfig) -> None:
    """They are part of this package."""


def launches(start: Start) -> list[Launch]:
    """One per port file."""
    return [
        Launch((*start.serve_command, *_arguments(start, port)), _env(start))
        for port in start.port_files
    ]


def _arguments(start: Start, port: object) -> list[str]:
    options = {
        "--scheme": start.scheme,
        "--dtype": start.dtype,
        "--host": start.config.engine_host,
        "--port-file": port,
        "--threads": start.threads,
        "--cache-gb": start.config.engine_memory_gb,
    }
    flat = [str(part) for pair in options.items() for part in pair]
    return [str(start.model_dir), *flat, "--exit-with-stdin"]


def _env(start: Start) -> dict[str, str]:
    return {**start.environment, "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", SPIN_COUNT)}
