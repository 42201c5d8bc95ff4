"""OpenAI's /v1/completions and /v1/models, as SGLang answers them.

A completion is a /generate request in other words, so it is turned into one: all checks are made
there, and a parameter that would change the distribution is refused by its name here too. Beyond
OpenAI's own parameters there are those of SGLang and vLLM that load generators send.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from qurl_megatron.engines.embedded.protocol import (
    Generation,
    RequestLimits,
    parse_generate,
    version_spans,
)
from qurl_megatron.engines.embedded.stream import StreamProgress
from qurl_megatron.engines.embedded.text_codec import TextCodec
from qurl_megatron.errors import ConfigError
from qurl_megatron.observe.clock import now

DEFAULT_MAX_TOKENS = 16  # OpenAI's

# Their names here; all others are the same.
RENAMED = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
SAMPLING = {
    *("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("stop", "stop_token_ids", "ignore_eos", "stream_interval"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
}
OWN = {"model", "prompt", "stream", "stream_options", "logprobs", "return_token_ids", "rid", "user"}
INERT: dict[str, tuple] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "lora_path": ("",),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (-1,),
}


@dataclass(frozen=True)
class Completion:
    """One parsed request, and how to answer it."""

    generation: Generation
    model: str
    log_probs: bool
    token_ids: bool
    usage_at_end: bool
    usage_always: bool
    created: int = field(default_factory=lambda: int(now()))

    def answer(self, codec: TextCodec | None) -> dict:
        """The body, once all sequences have ended."""
        parts = self.generation.whole(codec)
        spans = version_spans(parts[0].sequence)
        return {
            **self._head(parts[0]),
            "choices": [self._choice(index, part) for index, part in enumerate(parts)],
            "usage": _usage(parts),
            "metadata": {"weight_version": parts[0].version, "weight_versions": spans},
        }

    def chunk(self, index: int, progress: StreamProgress) -> dict:
        """One of a stream's bodies: what is new of one sequence."""
        return {
            **self._head(progress),
            "choices": [self._choice(index, progress)],
            "usage": _usage([progress]) if self.usage_always else None,
        }

    def last_chunks(self, parts: list[StreamProgress]) -> Iterator[dict]:
        """What follows when all sequences have ended."""
        if self.usage_at_end:
            told = {key: value for key, value in _usage(parts).items() if value is not None}
            yield {**self._head(parts[-1]), "choices": [], "usage": told}

    def _head(self, progress: StreamProgress) -> dict:
        return {
            "id": progress.sequence.rid,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _choice(self, index: int, progress: StreamProgress) -> dict:
        finish, first = progress.finish_reason or {}, progress.known_tokens
        choice = {
            "index": index,
            "text": progress.text[progress.known_text :],
            "logprobs": _log_probs((progress.log_probs or [])[first:]) if self.log_probs else None,
            "finish_reason": finish.get("type"),
            "matched_stop": finish.get("matched"),
        }
        if self.token_ids:
            choice["token_ids"] = progress.ids[first:]
            if first == 0:
                choice["prompt_token_ids"] = progress.sequence.prompt
        return choice


def parse_completion(
    body: dict, limits: RequestLimits, codec: TextCodec | None, served: str
) -> Completion:
    """Check a /v1/completions body and turn it into sequences.

    Args:
        served: name of the model, where the request has none.

    Raises:
        ConfigError: malformed, unsupported or too long; nothing of the request has been queued.
    """
    given = {key: value for key, value in body.items() if value is not None}
    for key, value in given.items():
        if key not in OWN | SAMPLING and value not in INERT.get(key, ()):
            raise ConfigError(f"{key} = {value!r} is not supported by the embedded engine")
    log_probs = given.get("logprobs")
    if log_probs is False:  # as many clients say that they want none
        log_probs = None
    if log_probs not in (None, 0):
        raise ConfigError(
            f"logprobs = {log_probs!r} is not supported by the embedded engine: 0 gives those of "
            "the tokens that were sampled, and there are no others"
        )
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise ConfigError(f"stream_options must be an object, got {options!r}")
    params = {RENAMED.get(key, key): given[key] for key in SAMPLING & set(given)}
    native = {
        **_prompt(given.get("prompt")),
        "sampling_params": {"max_new_tokens": DEFAULT_MAX_TOKENS, **params},
        "return_logprob": log_probs is not None,
        "return_text_in_logprobs": True,
        "stream": given.get("stream"),
        "rid": given.get("rid"),
    }
    back = {native: key for key, native in RENAMED.items()}
    return Completion(
        parse_generate(native, limits, codec, lambda key: back.get(key, key)),
        model=str(given.get("model", served)),
        log_probs=log_probs is not None,
        token_ids=bool(given.get("return_token_ids")),
        usage_at_end=bool(options.get("include_usage")),
        usage_always=bool(options.get("continuous_usage_stats")),
    )


def models(served: str, max_total_tokens: int) -> dict:
    """The body of /v1/models."""
    card = {
        "id": served,
        "object": "model",
        "created": int(now()),
        "owned_by": "qurl",
        "root": served,
        "parent": None,
        "max_model_len": max_total_tokens,
    }
    return {"object": "list", "data": [card]}


def _prompt(prompt: object) -> dict:
    """As a text or several, token ids or several lists of them: the four shapes OpenAI has."""
    if not prompt or not isinstance(prompt, str | list):
        raise ConfigError("prompt must be a text or token ids, or a non-empty list of either")
    first = prompt if isinstance(prompt, str) else prompt[0]
    return {"text": prompt} if isinstance(first, str) else {"input_ids": prompt}


def _log_probs(triples: list[list]) -> dict:
    return {
        "text_offset": [-1] * len(triples),
        "token_logprobs": [value for value, _, _ in triples],
        "tokens": [text for _, _, text in triples],
        "top_logprobs": [],
    }


def _usage(parts: list[StreamProgress]) -> dict:
    """Tokens of some sequences; a prompt counts once, however many samples it has."""
    prompts = {id(part.sequence.prompt): len(part.sequence.prompt) for part in parts}
    prompt, completion = sum(prompts.values()), sum(len(part.ids) for part in parts)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }
