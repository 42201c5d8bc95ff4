"""An engine's answers as typed records within their ranges, or a Malformed that names the fault.

A wrong token or log-prob crashes nothing but biases the gradient, so nothing is rounded, cut or
guessed here. Ids are in the vocabulary, log-probs are possible for a sampled token, and every token
names the version of this run's weights that it came from. Unused fields are ignored: SGLang adds
some with every release.

A step has millions of tokens, so no Python loop runs over tokens.
"""

import contextlib
import gc
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import orjson
from msgspec import UNSET, Meta, UnsetType

from qurl_megatron.engines.kinds import EngineKind, kind_of
from qurl_megatron.kit.record import Count, Malformed, convert, decode, shortened
from qurl_megatron.observe.text import how_many
from qurl_megatron.tensors.arch import StopIds
from qurl_megatron.types import FinishReason, Versions, in_a_row, routes_dtype
from qurl_megatron.wire.lease import MIXED, Names
from qurl_megatron.wire.packed import ARRAY, unpack, unpack_experts

ROUNDING = 1e-4  # how far above 0 the log-prob of a certain token may lie
LOWEST = -104.0
"""Below the log of the smallest float32, -103.3: no float32 sampler draws a less likely token."""

UNUSED = 16
"""Tokens of its room that an engine may leave free when it cuts a response, as SGLang does."""

TOKEN_BYTES, ANSWER_BYTES = 512, 1 << 16
"""More bytes than any answer needs per token, and besides; SGLang sends about 40 per token."""

NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
"""Parameters that change nothing. All are sent: a server fills in those that a request leaves out
(``--preferred-sampling-params``), and would then sample from another distribution than the
policy's."""
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
"""Parameters that a server may prefer: requests set them, or they change the text alone."""

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


@dataclass(frozen=True)
class Asked:
    """The facts of a request that its answer is checked against."""

    rid: str
    budget: int  # tokens
    given: int = 0  # tokens before the response


@dataclass(frozen=True)
class Routed:
    """The experts that an answer names for each token but the last."""

    layers: int
    top_k: int
    count: int  # of a layer's experts


@dataclass(frozen=True)
class Rules:
    """Limits for all answers of an engine."""

    vocabulary: int  # ids are below it
    names: Names  # of this run's versions
    confirmed: int | None = None  # oldest version of an answer; None: any
    newest: int | None = None  # version that this run has published; None: nothing yet
    stops: StopIds | None = None  # None: it is unknown which tokens end a response
    longest_input: int | None = None  # as in ``Info``
    routed: Routed | None = None  # None: experts are not asked for


@dataclass(frozen=True, eq=False)
class Part:
    """The tokens that one answer adds to a response."""

    ids: np.ndarray  # int32
    log_probs: np.ndarray  # float32
    versions: Versions
    finish: FinishReason
    message: str = ""  # of an abort
    # ``Sample.routes`` of all tokens but the last, from the first token of the prompt on.
    routes: np.ndarray | None = None


class _Finish(msgspec.Struct, frozen=True):
    type: FinishReason
    message: str | None = None


class _Span(msgspec.Struct, frozen=True):
    """Consecutive tokens that one version of the weights generated."""

    version: Any
    start: int
    end: int


class _Meta(msgspec.Struct, frozen=True):
    id: str
    finish_reason: _Finish
    weight_versions: list[_Span] = []
    # (log-prob, token id, text); or ``wire.packed``
    output_token_logprobs: list[tuple[float, Int64, Any]] | bytes = []
    num_retractions: int = 0
    routed_experts: bytes | None = None  # [tokens, layers, experts of a token]; of JSON, base64


class _Answer(msgspec.Struct, frozen=True):
    output_ids: list[Int64] | bytes
    meta_info: _Meta


def parsed(content: bytes) -> Any:
    """Parse JSON; raise ``Malformed`` where it is invalid."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(content)  # accepts NaN: the field's own error says more than "not JSON"
    except (ValueError, RecursionError):
        raise Malformed(f"the answer is not JSON: {shortened(content)}") from None


def answer_limit(asked: Sequence[Asked], routed: Routed | None = None) -> int:
    """Return an upper bound on the bytes of the answers to these requests."""
    limit = ANSWER_BYTES * (1 + len(asked)) + TOKEN_BYTES * sum(each.budget for each in asked)
    if routed:
        token_bytes = 6 * routed.layers * routed.top_k  # SGLang's: base64 of int32
        limit += token_bytes * sum(each.given + each.budget for each in asked)
    return limit


def read_answers(content: bytes, asked: Sequence[Asked], rules: Rules) -> list[Part | Malformed]:
    """Return each answer of a batch, or its fault.

    Raises:
        Malformed: the batch as a whole is no list with an answer per request.
    """
    packed = content[:1] >= bytes([ARRAY])
    answers: Any
    try:
        answers = decode(list[msgspec.Raw], content, packed=packed)
    except Malformed as error:
        if packed:
            raise Malformed(f"the answer is not MessagePack: {error}") from None
        answers = parsed(content)
    if not isinstance(answers, list):
        raise Malformed(f"the answer is not a list: {shortened(answers)}")
    if len(answers) != len(asked):
        raise Malformed(f"{how_many(len(answers), 'answer')} to {how_many(len(asked), 'request')}")
    results: list[Part | Malformed] = []
    for answer, request in zip(answers, asked, strict=True):
        try:
            results.append(read_answer(answer, request, rules, packed=packed))
        except Malformed as error:
            results.append(error)
    return results


def read_answer(answer: Any, asked: Asked, rules: Rules, *, packed: bool = False) -> Part:
    """Read an answer, parsed or ``msgspec.Raw``; raise ``Malformed`` if it cannot be trained on."""
    try:
        if isinstance(answer, msgspec.Raw):
            answer = decode(_Answer, answer, packed=packed)
        else:
            answer = convert(_Answer, answer)
    except Malformed as error:
        raise Malformed(f"malformed answer ({error})") from None
    return _part(answer, asked, rules)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python's garbage collector is off: it would visit every token again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _part(answer: _Answer, asked: Asked, rules: Rules) -> Part:
    meta = answer.meta_info
    reason = meta.finish_reason.type
    if meta.id != asked.rid:
        raise Malformed(f"it answers request {shortened(meta.id)}, not {asked.rid}")
    ids, owners, log_probs = _numbers(answer)
    sent = len(ids)
    versions: Versions = ()
    if len(ids):
        versions = _versions(meta, len(ids), rules)
    elif reason != "abort":
        raise Malformed("the response is empty")
    if reason == "abort":  # which may have come between a token and its log-prob
        complete = min(len(ids), len(log_probs))
        ids, owners, log_probs = ids[:complete], owners[:complete], log_probs[:complete]
        versions = _first(versions, complete)
    if len(ids) > asked.budget:
        raise Malformed(f"{len(ids)} tokens, where {asked.budget} were asked for")
    if len(log_probs) != len(ids) or not np.array_equal(owners, ids):
        raise Malformed(f"{len(log_probs)} log-probs do not belong to the {len(ids)} tokens")
    ids, log_probs = _ids(ids, rules.vocabulary), _log_probs(log_probs)
    if rules.stops is not None:
        full = rules.longest_input is None or asked.given + len(ids) >= rules.longest_input - UNUSED
        reason = _ended(ids, reason, len(ids) if full else asked.budget, rules.stops)
    message = shortened(meta.finish_reason.message or "")
    routes = _routes(meta, asked.given, sent, len(ids), rules.routed)
    return Part(ids, log_probs, versions, reason, message, routes)


def _routes(meta: _Meta, earlier: int, sent: int, kept: int, routed: Routed | None) -> Any:
    """Return ``Sample.routes`` of all kept tokens but the last; None: there are none.

    A request that SGLang retracted for want of room is computed again. If the weights have changed
    meanwhile, the experts of its first tokens are not those behind their log-probs.

    Args:
        earlier, sent, kept: number of tokens before the answer, in it, and of these kept.
    """
    if routed is None or not kept:
        return None
    if meta.num_retractions and len(meta.weight_versions) > 1:
        return None
    if not meta.routed_experts:
        if meta.finish_reason.type == "abort":
            return None
        raise Malformed(
            "it has no routed_experts, which model.routing_replay=rollout replays; start SGLang "
            "with --enable-return-routed-experts"
        )
    shape = (earlier + sent - 1, routed.layers, routed.top_k)
    try:
        experts = unpack_experts(meta.routed_experts, math.prod(shape)).reshape(shape)
    except ValueError as error:
        raise Malformed(f"malformed routed_experts ({error})") from None
    experts = experts[: earlier + kept - 1]
    if experts.size and not 0 <= experts.min() <= experts.max() < routed.count:
        raise Malformed(f"an expert that is none of the layer's {routed.count}")
    # Choices that were not recorded are all zero; two of them show it.
    if routed.top_k > 1 and (repeated := (experts[..., 0] == experts[..., 1])).any():
        token, layer = np.argwhere(repeated)[0]
        raise Malformed(
            f"token {token} went to one expert twice in layer {layer}: the engine has not recorded "
            "its experts"
        )
    return experts.astype(routes_dtype(routed.count)) + 1


def _numbers(answer: _Answer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return an answer's token ids, the ids that its log-probs belong to, and the log-probs."""
    ids, logprobs = answer.output_ids, answer.meta_info.output_token_logprobs
    match ids, logprobs:
        case list(), list():
            values, owners, _ = zip(*logprobs, strict=True) if logprobs else ((), (), ())
            return np.array(ids, np.int64), np.array(owners, np.int64), np.array(values)
        case bytes(), bytes():
            try:
                packed_ids, log_probs = unpack(ids, logprobs)
            except ValueError as error:
                raise Malformed(f"malformed answer ({error})") from None
            return packed_ids, packed_ids, log_probs
    raise Malformed("malformed answer (one of output_ids and output_token_logprobs is packed)")


def _ended(ids: np.ndarray, reason: FinishReason, limit: int, stops: StopIds) -> FinishReason:
    """Return why a response ended, corrected by its tokens.

    Args:
        limit: fewest tokens with which it may end for its length.

    Raises:
        Malformed: its tokens contradict the reason, or go on behind one that ends a response.
    """
    for stop in stops.always:
        if (behind := np.flatnonzero(ids[:-1] == stop)).size:
            more = len(ids) - 1 - int(behind[0])
            raise Malformed(f"{how_many(more, 'token')} behind token {stop}, which ends a response")
    if reason == "length" and len(ids) < limit:
        raise Malformed(f"it ended for its length after {len(ids)} of {limit} tokens")
    if reason == "stop" and int(ids[-1]) not in stops.known:
        raise Malformed(f"it stopped at token {ids[-1]}, which ends no response")
    if reason == "abort" and len(ids) and int(ids[-1]) in stops.always:
        return "stop"  # SGLang checks for an abort first
    return reason


def _ids(ids: np.ndarray, vocabulary: int) -> np.ndarray:
    outside = (ids < 0) | (ids >= vocabulary)
    if outside.any():
        raise Malformed(
            f"token id {ids[outside][0]} is outside the vocabulary of {vocabulary} tokens"
        )
    return ids.astype(np.int32)


def _log_probs(log_probs: np.ndarray) -> np.ndarray:
    bad = ~((log_probs >= LOWEST) & (log_probs <= ROUNDING))  # NaN as well
    if bad.any():
        raise Malformed(
            f"log-prob {log_probs[bad][0]:g} is not between {LOWEST:g} and 0: no token that was "
            "sampled has it"
        )
    return log_probs.astype(np.float32)


def _versions(meta: _Meta, count: int, rules: Rules) -> Versions:
    """Return the versions of an answer's tokens; there may be several."""
    if not meta.weight_versions:
        raise Malformed("it has no weight_versions; a run needs SGLang 0.5.23 or newer")
    versions, end = [], 0
    for span in meta.weight_versions:
        if span.start != end or span.end < span.start:
            raise Malformed(f"version spans leave a gap at token {end}")
        versions.append((_number(span.version, rules), span.end - span.start))
        end = span.end
    if end != count:
        raise Malformed(f"version spans cover {end} of {count} tokens")
    numbers = [number for number, _ in versions]
    if numbers != sorted(numbers):
        raise Malformed(f"weights go back from version {max(numbers)} to {numbers[-1]}")
    return in_a_row(versions)


def _number(name: Any, rules: Rules) -> int:
    """Return a version's number; raise ``Malformed`` if no token of this engine can have it."""
    number, confirmed, newest = rules.names.number(name), rules.confirmed, rules.newest
    if number == MIXED:
        raise Malformed(f"tokens from mixed weights, in the middle of an update ({name})")
    if number is None:
        raise Malformed(f"weights {shortened(name)}: another run publishes to this engine")
    if confirmed is not None and number < confirmed:
        raise Malformed(f"weights of version {number}, where it had confirmed {confirmed}")
    if newest is not None and number > newest:
        raise Malformed(f"weights of version {number}, where {newest} is the newest")
    return number


def _first(versions: Versions, count: int) -> Versions:
    """Return the versions of the first ``count`` tokens."""
    kept = []
    for version, tokens in versions:
        kept.append((version, min(tokens, count)))
        count -= min(tokens, count)
    return in_a_row(kept)


@dataclass(frozen=True)
class Info:
    """An engine's description of itself."""

    kind: EngineKind
    tp: int
    loaders: tuple[str, ...] | None  # custom weight loaders; None: not reported
    scheme: str | None  # of the weights it takes; None: not reported
    longest_input: int | None = None  # most tokens that it can continue; None: unknown
    resamples: str = ""  # settings that make it sample from another distribution than requested
    ep: int = 1  # groups of ranks over which whole experts are spread
    records_experts: bool | None = None  # in its answers, on request; None: not reported
    moves_experts: str = ""  # settings that put its experts where no update writes them


class _ServerInfo(msgspec.Struct, frozen=True):
    engine: Any = None
    tp_size: Annotated[int, Meta(ge=1, le=1024)] | None = None
    custom_weight_loader: list[str] | UnsetType | None = UNSET
    scheme: str | None = None
    preferred_sampling_params: dict[str, Any] | str | None = None
    speculative_algorithm: Any = None
    speculative_accept_threshold_single: float | None = None
    speculative_accept_threshold_acc: float | None = None
    max_total_num_tokens: Count | None = None
    context_length: Count | None = None
    max_req_input_len: Count | None = None  # SGLang's: it keeps a few tokens more free
    ep_size: Annotated[int, Meta(ge=1, le=1024)] | None = None
    enable_return_routed_experts: bool | None = None
    moe_runner_backend: str | None = None
    moe_a2a_backend: str | None = None
    enable_eplb: bool | None = None
    init_expert_location: str | None = None
    ep_num_redundant_experts: int | None = None


EXPERTS_IN_PLACE: Mapping[str, tuple] = {
    "moe_runner_backend": ("auto", "triton"),
    "moe_a2a_backend": ("none",),
    "enable_eplb": (False,),
    "init_expert_location": ("trivial",),
    "ep_num_redundant_experts": (0,),
}
"""SGLang's settings of experts, and the values that keep them where a checkpoint has them."""


def read_info(info: dict) -> Info:
    """Read an engine's ``/server_info``.

    Raises:
        Malformed: a field has a wrong type or is out of range.
    """
    server = convert(_ServerInfo, info)
    loaders = None
    if server.custom_weight_loader is not UNSET:
        loaders = tuple(server.custom_weight_loader or ())
    limits = []
    for limit in (server.max_total_num_tokens, server.context_length, server.max_req_input_len):
        if limit is not None:
            limits.append(limit - 1)
    misplacing = []
    for name, harmless in EXPERTS_IN_PLACE.items():
        if (value := getattr(server, name)) not in (None, *harmless):
            misplacing.append(f"{name} = {shortened(value)}")
    return Info(
        kind=kind_of(server.engine),
        tp=server.tp_size or 1,
        loaders=loaders,
        scheme=server.scheme,
        longest_input=min(limits, default=None),
        resamples=", ".join(_resampling(server)),
        ep=server.ep_size or 1,
        records_experts=server.enable_return_routed_experts,
        moves_experts=", ".join(misplacing),
    )


def _resampling(server: _ServerInfo) -> Iterator[str]:
    """Yield the settings of an SGLang server that change its sampling distribution.

    Raises:
        Malformed: the preferred parameters are no object.
    """
    preferred = server.preferred_sampling_params
    if isinstance(preferred, str):  # older servers repeat their command line
        try:
            preferred = decode(dict[str, Any], preferred.encode(errors="replace"))
        except Malformed as error:
            raise Malformed(f"preferred_sampling_params: {error}") from None
    defaults = {}
    for name, value in (preferred or {}).items():
        if value and name not in ASKED_FOR:
            defaults[name] = value
    if defaults:
        yield f"preferred_sampling_params = {shortened(defaults)}"
    if server.speculative_algorithm:
        for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
            if (threshold := getattr(server, name)) not in (None, 1.0):
                yield f"{name} = {threshold}"
