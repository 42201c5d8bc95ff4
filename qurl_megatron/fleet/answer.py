"""What an engine says, parsed in one place: a value within its ranges, or one BadAnswer.

A wrong token or log-prob crashes nothing, it biases the gradient; so nothing is rounded, cut or
guessed here. Ids are integers of the vocabulary, a log-prob is one that a sampled token can have,
and every token says which version of this run's weights it came from.

There are millions of tokens a step: each passes through C loops alone, and is looked at one by one
only to say what was wrong.
"""

import contextlib
import gc
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import orjson

from qurl_megatron.engines.kinds import EngineKind, kind_of
from qurl_megatron.observe.text import how_many
from qurl_megatron.tensors.arch import StopIds
from qurl_megatron.types import FinishReason, Versions, in_a_row
from qurl_megatron.wire.naming import MIXED, Names
from qurl_megatron.wire.schema import count, list_of, or_none, record, seconds, shortened, text

ROUNDING = 1e-4  # above 0 that a log-prob of a sure token may be
LOWEST = -104.0
"""The log of the smallest float32 is -103.3: a token less likely than that has probability 0 in
every sampler there is, so whoever reports it has not sampled it."""

UNUSED = 16
"""Tokens of its room that an engine may leave free where it cuts a response, as SGLang does."""

TOKEN_BYTES, ANSWER_BYTES = 512, 1 << 16
"""More than any answer needs per token, and beside its tokens; SGLang sends about 50 per token."""

NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
"""Each is sent: a server fills in what a request leaves out (``--preferred-sampling-params``), and
would then report log-probs of another distribution than the policy's."""
ASKED_FOR = {
    "temperature",
    "max_new_tokens",
    "sampling_seed",
    *NEUTRAL,
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
}
"""What a server may prefer: requests name it, or it changes the text alone, which nobody reads."""

_MALFORMED = (KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)


class BadAnswer(ValueError):
    """What an engine said that it must never say, in a few words."""


@dataclass(frozen=True)
class Asked:
    """One request, as far as its answer is held against it."""

    rid: str
    budget: int  # tokens
    given: int = 0  # tokens before the response


@dataclass(frozen=True)
class Rules:
    """What all answers of an engine are held against."""

    vocabulary: int  # ids are below it
    names: Names  # of this run's versions
    confirmed: int | None = None  # version before the engine was asked; None: any will do
    newest: int | None = None  # that this run has published; None: nothing yet
    stops: StopIds | None = None  # None: nobody knows what ends a response
    longest_input: int | None = None  # as ``read_longest_input`` says


@dataclass(frozen=True, eq=False)
class Part:
    """What one answer adds to a response."""

    ids: np.ndarray  # int32
    log_probs: np.ndarray  # float32
    versions: Versions
    finish: FinishReason
    message: str = ""  # of an abort


@dataclass(frozen=True)
class Info:
    """What an engine is."""

    kind: EngineKind
    tp: int
    loaders: tuple[str, ...] | None  # custom weight loaders; None: it does not say
    scheme: str | None  # of the weights it takes; None: it does not say
    longest_input: int | None = None  # tokens; None: it does not say
    resamples: str = ""  # settings by which it samples from another distribution than it is asked


@dataclass(frozen=True)
class Load:
    """What an engine is doing, for the eye."""

    version: str
    running: int
    waiting: int
    generated: int | None  # tokens since it started
    tokens_per_s: float | None  # as the engine itself last measured it
    paused: bool | None
    model: str


def parsed(content: bytes) -> Any:
    """
    Raises:
        BadAnswer: it is not JSON.
    """
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(content)  # knows NaN, which says more of an engine than "not JSON"
    except (ValueError, RecursionError):
        raise BadAnswer(f"the answer is not JSON: {shortened(content)}") from None


def answer_limit(budgets: Sequence[int]) -> int:
    """Bytes that answers to requests for so many tokens each have at most."""
    return ANSWER_BYTES * (1 + len(budgets)) + TOKEN_BYTES * sum(budgets)


def read_answers(content: bytes, asked: Sequence[Asked], rules: Rules) -> list[Part | BadAnswer]:
    """Each answer of a batch, or what is wrong with that one.

    Raises:
        BadAnswer: they do not answer these requests.
    """
    answers = parsed(content)
    if not isinstance(answers, list):
        raise BadAnswer(f"the answer is not a list: {shortened(answers)}")
    if len(answers) != len(asked):
        raise BadAnswer(f"{how_many(len(answers), 'answer')} to {how_many(len(asked), 'request')}")
    found: list[Part | BadAnswer] = []
    for answer, request in zip(answers, asked, strict=True):
        try:
            found.append(read_answer(answer, request, rules))
        except BadAnswer as error:
            found.append(error)
    return found


def read_answer(answer: Any, asked: Asked, rules: Rules) -> Part:
    """
    Raises:
        BadAnswer: it cannot be trained on.
    """
    try:
        return _part(answer, asked, rules)
    except BadAnswer:
        raise
    except (*_MALFORMED, ValueError) as error:
        raise BadAnswer(f"malformed answer ({shortened(error)})") from None


def read_info(info: dict) -> Info:
    """What ``/server_info`` says of the engine itself.

    Raises:
        BadAnswer: it says nonsense.
    """
    tp, loaders = info.get("tp_size") or 1, info.get("custom_weight_loader")
    if not count(tp) or tp > 1024:
        raise BadAnswer(f"tp_size {shortened(tp)} is not a number of ranks")
    if text(loaders):
        loaders = [loaders]
    if not or_none(list_of(text))(loaders):
        raise BadAnswer(f"custom_weight_loader {shortened(loaders)} is not a list of names")
    tells_loaders = "custom_weight_loader" in info
    scheme = info.get("scheme")
    if not or_none(text)(scheme):
        raise BadAnswer(f"scheme {shortened(scheme)} is not a name")
    return Info(
        kind_of(info.get("engine")),
        tp,
        tuple(loaders or ()) if tells_loaders else None,
        scheme,
        read_longest_input(info),
        _resamples(info),
    )


def _resamples(info: dict) -> str:
    """Return the settings of an SGLang server that change what it samples from, whatever a request
    asks for; "" where there are none.

    Raises:
        BadAnswer: it says nonsense.
    """
    preferred = info.get("preferred_sampling_params")
    if isinstance(preferred, str):  # older servers say what they were given
        preferred = parsed(preferred.encode(errors="replace"))
    thresholds = {
        name: info[name]
        for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
        if info.get("speculative_algorithm") and info.get(name) not in (None, 1.0)
    }
    if not or_none(record)(preferred):
        raise BadAnswer(f"preferred_sampling_params {shortened(preferred)} are no object")
    other_defaults = {
        name: x for name, x in (preferred or {}).items() if x and name not in ASKED_FOR
    }
    settings = {
        **({"preferred_sampling_params": other_defaults} if other_defaults else {}),
        **thresholds,
    }
    return ", ".join(f"{name} = {shortened(value)}" for name, value in settings.items())


def read_longest_input(info: dict) -> int | None:
    """Tokens after which an engine can generate one more, by ``/server_info``; None: it does not
    say.

    Raises:
        BadAnswer: it says nonsense.
    """
    # The last is SGLang's alone: it keeps a few more free, and refuses inputs of that length.
    names = ("max_total_num_tokens", "context_length", "max_req_input_len")
    limits = [info.get(name) for name in names]
    if not all(map(or_none(count), limits)):
        raise BadAnswer(f"{shortened(limits)} for {', '.join(names)} are not numbers of tokens")
    return min((limit - 1 for limit in limits if limit is not None), default=None)


def read_load(info: dict) -> Load:
    """What an embedded engine is doing, by ``/server_info``.

    Raises:
        BadAnswer: it says nonsense.
    """
    numbers = [info.get(f"num_{queue}") for queue in ("running_reqs", "waiting_reqs")]
    generated, paused = info.get("num_generated_tokens"), info.get("is_paused")
    counts = [*numbers, generated]
    if not all(map(or_none(count), counts)):
        raise BadAnswer(f"malformed numbers of requests and tokens: {shortened(counts)}")
    return Load(
        version=shortened(str(info.get("weight_version"))),
        running=numbers[0] or 0,
        waiting=numbers[1] or 0,
        generated=generated,
        tokens_per_s=None,
        paused=None if paused is None else bool(paused),
        model=shortened(str(info.get("model_path"))),
    )


def read_loads(info: dict, version: str, loads: Any) -> Load:
    """The same of SGLang, whose ranks say for themselves what they have to do."""
    speeds = [each.get("last_gen_throughput") or 0.0 for each in _objects(info, "internal_states")]
    queues = [
        [each.get(f"num_{queue}_reqs", 0) for each in _objects(loads, "loads")]
        for queue in ("running", "waiting")
    ]
    if not all(map(seconds, speeds)) or not all(map(list_of(count), queues)):
        raise BadAnswer(f"malformed speeds and queues: {shortened([speeds, queues])}")
    return Load(
        version=version,
        running=sum(queues[0]),
        waiting=sum(queues[1]),
        generated=None,
        tokens_per_s=sum(speeds),
        paused=None,
        model=shortened(str(info.get("model_path"))),
    )


def _objects(holder: dict, name: str) -> list[dict]:
    items = holder.get(name, [])
    if not list_of(record)(items):
        raise BadAnswer(f"{name} is not a list of objects: {shortened(items)}")
    return items


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's garbage collector, for answers: every token is a list of its own, and it
    would search them all again and again. They hold no cycles.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _part(answer: Any, asked: Asked, rules: Rules) -> Part:
    output_ids, meta = answer["output_ids"], answer["meta_info"]
    finish = meta["finish_reason"]
    reason = finish["type"]
    if reason not in ("stop", "length", "abort"):
        raise BadAnswer(f"unknown finish_reason {shortened(reason)}")
    if meta["id"] != asked.rid:
        raise BadAnswer(f"it answers request {shortened(meta['id'])}, not {asked.rid}")
    if reason == "abort" and _cut_by_an_update(meta, rules):
        output_ids = []
    if type(output_ids) is not list:
        raise BadAnswer(f"output_ids is not a list: {shortened(output_ids)}")
    triples = meta["output_token_logprobs"] if output_ids else []
    versions = _versions(meta, len(output_ids), rules) if output_ids else ()
    if reason == "abort":  # it may have come between a token and its log-prob
        complete = min(len(output_ids), len(triples))
        output_ids, triples, versions = (
            output_ids[:complete],
            triples[:complete],
            _first(versions, complete),
        )
    elif not output_ids:
        raise BadAnswer("the response is empty")
    if len(output_ids) > asked.budget:
        raise BadAnswer(f"{len(output_ids)} tokens, where {asked.budget} were asked for")
    given_log_probs, owners, *_ = zip(*triples, strict=True) if triples else ((), ())
    if owners != tuple(output_ids):
        raise BadAnswer(f"{len(triples)} log-probs do not belong to the {len(output_ids)} tokens")
    ids, log_probs = _ids(output_ids, rules.vocabulary), _log_probs(given_log_probs)
    if rules.stops is not None:
        full = rules.longest_input is None or asked.given + len(ids) >= rules.longest_input - UNUSED
        reason = _ended(ids, reason, len(ids) if full else asked.budget, rules.stops)
    message = shortened(finish.get("message") or "")
    return Part(ids, log_probs, versions, reason, message)


def _ended(ids: np.ndarray, reason: FinishReason, least: int, stops: StopIds) -> FinishReason:
    """Return why a response ended, by its tokens.

    Args:
        least: tokens at which it can have ended for its length.

    Raises:
        BadAnswer: no sampler ends there, or goes on there.
    """
    for stop in stops.always:
        if (behind := np.flatnonzero(ids[:-1] == stop)).size:
            more = len(ids) - 1 - int(behind[0])
            raise BadAnswer(f"{how_many(more, 'token')} behind token {stop}, which ends a response")
    if reason == "length" and len(ids) < least:
        raise BadAnswer(f"it ended for its length after {len(ids)} of {least} tokens")
    if reason == "stop" and int(ids[-1]) not in stops.known:
        raise BadAnswer(f"it stopped at token {ids[-1]}, which ends no response")
    if reason == "abort" and len(ids) and int(ids[-1]) in stops.always:
        return "stop"  # SGLang looks for an abort first
    return reason


def _cut_by_an_update(meta: dict, rules: Rules) -> bool:
    """True where the one version that older SGLang reports is of an update that came in between.

    That is the name of the moment, and says nothing of the tokens: they are older.
    """
    alone = "weight_versions" not in meta
    return alone and rules.names.number(meta.get("weight_version")) is MIXED


def _ids(given: list, vocabulary: int) -> np.ndarray:
    """int32, of JSON numbers that are integers of the vocabulary."""
    try:
        ids = np.frombuffer(array("q", given), np.int64)
    except (TypeError, OverflowError):
        ids = None
    if ids is None or _has_bool(given, np.flatnonzero((ids == 0) | (ids == 1))):
        wrong = next(x for x in given if type(x) is not int or not -(2**63) <= x < 2**63)
        raise BadAnswer(f"token id {shortened(wrong)} is not a 64-bit integer")
    outside = (ids < 0) | (ids >= vocabulary)
    if outside.any():
        raise BadAnswer(
            f"token id {ids[outside][0]} is outside the vocabulary of {vocabulary} tokens"
        )
    return ids.astype(np.int32)


def _log_probs(given: Sequence) -> np.ndarray:
    """float32, of JSON numbers that a token which was sampled can have."""
    try:
        log_probs = np.frombuffer(array("f", given), np.float32)
    except (TypeError, OverflowError):
        log_probs = None
    if log_probs is None or _has_bool(given, np.flatnonzero((log_probs == 0) | (log_probs == 1))):
        wrong = next(x for x in given if type(x) not in (int, float) or abs(x) > 1e300)
        raise BadAnswer(f"log-prob {shortened(wrong)} is not a number that fits a float")
    bad = ~((log_probs >= LOWEST) & (log_probs <= ROUNDING))  # NaN as well
    if bad.any():
        raise BadAnswer(
            f"log-prob {given[int(np.flatnonzero(bad)[0])]} is not between {LOWEST:g} and 0: no "
            "token that was sampled has it"
        )
    return log_probs


def _has_bool(given: Sequence, places: np.ndarray) -> bool:
    """JSON's true and false count as 1 and 0 in Python, so only there can they hide."""
    return any(type(given[place]) is bool for place in places.tolist())


def _versions(meta: dict, count: int, rules: Rules) -> Versions:
    """Of an answer's tokens, from the spans of a request that may have seen several."""
    if "weight_versions" not in meta:  # older SGLang reports the last one only
        spans = [{"version": meta["weight_version"], "start": 0, "end": count}]
    else:
        spans = meta["weight_versions"]
    versions, end = [], 0
    for span in spans:
        start, stop = span["start"], span["end"]
        if type(start) is not int or type(stop) is not int or start != end or stop < start:
            raise BadAnswer(f"version spans leave a gap at token {end}")
        versions.append((_number(span["version"], rules), stop - start))
        end = stop
    if end != count:
        raise BadAnswer(f"version spans cover {end} of {count} tokens")
    numbers = [number for number, _ in versions]
    if numbers != sorted(numbers):
        raise BadAnswer(f"weights go back from version {max(numbers)} to {numbers[-1]}")
    return in_a_row(versions)


def _number(name: Any, rules: Rules) -> int:
    """A version by its name; one that this engine may have."""
    number, confirmed, newest = rules.names.number(name), rules.confirmed, rules.newest
    if number is MIXED:
        raise BadAnswer(f"tokens from mixed weights, in the middle of an update ({name})")
    if number is None:
        raise BadAnswer(f"weights {shortened(name)}: another run publishes to this engine")
    if confirmed is not None and number < confirmed:
        raise BadAnswer(f"weights of version {number}, where it had confirmed {confirmed}")
    if newest is not None and number > newest:
        raise BadAnswer(f"weights of version {number}, where {newest} is the newest")
    return number


def _first(versions: Versions, count: int) -> Versions:
    """Of the first ``count`` tokens alone."""
    ends = accumulate(tokens for _, tokens in versions)
    return in_a_row(
        (version, max(0, min(tokens, tokens + count - end)))
        for (version, tokens), end in zip(versions, ends, strict=True)
    )
