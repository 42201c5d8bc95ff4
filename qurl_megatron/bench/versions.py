"""Did the engines of a run serve what its checkpoints hold?

For every checkpoint of a finished run: start a new engine on it, as ``qurl rescore`` does for one
step, and have it score the responses that the run's engines gave at this version. The log-probs
that the run recorded while sampling, from weights that came shard by shard into live parameters,
must be those of an engine that never knew another version.

The run needs ``train.save_rollouts=true``, ``checkpoint.every=1`` and a ``checkpoint.keep`` that
keeps them all. As a control each version's responses are also scored by the engine of another one.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.repeats import progress
from qurl_megatron.config import load
from qurl_megatron.errors import ConfigError
from qurl_megatron.fleet.client import EngineClient
from qurl_megatron.training.fresh_scores import engine_scores, fresh_engine
from qurl_megatron.training.rollout_file import path_of, read_rollouts
from qurl_megatron.training.state import RECIPE, checkpoints
from qurl_megatron.types import Sample


def recorded(run_dir: Path, version: int, limit: int) -> list[Sample]:
    """The first distinct responses that were generated wholly at ``version``."""
    path = path_of(run_dir, version + 1)
    if not path.is_file():
        return []
    found: dict[tuple, Sample] = {}
    for one in read_rollouts(path):
        sample = one.sample
        # What an environment wrote has no version, and no engine's log-probs.
        if sample.written.all() and {v for v, _ in sample.versions} == {version}:
            key = (*sample.prompt.input_ids, -1, *sample.response_ids.tolist())
            found.setdefault(key, sample)
    return list(found.values())[:limit]


def differences(client: EngineClient, samples: Sequence[Sample]) -> list[float]:
    """|recorded - scored| of every response token's log-prob that the engine can score."""
    scored = engine_scores(client, samples, temperature=1.0)
    pairs = zip(samples, scored, strict=True)
    return [
        d
        for s, one in pairs
        if one is not None
        for d in np.abs(s.behaviour_log_probs - one).tolist()
    ]


def run(options: argparse.Namespace) -> list[Case]:
    """One case per version that has a checkpoint and responses."""
    run_dir: Path = options.run_dir
    config = load(run_dir / RECIPE)
    if config.quant.scheme != "none" and config.quant.rounding != "nearest":
        raise ConfigError(
            f"{run_dir} published codes that were drawn (quant.rounding={config.quant.rounding}), "
            "and a fresh engine rounds to nearest; have qurl rescore hold a step against the actor"
        )
    cases = []
    for checkpoint in checkpoints(run_dir):
        version = int(checkpoint.name.removeprefix("step_"))
        responses = recorded(run_dir, version, options.responses)
        others = recorded(run_dir, version - 1, options.responses)
        if not responses:
            continue
        with fresh_engine(
            checkpoint, config.rollout, scheme=config.quant.scheme, dtype=config.model.dtype
        ) as client:
            same, other = differences(client, responses), differences(client, others)
        if not same:
            continue
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
