"""Did the engines of a run serve what its checkpoints hold?

For every checkpoint of a finished run on SGLang engines: quantize it into a folder, start a new
SGLang server on that folder, and have it score the responses that the run's engines gave at this
version. The log-probs that the run recorded while sampling, from weights that came shard by shard
into live parameters, must be those of a server that never knew another version.

The run needs ``train.save_rollouts=true``, ``checkpoint.every=1`` and a ``checkpoint.keep`` that
keeps them all. As a control each version's responses are also scored by the server of another one.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.repeats import progress
from qurl_megatron.config import load
from qurl_megatron.engines.sglang.command_line import engine_launch
from qurl_megatron.engines.sglang.start import sglang_python
from qurl_megatron.errors import ConfigError
from qurl_megatron.fleet.client import EngineClient
from qurl_megatron.fleet.process import EngineProcess, port_file, stop
from qurl_megatron.training.state import RECIPE, checkpoints

QUANTIZE = Path(__file__).parents[2] / "checkpoints_tools/quantize.py"
START_S = 300.0
GRACE_S = 10.0

Response = dict
"""One line of ``rollouts/step_000012.jsonl``."""


def recorded(run_dir: Path, version: int, limit: int) -> list[Response]:
    """The first distinct responses that were generated wholly at ``version``."""
    path = run_dir / "rollouts" / f"step_{version + 1:06d}.jsonl"
    if not path.is_file():
        return []
    found: dict[tuple, Response] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        response = json.loads(line)
        # What an environment wrote has no version, and no engine's log-probs.
        if set(response["versions"]) == {version}:
            key = (*response["prompt"]["input_ids"], -1, *response["response_ids"])
            found.setdefault(key, response)
    return list(found.values())[:limit]


def differences(client: EngineClient, responses: Sequence[Response]) -> list[float]:
    """|recorded - scored| of every response token's log-prob."""
    found: list[float] = []
    for response in responses:
        prompt, tokens = response["prompt"]["input_ids"], response["response_ids"]
        scored = client.score(prompt + tokens, start=len(prompt))
        recorded_T = response["behaviour_log_probs"]
        found += [abs(a - b) for a, b in zip(recorded_T, scored, strict=True)]
    return found


@contextmanager
def fresh_engine(checkpoint: Path, python: Path, scheme: str, dtype: str) -> Iterator[EngineClient]:
    """A server that has only ever seen this checkpoint, quantized as an export for SGLang."""
    with tempfile.TemporaryDirectory(prefix="qurl-version-") as folder:
        export = Path(folder) / "model"
        options = ["--model", checkpoint, "--scheme", scheme, "--format", "sglang"]
        command = [sys.executable, QUANTIZE, *options, "--dtype", "float32", "--out", export]
        subprocess.run([*map(str, command)], check=True, capture_output=True)
        launch = engine_launch(
            python,
            export,
            scheme=scheme,
            dtype=dtype,
            threads=2,
            port_file=port_file(Path(folder), "engine"),
            empty=False,
        )
        process = EngineProcess("engine", launch, Path(folder))
        process.start()
        try:
            yield _client(process)
        finally:
            stop([process], GRACE_S)


def _client(process: EngineProcess) -> EngineClient:
    deadline = time.monotonic() + START_S
    while (port := process.port()) is None:
        if death := process.exited():
            raise ConfigError(f"the engine {death}")
        if time.monotonic() > deadline:
            raise ConfigError(f"the engine did not start within {START_S:.0f} s")
        time.sleep(0.2)
    return EngineClient(f"http://127.0.0.1:{port}")


def run(options: argparse.Namespace) -> list[Case]:
    """One case per version that has a checkpoint and responses."""
    run_dir: Path = options.run_dir
    config = load(run_dir / RECIPE)
    python = sglang_python(config.rollout.sglang_python)
    cases = []
    for checkpoint in checkpoints(run_dir):
        version = int(checkpoint.name.removeprefix("step_"))
        responses = recorded(run_dir, version, options.responses)
        others = recorded(run_dir, version - 1, options.responses)
        if not responses:
            continue
        with fresh_engine(checkpoint, python, config.quant.scheme, config.model.dtype) as client:
            same, other = differences(client, responses), differences(client, others)
        cases.append(case_of(version, same, other))
        progress(f"version {version}: {cases[-1].figure('mean difference').median:.2g} nats")
    if not cases:
        raise ConfigError(
            f"{run_dir} has no checkpoint with responses; train with train.save_rollouts=true "
            "checkpoint.every=1 checkpoint.keep=100"
        )
    return cases


def case_of(version: int, same: Sequence[float], other: Sequence[float]) -> Case:
    """
    Args:
        same: differences of this version's responses, one per token.
        other: the control, those of the version before.
    """
    control = {"mean": statistics.mean(other), "max": max(other)} if other else None
    return Case(
        name=f"version {version}",
        keys={"version": version},
        figures=[
            Figure(name=f"{name} difference", unit="nats", better="lower", repeats=[value])
            for name, value in (("mean", statistics.mean(same)), ("largest", max(same)))
        ],
        notes={"tokens": len(same), "against_the_version_before": control},
    )
