"""SGLang's native /generate protocol: JSON in, sequences out, and back.

A parameter this engine does not implement is refused by name. Ignoring it would sample from another
distribution than the caller believes, which no later check could find.
"""

import random
import uuid
from dataclasses import dataclass

from qurl_megatron.errors import ConfigError
from qurl_megatron.rollout.embedded.engine import Sequence
from qurl_megatron.rollout.embedded.sampling import sample_seed

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's

# Concern text or transport only; without a tokenizer they change nothing.
IGNORED_SAMPLING = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"}
IGNORED_REQUEST = {"return_text_in_logprobs", "stream", "logprob_start_len", "top_logprobs_num"}
INERT = {"stream": (False,), "logprob_start_len": (-1,), "top_logprobs_num": (0,)}


@dataclass(frozen=True)
class Limits:
    """What a request is checked against."""

    vocab: int
    max_total_tokens: int
    eos: tuple[int, ...]


@dataclass(frozen=True)
class Generation:
    """One parsed request: its sequences, prompt-major then sample, and how to answer."""

    sequences: list[Sequence]
    single: bool
    log_probs: list[bool]  # per sequence

    def answer(self) -> dict | list[dict]:
        bodies = [_body(*pair) for pair in zip(self.sequences, self.log_probs, strict=True)]
        return bodies[0] if self.single else bodies


def parse_generate(body: object, limits: Limits) -> Generation:
    """Check a /generate body and turn it into sequences.

    Raises:
        ConfigError: malformed, unsupported or too long; nothing of the request has been queued.
    """
    if not isinstance(body, dict):
        raise ConfigError("the body must be a JSON object")
    if body.get("text") is not None:
        raise ConfigError("this engine has no tokenizer: send input_ids instead of text")
    _check_keys(body)
    input_ids = body.get("input_ids")
    if not isinstance(input_ids, list) or not input_ids:
        raise ConfigError(
            "input_ids must be a non-empty list of token ids, or a list of such lists"
        )
    batched = isinstance(input_ids[0], list)
    prompts = input_ids if batched else [input_ids]
    params = _per_prompt(body.get("sampling_params") or {}, len(prompts), "sampling_params")
    log_probs = _per_prompt(
        bool_or_list(body.get("return_logprob")), len(prompts), "return_logprob"
    )
    rids = _request_ids(body.get("rid"), len(prompts))
    sequences, wanted = [], []
    for prompt, own, log_prob, rid in zip(prompts, params, log_probs, rids, strict=True):
        samples = _sequences(prompt, own, rid, limits)
        sequences += samples
        wanted += [bool(log_prob)] * len(samples)
    return Generation(sequences, single=not batched and len(sequences) == 1, log_probs=wanted)


def bool_or_list(value: object) -> object:
    return False if value is None else value


def _check_keys(body: dict) -> None:
    known = {"input_ids", "text", "sampling_params", "return_logprob", "rid"} | IGNORED_REQUEST
    for key, value in body.items():
        if value is None:
            continue
        if key not in known:
            raise ConfigError(f"{key} is not supported by the embedded engine")
        if key in INERT and value not in INERT[key]:
            raise ConfigError(f"{key} = {value!r} is not supported by the embedded engine")


def _per_prompt(value: object, count: int, name: str) -> list:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"{name} has {len(value)} entries for {count} prompts")
    return value


def _request_ids(rid: object, count: int) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [rid] if count == 1 else [f"{rid}_{index}" for index in range(count)]
    if not isinstance(rid, list) or not all(isinstance(one, str) for one in rid):
        raise ConfigError("rid must be a string or a list of strings")
    return _per_prompt(rid, count, "rid")


def _sequences(prompt: object, params: object, rid: str, limits: Limits) -> list[Sequence]:
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError("every prompt must be a non-empty list of token ids")
    if not all(type(token) is int and 0 <= token < limits.vocab for token in prompt):
        raise ConfigError(f"every token id must be an integer in [0, {limits.vocab})")
    if not isinstance(params, dict):
        raise ConfigError("sampling_params must be an object, or one object per prompt")
    given = _Params({key: value for key, value in params.items() if value is not None})
    count = given.number("n", 1, int, minimum=1)
    max_new = given.number("max_new_tokens", DEFAULT_MAX_NEW_TOKENS, int, minimum=1)
    if len(prompt) + max_new > limits.max_total_tokens:
        raise ConfigError(
            f"{len(prompt)} prompt tokens + max_new_tokens {max_new} exceed the "
            f"{limits.max_total_tokens} tokens that one request may take here (by cache "
            "size and context length)"
        )
    seed = given.number("sampling_seed", random.getrandbits(63), int, minimum=0)
    if seed >= 2**63:
        raise ConfigError(f"sampling_seed must be below 2**63, got {seed}")
    temperature = given.number("temperature", 1.0, float, minimum=0)
    top_p = given.number("top_p", 1.0, float, minimum=0)
    top_k = given.number("top_k", -1, int, minimum=-1)
    stop_ids = given.stop_ids(limits.eos)
    given.refuse_rest()
    return [
        Sequence(
            rid=rid if count == 1 else f"{rid}_{index}",
            prompt=prompt,
            max_new_tokens=max_new,
            seed=sample_seed(seed, index),
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_ids=stop_ids,
        )
        for index in range(count)
    ]


class _Params:
    """Takes known keys out of a dict; what is left over at the end is an error."""

    def __init__(self, left: dict) -> None:
        self.left = left

    def number(self, key: str, default: float, kind: type, *, minimum: float):
        value = self.left.pop(key, default)
        valid = type(value) is int or (kind is float and type(value) is float)
        if not valid or not minimum <= value < float("inf"):
            raise ConfigError(
                f"sampling_params.{key} must be {kind.__name__} >= {minimum}, got {value!r}"
            )
        return kind(value)

    def stop_ids(self, eos: tuple[int, ...]) -> frozenset[int]:
        extra = self.left.pop("stop_token_ids", [])
        if not isinstance(extra, list) or not all(type(token) is int for token in extra):
            raise ConfigError(
                f"sampling_params.stop_token_ids must be a list of ids, got {extra!r}"
            )
        return frozenset(extra) | (
            frozenset() if self.left.pop("ignore_eos", False) else frozenset(eos)
        )

    def refuse_rest(self) -> None:
        inert = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_p": 0}
        for key, value in self.left.items():
            if key in IGNORED_SAMPLING or (key in inert and value == inert[key]):
                continue
            if key == "min_new_tokens" and value == 0:
                continue
            raise ConfigError(
                f"sampling_params.{key} = {value!r} is not supported by the embedded engine"
            )


def _body(sequence: Sequence, log_probs: bool) -> dict:
    start, spans = 0, []
    for version, end in sequence.versions:
        spans.append({"version": version, "start": start, "end": end})
        start = end
    meta = {
        "id": sequence.rid,
        "finish_reason": sequence.finish_reason,
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": len(sequence.output_ids),
        "cached_tokens": 0,
        "weight_version": spans[-1]["version"] if spans else None,
        "weight_versions": spans,
    }
    if log_probs:
        pairs = zip(sequence.log_probs, sequence.output_ids, strict=True)
        meta["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
    return {"text": "", "output_ids": sequence.output_ids, "meta_info": meta}
