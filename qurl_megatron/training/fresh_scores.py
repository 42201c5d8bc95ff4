"""Recorded samples scored again from a checkpoint alone: by a new engine, and by the actor.

The engine has never known another version, and the actor has never been updated, so neither can be
wrong in the way that a published version or a running trainer is.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qurl_megatron.checkpoints.job import run
from qurl_megatron.checkpoints.places import description_of
from qurl_megatron.checkpoints.source import open_checkpoint
from qurl_megatron.checkpoints.to_huggingface import to_huggingface, to_quantized
from qurl_megatron.config import RolloutConfig, RunConfig
from qurl_megatron.config.env import prepare_cuda, use_transformer_engine
from qurl_megatron.data.responses import Responses
from qurl_megatron.fleet.client import EngineClient
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.launch import launch, tell
from qurl_megatron.tensors.arch import arch_of
from qurl_megatron.training.rollout_file import gather_proximal, read_rollouts
from qurl_megatron.types import Sample


@contextmanager
def fresh_engine(
    checkpoint: Path, rollout: RolloutConfig, *, scheme: str, dtype: str
) -> Iterator[EngineClient]:
    """Start an engine of the run's kind.

    Embedded ones quantize the checkpoint themselves, SGLang loads an export of it.

    Raises:
        ConfigError: it cannot be started.
    """
    alone = replace(rollout, engines=1, engine_first_gpu=0, urls=(), rendezvous="", colocate=False)
    with tempfile.TemporaryDirectory(prefix="qurl-rescore-") as folder:
        model = checkpoint
        if not rollout.kind.quantizes:
            source, model = open_checkpoint(checkpoint), Path(folder) / "model"
            if scheme == "none":
                run(to_huggingface(source, model))
            else:
                run(to_quantized(source, model, scheme=scheme, fmt="sglang", dtype=torch.float32))
        vocabulary = arch_of(description_of(checkpoint)).vocab
        with Fleet(
            alone,
            model,
            scheme=scheme,
            dtype=dtype,
            log_dir=folder,
            vocabulary=vocabulary,
            fixed=True,
        ) as fleet:
            yield fleet.clients[0]


def engine_scores(
    client: EngineClient, samples: Sequence[Sample], temperature: float
) -> list[np.ndarray | None]:
    """Return each sample's log-probs of the tokens that the policy wrote, float32.

    None where a sample leaves no room in the engine for the token that scoring asks for.
    """
    longest = client.longest_scored()
    log_probs: list[np.ndarray | None] = []
    for sample in samples:
        prompt, response = list(sample.prompt.input_ids), sample.response_ids.tolist()
        if longest is not None and len(prompt) + len(response) > longest:
            log_probs.append(None)
            continue
        scored = client.score(prompt + response, start=len(prompt), temperature=temperature)
        log_probs.append(np.array(scored, np.float32)[sample.written])
    return log_probs


def actor_scores(
    config: RunConfig, checkpoint: Path, rollouts: Path, count: int
) -> list[np.ndarray] | int:
    """Score by the full-precision actor, on ranks of this machine, split as the run's is.

    Args:
        rollouts: file of samples, of which the first ``count`` are scored.

    Returns:
        The log-probs; or the exit code of a rank that failed, which printed the reason.
    """
    config = actor_recipe(config, checkpoint, count)
    with tempfile.TemporaryDirectory(prefix="qurl-rescore-") as folder:
        out = Path(folder) / "scores.npz"
        code = launch(score_rank, (config, rollouts, count, out), config.parallel.world_size)
        if code:
            return code
        with np.load(out) as scores:
            return [scores[str(index)] for index in range(count)]


def actor_recipe(config: RunConfig, checkpoint: Path, count: int) -> RunConfig:
    """Return the run's recipe for ranks that score ``count`` responses once."""
    train = replace(config.train, micro_batch=math.gcd(count, config.train.micro_batch))
    return replace(
        config,
        model=replace(config.model, path=str(checkpoint)),
        parallel=replace(config.parallel, data=1),
        algo=replace(config.algo, minibatches=1, deal="responses", bypass=False),
        train=train,
    )


def score_rank(config: RunConfig, rollouts: Path, count: int, out: Path) -> int:
    """Score as one rank of ``actor_scores``; return its exit code."""
    prepare_cuda(config.parallel)
    try:
        use_transformer_engine()
        _score(config, rollouts, count, out)
    except ConfigError as error:
        tell(f"qurl: {error}")
        return 2
    return 0


def _score(config: RunConfig, rollouts: Path, count: int, out: Path) -> None:
    from qurl_megatron.actor.megatron import megatron_runtime
    from qurl_megatron.training.layout import lay_out
    from qurl_megatron.training.losses import Scorer
    from qurl_megatron.training.models import policy_of  # Megatron comes with it
    from qurl_megatron.training.step import attach_scores

    samples = [entry.sample for entry in read_rollouts(rollouts)[:count]]
    with megatron_runtime(config.parallel, seed=config.train.seed) as ranks:
        policy = policy_of(config, ranks)
        (batches,) = lay_out(ranks, Responses.of(samples), config, step=1)
        score = Scorer(policy, config.rollout.temperature)
        scores = gather_proximal(ranks, attach_scores(policy, batches, score, with_reference=False))
        if ranks.leads:
            # Numbers, and so none of savez's own options, which the types cannot know.
            named: dict[str, Any] = {str(index): entry for index, entry in scores.items()}
            np.savez(out, **named)
