"""The streams of SGLang's ``/generate`` and OpenAI's ``/v1/completions``, read into a TimedAnswer.

Prompts are token ids in both, and temperature 1 without any cut, as in training. OpenAI's protocol
does not say which weights made a token, nor what was preempted; it gives token ids where the server
supports ``return_token_ids``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qurl_megatron.bench.load.outcome import Look, TimedAnswer
from qurl_megatron.bench.load.requests import Ask
from qurl_megatron.wire.schema import shortened


@dataclass(frozen=True)
class Protocol:
    endpoint: str
    body: Callable[[Ask, str], dict]  # of a request to the model of that name
    read: Callable[[TimedAnswer, Any, float], None]  # one event, at its time


def _sglang_body(ask: Ask, model: str) -> dict:
    params = {"max_new_tokens": ask.tokens, "ignore_eos": True, "temperature": 1.0}
    return {"input_ids": list(ask.prompt), "sampling_params": params, "stream": True}


def _read_sglang(answer: TimedAnswer, event: Any, at: float) -> None:
    if _failed(answer, event):
        return
    ids, meta = event["output_ids"], event["meta_info"]
    # Servers send either all tokens so far or, if asked, the new ones.
    if len(ids) >= meta["completion_tokens"]:
        answer.ids = ids
    else:
        answer.ids += ids
    answer.came(len(answer.ids), at)
    answer.cached = meta.get("cached_tokens")
    answer.preempted = meta.get("num_retractions") or 0
    if answer.ids:
        spans = meta.get("weight_versions")
        name = spans[-1]["version"] if spans else meta.get("weight_version")
        answer.first_of.setdefault(str(name), at)
    finish = meta.get("finish_reason")
    if finish and finish["type"] == "abort":
        answer.failure = f"aborted: {shortened(finish.get('message') or '')}"


def _openai_body(ask: Ask, model: str) -> dict:
    return {
        "model": model,
        "prompt": list(ask.prompt),
        "max_tokens": ask.tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def _read_openai(answer: TimedAnswer, event: Any, at: float) -> None:
    if _failed(answer, event):
        return
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids")
        if ids:
            answer.ids += ids
        # Without ids an event is a token, until the usage at the end says how many there were.
        news = len(ids) if ids is not None else bool(choice.get("text"))
        answer.came(answer.tokens + news, at)
        if choice.get("finish_reason") == "abort":
            answer.failure = "aborted"
    if usage := event.get("usage"):
        told = usage["completion_tokens"]
        answer.came(told, at)
        answer.counts = [min(count, told) for count in answer.counts]
        details = usage.get("prompt_tokens_details") or {}
        answer.cached = details.get("cached_tokens")


def _failed(answer: TimedAnswer, event: Any) -> bool:
    error = event.get("error")
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        answer.failure = shortened(str(message))
    return bool(error)


PROTOCOLS = {
    "sglang": Protocol("/generate", _sglang_body, _read_sglang),
    "openai": Protocol("/v1/completions", _openai_body, _read_openai),
}


def read_look(told: Mapping[str, Any], at: float) -> Look:
    """Of ``/server_info`` (embedded), or of a rank in ``/v1/loads`` (SGLang): one set of names, but
    SGLang reports retractions with each answer alone."""
    used, room = told.get("num_used_tokens"), told.get("max_total_num_tokens")
    return Look(
        at,
        running=told.get("num_running_reqs"),
        waiting=told.get("num_waiting_reqs"),
        occupancy=used / room if used is not None and room else None,
        preemptions=told.get("num_retractions"),
    )


def read_metrics(text: str, at: float) -> Look:
    """Of vLLM's ``/metrics``, in Prometheus' text format; summed over its engines."""
    names = {
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "waiting",
        "vllm:kv_cache_usage_perc": "occupancy",
        "vllm:num_preemptions_total": "preemptions",
    }
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if (field := names.get(name.partition("{")[0])) is not None:
            found[field] = found.get(field, 0.0) + float(value)
    occupancy = found.pop("occupancy", None)
    return Look(at, occupancy=occupancy, **{name: int(value) for name, value in found.items()})
