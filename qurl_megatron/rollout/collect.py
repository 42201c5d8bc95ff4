"""Prompts in, samples out: one batched request per engine, and nothing else in flight.

Prompt i goes to engine i modulo their number, every sample carries its own seed, and each engine
gets all of its work at once: a synchronous run of embedded engines repeats bit for bit.
"""

import hashlib
import math
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.rollout.client import EngineClient, EngineError
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.types import Prompt, Sample

POLL_S = 0.2  # how often ``stop`` is asked
UNKNOWN_VERSION = -1  # weights that an engine started with, under a name that is no number


class Interrupted(Exception):
    """``stop()`` became true while engines were generating; their requests have been aborted."""


def collect(
    fleet: Fleet,
    prompts: Sequence[Prompt],
    config: RolloutConfig,
    *,
    seed: int,
    step: int,
    stop: Callable[[], bool] | None = None,
) -> list[Sample]:
    """``samples_per_prompt`` samples for every prompt, prompt-major.

    Raises:
        Interrupted: ``stop()`` became true.
        EngineError: an engine failed, timed out or gave an answer that cannot be trained on.
    """
    work = [
        (
            prompt,
            {
                "temperature": config.temperature,
                "max_new_tokens": config.max_new_tokens,
                "sampling_seed": sample_seed(seed, step, prompt.index, sample),
            },
        )
        for prompt in prompts
        for sample in range(config.samples_per_prompt)
    ]
    return _generate(fleet, work, config.samples_per_prompt, stop)


def greedy(
    fleet: Fleet,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    stop: Callable[[], bool] | None = None,
) -> list[Sample]:
    """One greedily decoded sample per prompt, for evaluation."""
    params = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
    return _generate(fleet, [(prompt, params) for prompt in prompts], 1, stop)


def sample_seed(seed: int, step: int, prompt_index: int, sample: int) -> int:
    """Seed of one sample: the first 63 bits of BLAKE2b over "seed/step/prompt_index/sample".

    Stable across machines, Python versions and engines, unlike ``hash``.
    """
    text = f"{seed}/{step}/{prompt_index}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def _generate(
    fleet: Fleet,
    work: list[tuple[Prompt, dict]],
    group: int,
    stop: Callable[[], bool] | None,
) -> list[Sample]:
    """Send every item to its engine; the items of one prompt share an engine and a prefill."""
    engines = len(fleet.clients)
    # Sent as separate requests rather than n samples of one, because each has its own seed.
    shares = [[i for i in range(len(work)) if i // group % engines == e] for e in range(engines)]
    tag = uuid.uuid4().hex
    with ThreadPoolExecutor(engines) as pool:
        futures = {
            pool.submit(_request, client, [work[i] for i in share], f"{tag}-"): share
            for client, share in zip(fleet.clients, shares, strict=True)
            if share
        }
        try:
            _wait(futures, stop)
        except BaseException:
            # Without this the pool would sit out the answers, and the engines would go on
            # computing.
            _abort(fleet, f"{tag}-")
            fleet.check()  # an engine that died says why in its log; "connection refused" does not
            raise
    samples: list[Sample | None] = [None] * len(work)
    for future, share in futures.items():
        for i, sample in zip(share, future.result(), strict=True):
            samples[i] = sample
    return samples


def _wait(futures: dict[Future, list[int]], stop: Callable[[], bool] | None) -> None:
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        if pending and stop is not None and stop():
            raise Interrupted("stopped while engines were generating")


def _abort(fleet: Fleet, rid: str) -> None:
    for client in fleet.clients:
        try:
            client.abort(rid)
        except EngineError:
            continue  # dead or deaf: the error that brought us here says more


def _request(client: EngineClient, items: list[tuple[Prompt, dict]], tag: str) -> list[Sample]:
    answers = client.generate(
        [prompt.input_ids for prompt, _ in items],
        [params for _, params in items],
        rid=[f"{tag}{index}" for index in range(len(items))],
    )
    if len(answers) != len(items):
        raise EngineError(
            f"{client.url} answered {len(items)} requests with {len(answers)} responses"
        )
    pairs = zip(items, answers, strict=True)
    return [_sample(client.url, prompt, answer) for (prompt, _), answer in pairs]


def _sample(url: str, prompt: Prompt, answer: dict) -> Sample:
    """Check one answer: a wrong log-prob would not crash anything, it would bias the gradient."""
    where = f"{url}, prompt {prompt.index}"
    try:
        ids, meta = answer["output_ids"], answer["meta_info"]
        reason = meta["finish_reason"]["type"]
        triples = meta["output_token_logprobs"]
        log_probs = tuple(float(triple[0]) for triple in triples)
        tokens = [triple[1] for triple in triples]
        versions = _versions(meta, len(ids))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise EngineError(f"{where}: malformed answer ({error!r})") from None
    if reason == "abort":
        message = meta["finish_reason"].get("message")
        raise EngineError(f"{where}: the request was aborted by the engine: {message}")
    if reason not in ("stop", "length"):
        raise EngineError(f"{where}: unknown finish_reason {reason!r}")
    if tokens != list(ids):
        raise EngineError(
            f"{where}: {len(tokens)} log-probs do not belong to the {len(ids)} tokens"
        )
    if not ids:
        raise EngineError(f"{where}: the response is empty")
    if not all(math.isfinite(value) and value <= 1e-4 for value in log_probs):
        raise EngineError(f"{where}: a log-prob is not finite, or positive")
    return Sample(
        prompt=prompt,
        response_ids=tuple(ids),
        behaviour_log_probs=log_probs,
        finish_reason=reason,
        versions=versions,
    )


def _versions(meta: dict, count: int) -> tuple[int, ...]:
    """One version per token, from the spans of a request that may have seen several."""
    if "weight_versions" not in meta:  # older SGLang tells the last one only
        return (_number(meta["weight_version"]),) * count
    versions: list[int] = []
    for span in meta["weight_versions"]:
        if span["start"] != len(versions):
            raise ValueError(f"version spans leave a gap at token {len(versions)}")
        versions += [_number(span["version"])] * (span["end"] - span["start"])
    if len(versions) != count:
        raise ValueError(f"version spans cover {len(versions)} of {count} tokens")
    return tuple(versions)


def _number(version: str) -> int:
    return int(version) if str(version).isdecimal() else UNKNOWN_VERSION
