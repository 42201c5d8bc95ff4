"""SGLang's answers in MessagePack, as our server sends them: 8 bytes a token instead of 40.

``output_ids`` becomes little-endian int32, and ``output_token_logprobs`` the log-probs alone, in
float32 as SGLang computes them. ``routed_experts`` comes as base64 of int32 and becomes uint8, or
uint16 where an expert's number does not fit. A leading rank has to read half a million tokens a
second from 64 engines.
"""

import base64
from collections.abc import Sequence

import msgspec
import numpy as np

ENDPOINT = "/qurl_generate"
IDS, LOG_PROBS = np.dtype("<i4"), np.dtype("<f4")
EXPERTS = np.dtype("u1"), np.dtype("<u2"), IDS
ARRAY = 0x90  # an array of MessagePack begins with this byte or a larger one, JSON with a smaller


def pack(answers: Sequence[dict]) -> bytes:
    """Return the body for a batch of answers."""
    return msgspec.msgpack.encode([_pack(answer) for answer in answers])


def _pack(answer: dict) -> dict:
    """Return an answer packed; its tokens stay lists if the log-probs belong to other tokens."""
    ids, meta = answer["output_ids"], answer["meta_info"]
    if routed := meta.get("routed_experts"):
        packed = pack_experts(np.frombuffer(base64.b64decode(routed), IDS))
        meta = {**meta, "routed_experts": packed}
    triples = meta.get("output_token_logprobs", ())
    if [token for _, token, _ in triples] != ids:
        # Aborted between a token and its log-prob, or faulty: the reader decides.
        return {**answer, "meta_info": meta}
    log_probs = np.array([log_prob for log_prob, _, _ in triples], LOG_PROBS)
    meta = {**meta, "output_token_logprobs": log_probs.tobytes()}
    return {**answer, "output_ids": np.array(ids, IDS).tobytes(), "meta_info": meta}


def pack_experts(experts: np.ndarray) -> bytes:
    """Return experts' numbers in the smallest integers that hold them all."""
    for kind in EXPERTS[:-1]:
        if not experts.size or (experts.min() >= 0 and experts.max() <= np.iinfo(kind).max):
            return experts.astype(kind).tobytes()
    return experts.tobytes()  # out of range: the reader refuses them


def unpack_experts(packed: bytes, count: int) -> np.ndarray:
    """Return ``count`` experts' numbers, from ``pack_experts`` or as SGLang sends them.

    Raises:
        ValueError: the bytes hold another number of them.
    """
    for kind in EXPERTS:
        if len(packed) == count * kind.itemsize:
            return np.frombuffer(packed, kind)
    raise ValueError(f"{len(packed)} bytes for {count} experts of its tokens")


def unpack(ids: bytes, log_probs: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and log-probs.

    Raises:
        ValueError: the bytes end within a number.
    """
    return np.frombuffer(ids, IDS), np.frombuffer(log_probs, LOG_PROBS)
