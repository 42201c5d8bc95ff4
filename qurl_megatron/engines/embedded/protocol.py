"""SGLang's ``/generate``: JSON in, sequences out, and back.

A parameter this engine does not implement is refused by name. Ignoring it would sample from another
distribution than the caller believes, which no later check could find.
"""

import random
import uuid
from dataclasses import dataclass
from typing import Any

from qurl_megatron.engines.embedded.engine import Sequence
from qurl_megatron.kit.errors import ConfigError

KNOWN = {"input_ids", "sampling_params", "return_logprob", "logprob_start_len", "rid"}

# Sampling parameters: type, default (SGLang's), smallest value.
NUMBERS: dict[str, tuple[type, float, float]] = {
    "max_new_tokens": (int, 128, 1),
    "temperature": (float, 1.0, 0),
    "top_p": (float, 1.0, 0),
    "top_k": (int, -1, -1),
}
KNOWN_PARAMS = {*NUMBERS, "sampling_seed", "stop_token_ids", "ignore_eos"}

# Sent by every rollout, because a server may prefer other values: these ask for nothing.
NEUTRAL = {
    "min_p": 0,
    "min_new_tokens": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
}


@dataclass(frozen=True)
class RequestLimits:
    """Limits that a request is checked against."""

    vocab: int
    max_total_tokens: int
    eos: tuple[int, ...]


@dataclass(frozen=True)
class Generation:
    """One parsed request: a sequence per prompt, and how to answer."""

    sequences: list[Sequence]
    batched: bool
    log_probs: bool

    def answer(self) -> dict | list[dict]:
        """Return the body, once all sequences have ended."""
        answers = [_answer(sequence, self.log_probs) for sequence in self.sequences]
        return answers if self.batched else answers[0]


def parse_generate(body: dict, limits: RequestLimits) -> Generation:
    """Check a /generate body and turn it into sequences.

    Raises:
        ConfigError: malformed, unsupported or too long; nothing of the request has been queued.
    """
    _refuse_unknown(body, KNOWN, {"stream": False})
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids:
        raise ConfigError(
            "input_ids must be a non-empty list of token ids, or a list of such lists"
        )
    if (start := body.get("logprob_start_len")) not in (None, 0):
        raise ConfigError(f"logprob_start_len must be 0 for the embedded engine, got {start!r}")
    batched, log_probs = isinstance(ids[0], list), bool(body.get("return_logprob"))
    prompts = ids if batched else [ids]
    params = _per_prompt("sampling_params", body.get("sampling_params") or {}, len(prompts))
    rids = _per_prompt("rid", body.get("rid"), len(prompts))
    sequences = [
        _sequence(prompt, sampling, rid, limits)
        for prompt, sampling, rid in zip(prompts, params, rids, strict=True)
    ]
    for sequence in sequences:
        sequence.scores_prompt = log_probs and start == 0
    return Generation(sequences, batched, log_probs)


def _refuse_unknown(given: dict, known: set[str], neutral: dict, prefix: str = "") -> None:
    """
    Args:
        neutral: further keys, and the value of each that asks for nothing.
    """
    for key, value in given.items():
        if value is None or key in known or (key in neutral and value == neutral[key]):
            continue
        raise ConfigError(
            f"{prefix}{key} = {value!r} is not supported by the embedded engine; leave it out"
        )


def _per_prompt(name: str, value: object, count: int) -> list:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"{name} has {len(value)} entries for {count} prompts")
    return value


def _sequence(prompt: object, params: object, rid: object, limits: RequestLimits) -> Sequence:
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError("every prompt must be a non-empty list of token ids")
    if not all(type(token) is int and 0 <= token < limits.vocab for token in prompt):
        raise ConfigError(f"every token id must be an integer in [0, {limits.vocab})")
    if not isinstance(rid, str | None):
        raise ConfigError(f"rid must be a string or a list of strings, got {rid!r}")
    if not isinstance(params, dict):
        raise ConfigError("sampling_params must be an object, or one object per prompt")
    params = {key: value for key, value in params.items() if value is not None}
    _refuse_unknown(params, KNOWN_PARAMS, NEUTRAL, "sampling_params.")
    numbers: dict[str, Any] = {name: _number(params, name, *row) for name, row in NUMBERS.items()}
    if len(prompt) + numbers["max_new_tokens"] > limits.max_total_tokens:
        raise ConfigError(
            f"{len(prompt)} prompt tokens + sampling_params.max_new_tokens "
            f"{numbers['max_new_tokens']} exceed the {limits.max_total_tokens} tokens that one "
            "request may take here (by cache size and context length)"
        )
    seed = _number(params, "sampling_seed", int, random.getrandbits(63), 0)
    if seed >= 2**63:
        raise ConfigError(f"sampling_params.sampling_seed must be below 2**63, got {seed}")
    stop_ids = params.get("stop_token_ids", [])
    if not isinstance(stop_ids, list) or not all(type(token) is int for token in stop_ids):
        raise ConfigError(f"sampling_params.stop_token_ids must be a list of ids, got {stop_ids!r}")
    eos = () if params.get("ignore_eos") else limits.eos
    return Sequence(
        rid=rid or uuid.uuid4().hex,
        prompt=prompt,
        seed=seed,
        stop_ids=frozenset((*stop_ids, *eos)),
        **numbers,
    )


def _number(params: dict, name: str, kind: type, default: float, least: float) -> Any:
    value = params.get(name, default)
    valid = type(value) is int or (kind is float and type(value) is float)
    if not valid or not least <= value < float("inf"):
        raise ConfigError(
            f"sampling_params.{name} must be {kind.__name__} >= {least}, got {value!r}"
        )
    return kind(value)


def _answer(sequence: Sequence, log_probs: bool) -> dict:
    """Return an ended sequence as SGLang reports it."""
    ids, versions = sequence.output_ids, sequence.versions
    starts = [0, *(end for _, end in versions)]
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": sequence.finish_reason,
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": versions[-1][0] if versions else None,
        "weight_versions": [
            {"version": version, "start": start, "end": end}
            for start, (version, end) in zip(starts, versions, strict=False)
        ],
    }
    if log_probs:
        scored = [None, *sequence.prompt_log_probs] if sequence.scores_prompt else []
        meta["input_token_logprobs"] = _triples(scored, sequence.prompt)
        meta["output_token_logprobs"] = _triples(sequence.log_probs, ids)
    return {"output_ids": ids, "meta_info": meta}


def _triples(log_probs: list, ids: list[int]) -> list[list]:
    """Pair log-probs with their tokens; the third place is for a text, which nobody reads."""
    return [[log_prob, token, None] for log_prob, token in zip(log_probs, ids, strict=False)]
