"""SGLang's ``/generate``: from JSON to sequences, and back.

A parameter that this engine does not implement is refused by name. Ignoring it would sample from
another distribution than the caller believes, which no later check could find.
"""

import base64
import random
import uuid
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from qurl_megatron.engines.embedded.engine import Sequence
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.record import LARGEST, Malformed, Record, Value, convert

Token = Annotated[int, Meta(ge=0)]
Number = Annotated[float, Meta(ge=0, le=LARGEST)]
Nothing = Annotated[float, Meta(ge=0, le=0)]


class Sampling(Record, frozen=True):
    """Sampling parameters, with SGLang's defaults."""

    max_new_tokens: Annotated[int, Meta(ge=1)] = 128
    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    sampling_seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False

    # Rollouts send these neutral values, because a server may prefer others.
    min_p: Nothing = 0
    min_new_tokens: Nothing = 0
    frequency_penalty: Nothing = 0
    presence_penalty: Nothing = 0
    repetition_penalty: Annotated[float, Meta(ge=1, le=1)] = 1


class Body(Record, frozen=True):
    """A request with one prompt or a list of prompts."""

    input_ids: Annotated[list, Meta(min_length=1)]
    sampling_params: Any = None
    rid: Any = None
    return_logprob: bool = False
    return_routed_experts: bool = False


@dataclass(frozen=True)
class RequestLimits:
    vocab: int
    max_total_tokens: int
    eos: tuple[int, ...]
    routed: bool = False  # the model has experts


@dataclass(frozen=True)
class Generation:
    """One parsed request: a sequence per prompt, and how to answer."""

    sequences: list[Sequence]
    batched: bool
    log_probs: bool
    experts: bool = False

    def answer(self) -> dict | list[dict]:
        """Return the body of the answer; all sequences must have ended."""
        answers = [_answer(each, self.log_probs, self.experts) for each in self.sequences]
        return answers if self.batched else answers[0]


def parse_generate(body: dict, limits: RequestLimits) -> Generation:
    """Check a /generate body and turn it into sequences.

    Raises:
        ConfigError: malformed, unsupported or too long; nothing of the request has been queued.
    """
    request = _checked(Body, "/generate", body)
    batched = isinstance(request.input_ids[0], list)
    prompts = _checked(
        list[Annotated[list[Token], Meta(min_length=1)]],
        "input_ids",
        request.input_ids if batched else [request.input_ids],
    )
    count = len(prompts)
    params = _per_prompt(Sampling, "sampling_params", request.sampling_params or {}, count)
    rids = _per_prompt(str | None, "rid", request.rid, count)
    sequences = [
        _sequence(prompt, sampling, rid, limits)
        for prompt, sampling, rid in zip(prompts, params, rids, strict=True)
    ]
    if request.return_routed_experts and not limits.routed:
        raise ConfigError("return_routed_experts: the model has no experts; leave it out")
    return Generation(sequences, batched, request.return_logprob, request.return_routed_experts)


def _checked(kind: type[Value], name: str, value: object) -> Value:
    if isinstance(value, dict):  # fields that are null count as left out, as SGLang takes them
        value = {name: each for name, each in value.items() if each is not None}
    try:
        return convert(kind, value)
    except Malformed as error:
        raise ConfigError(
            f"{name} is not as the embedded engine takes it: {error}; leave out or correct it"
        ) from None


def _per_prompt(kind: Any, name: str, value: object, count: int) -> list:
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise ConfigError(f"{name} has {len(values)} entries for {count} prompts")
    return [_checked(kind, name, each) for each in values]


def _sequence(
    prompt: list[int], sampling: Sampling, rid: str | None, limits: RequestLimits
) -> Sequence:
    if max(prompt) >= limits.vocab:
        raise ConfigError(f"every token id must be an integer in [0, {limits.vocab})")
    if len(prompt) + sampling.max_new_tokens > limits.max_total_tokens:
        raise ConfigError(
            f"{len(prompt)} prompt tokens + sampling_params.max_new_tokens "
            f"{sampling.max_new_tokens} exceed the {limits.max_total_tokens} tokens that one "
            "request may take here (by cache size and context length)"
        )
    seed = sampling.sampling_seed
    eos = () if sampling.ignore_eos else limits.eos
    return Sequence(
        rid=rid or uuid.uuid4().hex,
        prompt=prompt,
        max_new_tokens=sampling.max_new_tokens,
        seed=random.getrandbits(63) if seed is None else seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_ids=frozenset((*sampling.stop_token_ids, *eos)),
    )


def _answer(sequence: Sequence, log_probs: bool, experts: bool) -> dict:
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
        # SGLang's third value is the token's text.
        pairs = zip(sequence.log_probs, ids, strict=True)
        meta["output_token_logprobs"] = [[log_prob, token, None] for log_prob, token in pairs]
    if experts:
        meta["routed_experts"] = base64.b64encode(sequence.experts).decode()
    return {"output_ids": ids, "meta_info": meta}
