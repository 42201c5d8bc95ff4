"""Generations of an engine, asked for by a test instead of a fleet."""

import uuid
from collections.abc import Sequence

import msgspec

from qurl_megatron.fleet.answer import Asked, answer_limit, parsed
from qurl_megatron.fleet.client import EngineClient, generations
from qurl_megatron.kit import event_loop


def generate(
    client: EngineClient,
    input_ids: Sequence[Sequence[int]],
    params: dict,
    *,
    rid: Sequence[str] = (),
    packs: bool = False,
    routed: bool = False,
) -> list[dict]:
    """The engine's answers as they are, in the order of the prompts.

    Args:
        packs: have them packed, as runs do.
        routed: have them name each token's experts.
    """
    client.packs = packs
    read = msgspec.msgpack.decode if packs else parsed
    rids = list(rid) or [uuid.uuid4().hex for _ in input_ids]
    limit = answer_limit([Asked(rid, params.get("max_new_tokens", 128)) for rid in rids])

    async def ask() -> list[dict]:
        async with generations() as http:
            return await client.generate(
                http, input_ids, [params] * len(rids), rids, read, limit=limit, routed=routed
            )

    return event_loop.run(ask())
