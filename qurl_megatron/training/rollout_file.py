"""The samples of one step on disk: ``run_dir/rollouts/step_000012.jsonl``, a JSON object each.

Beside the engines' log-probs stand the full-precision actor's of the same tokens. So the file is
written between scoring and training: whole, and also where the update then fails.

Shapes: R = responses of the step; per-token lists have one entry for each response token, null
where the policy did not write it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.types import Sample

Proximal = Mapping[int, np.ndarray]
"""Log-probs of the written tokens, float32, by the response's place in the step; it has no entry
for a response that was not scored."""


def path_of(run_dir: Path, step: int) -> Path:
    return run_dir / "rollouts" / f"step_{step:06d}.jsonl"


def gather_proximal(ranks: Ranks, batches: Sequence[TokenBatch]) -> Proximal:
    """Gather all ranks' log-probs on the leading rank; others get nothing. All ranks call it.

    Args:
        batches: this rank's microbatches of the step, scored.
    """
    own_scores: Proximal = {}
    if ranks.last_stage and ranks.counted:
        own_scores = {
            index: part.float().cpu().numpy()
            for batch in batches
            for index, part in zip(batch.indices, batch.proximal.split(batch.lengths), strict=True)
        }
    everywhere: list[Proximal] | None = [{}] * ranks.world_size if ranks.leads else None
    dist.gather_object(own_scores, everywhere)
    return {i: log_probs for part in everywhere or () for i, log_probs in part.items()}


def write_rollouts(path: Path, samples: Sequence[Sample], proximal: Proximal) -> None:
    """Write the samples of a step; the file appears whole.

    Args:
        samples: of one step, [R].
    """
    path.parent.mkdir(exist_ok=True)  # not a run's folder that was renamed meanwhile
    lines = []
    for index, sample in enumerate(samples):
        # A table's metadata may hold types that JSON lacks, such as dates.
        lines.append(json.dumps(_record(sample, proximal.get(index)), default=str) + "\n")
    write_whole(path, "".join(lines))


def _record(sample: Sample, proximal: np.ndarray | None) -> dict[str, Any]:
    record = {
        "prompt": asdict(sample.prompt),
        "response_ids": sample.response_ids.tolist(),
        "behaviour_log_probs": sample.behaviour_log_probs.tolist(),
        "proximal_log_probs": None if proximal is None else _spread(proximal, sample.written),
        "finish_reason": sample.finish_reason,
        "versions": sample.token_versions,
        "text": sample.text,
        "reward": sample.reward,
    }
    if not sample.written.all():
        record["loss_mask"] = sample.written.astype(int).tolist()
    if sample.failure:
        record["failure"] = asdict(sample.failure)
    return record


def _spread(log_probs: np.ndarray, written: np.ndarray) -> list[float | None]:
    """Return one entry per response token, None where the policy did not write it."""
    theirs = iter(log_probs.tolist())
    return [next(theirs) if is_own else None for is_own in written]
