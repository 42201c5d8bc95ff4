"""SGLang's answers with their numbers packed, as our server gives them: 8 bytes a token, not 40.

``output_ids`` becomes int32, and ``output_token_logprobs`` the log-probs in float32, as SGLang
computes them; little-endian, as bytes of MessagePack. From 64 engines a leading rank reads half a
million tokens a second. ``routed_experts`` comes as base64 of int32 and becomes uint8, or uint16
where an expert's number does not fit.
"""

import base64
from collections.abc import Sequence

import msgspec
import numpy as np

ENDPOINT = "/qurl_generate"
IDS, LOG_PROBS = np.dtype("<i4"), np.dtype("<f4")
EXPERTS = np.dtype("u1"), np.dtype("<u2"), IDS
ARRAY = 0x90  # the first byte of an array of MessagePack is no less, of JSON it is


def pack(answers: Sequence[dict]) -> bytes:
    """Return the body for a batch of answers."""
    return msgspec.msgpack.encode([_pack(answer) for answer in answers])


def _pack(answer: dict) -> dict:
    """Return an answer packed; leave its tokens as they are if its log-probs are not theirs."""
    ids, meta = answer["output_ids"], answer["meta_info"]
    if routed := meta.get("routed_experts"):
        packed = pack_experts(np.frombuffer(base64.b64decode(routed), IDS))
        meta = {**meta, "routed_experts": packed}
    triples = meta.get("output_token_logprobs", ())
    if [token for _, token, _ in triples] != ids:
        # Aborted between a token and its log-prob, or faulty, which the reader will see.
        return {**answer, "meta_info": meta}
    log_probs = np.array([log_prob for log_prob, _, _ in triples], LOG_PROBS)
    meta = {**meta, "output_token_logprobs": log_probs.tobytes()}
    return {**answer, "output_ids": np.array(ids, IDS).tobytes(), "meta_info": meta}


def pack_experts(experts: np.ndarray) -> bytes:
    """Return numbers of experts in the smallest integers that all of them fit into."""
    for kind in EXPERTS[:-1]:
        if not experts.size or (experts.min() >= 0 and experts.max() <= np.iinfo(kind).max):
            return experts.astype(kind).tobytes()
    return experts.tobytes()  # a fault for the reader


def unpack_experts(packed: bytes, count: int) -> np.ndarray:
    """Return ``count`` numbers of experts, packed or as SGLang has them.

    Raises:
        ValueError: there are more or fewer.
    """
    for kind in EXPERTS:
        if len(packed) == count * kind.itemsize:
            return np.frombuffer(packed, kind)
    raise ValueError(f"{len(packed)} bytes for {count} experts of its tokens")


def unpack(ids: bytes, log_probs: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and log-probs.

    Raises:
        ValueError: bytes that are no such numbers.
    """
    return np.frombuffer(ids, IDS), np.frombuffer(log_probs, LOG_PROBS)
