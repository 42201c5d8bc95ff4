"""SGLang's native /generate protocol: JSON in, sequences out, and back.

A parameter this engine does not implement is refused by name. Ignoring it would sample from another
distribution than the caller believes, which no later check could find.
"""

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qurl_megatron.engines.embedded.engine import Sequence
from qurl_megatron.engines.embedded.sampling import sample_seed
from qurl_megatron.engines.embedded.stream import Reader, StreamProgress, Style
from qurl_megatron.engines.embedded.text_codec import TextCodec
from qurl_megatron.errors import ConfigError

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's

Spelling = Callable[[str], str]  # a sampling parameter's name as the client knows it

KNOWN = {
    "input_ids",
    "text",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "return_text_in_logprobs",
    "stream",
    "rid",
}
# What clients send all the same, and the values that ask for nothing.
INERT: dict[str, tuple] = {
    "top_logprobs_num": (0,),
    "lora_path": ("",),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
}
INERT_SAMPLING: dict[str, tuple] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_new_tokens": (0,),
    "stop": ("", []),
    "spaces_between_special_tokens": (True, False),  # of tokenizers in Python only
}


@dataclass(frozen=True)
class RequestLimits:
    """What a request is checked against."""

    vocab: int
    max_total_tokens: int
    eos: tuple[int, ...]


@dataclass(frozen=True)
class Generation:
    """One parsed request: its sequences, prompt-major then sample, and how to answer."""

    sequences: list[Sequence]
    styles: list[Style]  # per sequence
    single: bool
    stream: bool
    interval: int | None  # tokens per event of a stream; None: as the engine is set

    def answer(self, codec: TextCodec | None) -> dict | list[dict]:
        """The body, once all sequences have ended."""
        bodies = [answer_body(progress) for progress in self.whole(codec)]
        return bodies[0] if self.single else bodies

    def whole(self, codec: TextCodec | None) -> list[StreamProgress]:
        pairs = zip(self.sequences, self.styles, strict=True)
        return [Reader(sequence, style, codec).whole() for sequence, style in pairs]

    def event(self, index: int, progress: StreamProgress, *, incremental: bool) -> dict:
        """One of a stream's bodies; only where there are several sequences it has an index."""
        body = answer_body(progress, incremental=incremental)
        return body if self.single else {**body, "index": index}


def parse_generate(
    body: object,
    limits: RequestLimits,
    codec: TextCodec | None = None,
    spelled: Spelling | None = None,
) -> Generation:
    """Check a /generate body and turn it into sequences.

    Args:
        codec: for prompts that are text.
        spelled: for messages; None: as here.

    Raises:
        ConfigError: malformed, unsupported or too long; nothing of the request has been queued.
    """
    if not isinstance(body, dict):
        raise ConfigError("the body must be a JSON object")
    _check_keys(body)
    prompts, batched = _prompts(body, codec)
    params = _per_prompt(body.get("sampling_params") or {}, len(prompts), "sampling_params")
    asked = body.get("return_logprob")
    log_probs = _per_prompt(False if asked is None else asked, len(prompts), "return_logprob")
    rids = _request_ids(body.get("rid"), len(prompts))
    sequences, styles, interval = [], [], None
    for prompt, own, log_prob, rid in zip(prompts, params, log_probs, rids, strict=True):
        given = _Params(own, spelled or "sampling_params.{}".format)
        samples = _sequences(prompt, given, rid, limits)
        interval = given.number("stream_interval", 0, int, minimum=0) or interval
        for sample in samples:
            sample.scores_prompt = bool(log_prob) and body.get("logprob_start_len") == 0
        style = given.style(bool(log_prob), bool(body.get("return_text_in_logprobs")))
        given.refuse_rest()
        sequences += samples
        styles += [style] * len(samples)
    single = not batched and len(sequences) == 1
    return Generation(sequences, styles, single, bool(body.get("stream")), interval)


def _check_keys(body: dict) -> None:
    for key, value in body.items():
        if value is None or key in KNOWN:
            continue
        if key not in INERT:
            raise ConfigError(f"{key} is not supported by the embedded engine")
        if value not in INERT[key]:
            raise ConfigError(f"{key} = {value!r} is not supported by the embedded engine")
    if (start := body.get("logprob_start_len")) not in (None, -1, 0):
        raise ConfigError(
            f"logprob_start_len must be 0 or -1 for the embedded engine, got {start!r}"
        )
    if body.get("stream") not in (None, True, False):
        raise ConfigError(f"stream must be true or false, got {body['stream']!r}")


def _prompts(body: dict, codec: TextCodec | None) -> tuple[list, bool]:
    """The prompts as token ids, not checked yet, and whether they came as a list of prompts."""
    text, ids = body.get("text"), body.get("input_ids")
    if text is None:
        if not isinstance(ids, list) or not ids:
            raise ConfigError(
                "input_ids must be a non-empty list of token ids, or a list of such lists"
            )
        batched = isinstance(ids[0], list)
        return (ids if batched else [ids]), batched
    if ids is not None:
        raise ConfigError("a request has text or input_ids, not both")
    if codec is None:
        raise ConfigError("this engine has no tokenizer: send input_ids instead of text")
    texts = text if isinstance(text, list) else [text]
    if not texts or not all(isinstance(one, str) and one for one in texts):
        raise ConfigError("text must be a non-empty text, or a list of such texts")
    return [codec.encode(one) for one in texts], isinstance(text, list)


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


def _sequences(prompt: object, given: "_Params", rid: str, limits: RequestLimits) -> list[Sequence]:
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError("every prompt must be a non-empty list of token ids")
    if not all(type(token) is int and 0 <= token < limits.vocab for token in prompt):
        raise ConfigError(f"every token id must be an integer in [0, {limits.vocab})")
    count = given.number("n", 1, int, minimum=1)
    max_new = given.number("max_new_tokens", DEFAULT_MAX_NEW_TOKENS, int, minimum=1)
    if len(prompt) + max_new > limits.max_total_tokens:
        raise ConfigError(
            f"{len(prompt)} prompt tokens + {given.spelled('max_new_tokens')} {max_new} exceed the "
            f"{limits.max_total_tokens} tokens that one request may take here (by cache "
            "size and context length)"
        )
    seed = given.number("sampling_seed", random.getrandbits(63), int, minimum=0)
    if seed >= 2**63:
        raise ConfigError(f"{given.spelled('sampling_seed')} must be below 2**63, got {seed}")
    temperature = given.number("temperature", 1.0, float, minimum=0)
    top_p = given.number("top_p", 1.0, float, minimum=0)
    top_k = given.number("top_k", -1, int, minimum=-1)
    stop_ids = given.stop_ids(limits.eos)
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
    """Takes known keys out of sampling_params; what is left over at the end is an error."""

    def __init__(self, params: object, spelled: Spelling) -> None:
        if not isinstance(params, dict):
            raise ConfigError("sampling_params must be an object, or one object per prompt")
        self.left = {key: value for key, value in params.items() if value is not None}
        self.spelled = spelled

    def number(self, key: str, default: float, kind: type, *, minimum: float):
        value = self.left.pop(key, default)
        valid = type(value) is int or (kind is float and type(value) is float)
        if not valid or not minimum <= value < float("inf"):
            raise ConfigError(
                f"{self.spelled(key)} must be {kind.__name__} >= {minimum}, got {value!r}"
            )
        return kind(value)

    def style(self, log_probs: bool, token_texts: bool) -> Style:
        return Style(
            log_probs,
            token_texts,
            skip_special=bool(self.left.pop("skip_special_tokens", True)),
            trim_stop=not self.left.pop("no_stop_trim", False),
        )

    def stop_ids(self, eos: tuple[int, ...]) -> frozenset[int]:
        extra = self.left.pop("stop_token_ids", [])
        if not isinstance(extra, list) or not all(type(token) is int for token in extra):
            raise ConfigError(
                f"{self.spelled('stop_token_ids')} must be a list of ids, got {extra!r}"
            )
        return frozenset(extra) | (
            frozenset() if self.left.pop("ignore_eos", False) else frozenset(eos)
        )

    def refuse_rest(self) -> None:
        for key, value in self.left.items():
            if value not in INERT_SAMPLING.get(key, ()):
                raise ConfigError(
                    f"{self.spelled(key)} = {value!r} is not supported by the embedded engine"
                )


def answer_body(progress: StreamProgress, *, incremental: bool = False) -> dict:
    """What SGLang says of one sequence, ended or not.

    Args:
        incremental: only what its reader does not know yet, of text, ids and log-probs.
    """
    first, first_text = 0, 0
    if incremental:
        first, first_text = progress.known_tokens, progress.known_text
    sequence = progress.sequence
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": progress.finish_reason,
        "prompt_tokens": len(sequence.prompt),
        "weight_version": progress.version,
        "num_retractions": sequence.retractions,
        "reasoning_tokens": 0,
        "completion_tokens": len(progress.ids),
        "cached_tokens": 0,
    }
    if progress.log_probs is not None:
        scored = [None, *sequence.prompt_log_probs] if sequence.scores_prompt else []
        meta["input_token_logprobs"] = [
            [log_prob, token, None]
            for log_prob, token in zip(scored, sequence.prompt, strict=False)
        ]
        meta["output_token_logprobs"] = progress.log_probs[first:]
        meta["output_token_logprobs_length"] = len(progress.log_probs)
    if progress.finish_reason is not None:
        meta["weight_versions"] = version_spans(sequence)
    return {
        "text": progress.text[first_text:],
        "output_ids": progress.ids[first:],
        "meta_info": meta,
    }


def version_spans(sequence: Sequence) -> list[dict]:
    start, spans = 0, []
    for version, end in sequence.versions:
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans
