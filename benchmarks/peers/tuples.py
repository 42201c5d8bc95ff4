"""A step without arrays: samples as Python tuples, pickled to every rank, and a message for each
engine rank made from its dataclasses. What is straightforward, and enough for a small model.
"""

import base64
import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from qurl_megatron.types import Prompt
from qurl_megatron.wire.message import FORMAT, Message


@dataclass(frozen=True, slots=True)
class TupleSample:
    prompt: Prompt
    response_ids: tuple[int, ...]
    behaviour_log_probs: tuple[float, ...]
    finish_reason: str
    versions: tuple[int, ...]


def parse(prompts: Sequence[Prompt], content: bytes) -> list[TupleSample]:
    """Samples from one answer of an engine, checked as ours are."""
    found = []
    for prompt, answer in zip(prompts, json.loads(content), strict=True):
        ids, meta = list(answer["output_ids"]), answer["meta_info"]
        log_probs = [float(triple[0]) for triple in meta["output_token_logprobs"]]
        assert [triple[1] for triple in meta["output_token_logprobs"]] == ids
        assert all(math.isfinite(value) and value <= 1e-4 for value in log_probs)
        versions: list[int] = []
        for span in meta["weight_versions"]:
            versions += [int(span["version"].partition("@")[0])] * (span["end"] - span["start"])
        found.append(
            TupleSample(
                prompt, tuple(ids), tuple(log_probs), meta["finish_reason"]["type"], tuple(versions)
            )
        )
    return found


def tensors(samples: Sequence[TupleSample]) -> tuple[Tensor, Tensor]:
    """Token ids, int64, and log-probs, float32, of a microbatch."""
    ids = [torch.tensor(s.prompt.input_ids + s.response_ids) for s in samples]
    log_probs = torch.tensor([value for s in samples for value in s.behaviour_log_probs])
    return torch.cat(ids), log_probs.float()


def message_body(message: Message, ranks: int) -> bytes:
    """The body of one call to an engine, whose ranks all get this message."""
    rows = []
    for _ in range(ranks):
        text = json.dumps({"format": FORMAT, **asdict(message)})
        rows.append(base64.b64encode(pickle.dumps([(text, None)])).decode())
    return json.dumps({"serialized_named_tensors": rows}).encode()
