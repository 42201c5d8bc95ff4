"""A small engine that truly computes W8A8, on CPU and on CUDA, behind SGLang's ``/generate``.

Read it in this order: ``decoder`` (one decoder, its quantized products, and the named buffers that
an update writes), ``cache`` (keys and values), ``native`` (both once more, as one call of
``decode.cpp``), ``sampling``, ``engine`` (continuous batching), ``read_weights`` (folders),
``protocol`` (requests and answers) and ``endpoints``. Here is the command of one that a run starts:
``qurl serve``, a process each.
"""

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
    """Return one per port file."""
    options = {
        "--scheme": start.scheme,
        "--dtype": start.dtype,
        "--host": start.config.engine_host,
        "--threads": start.threads,
        "--cache-gb": start.config.engine_memory_gb,
    }
    flat = [str(part) for pair in options.items() for part in pair]
    command = (*start.serve_command, str(start.model_dir), *flat, "--exit-with-stdin")
    spin_count = os.environ.get("GOMP_SPINCOUNT", SPIN_COUNT)
    env = {**start.environment, "GOMP_SPINCOUNT": spin_count}
    return [Launch((*command, "--port-file", str(port)), env) for port in start.port_files.values()]
