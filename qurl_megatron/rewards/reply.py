"""Requests to an environment, and the replies that it may give.

An answer comes from code that nobody has seen before. It goes through ``as_reply``, in the worker
and again where its answer is read.
"""

import json
from collections.abc import Sequence
from typing import Any

from qurl_megatron.kit.errors import Unscored, unscored
from qurl_megatron.rewards.item import finite

FIELDS = ("messages", "response", "answer", "metadata")
ROLES = ("tool", "user")

Message = dict[str, Any]
"""``role`` and ``content``."""

Reply = Message | None | Unscored
"""The next message, None where the conversation is over, or why there is neither."""


def request(messages: Sequence[Message], response: str, answer: str, metadata: dict) -> str:
    """As JSON on one line of ASCII.

    Args:
        messages: the conversation before the response.
        answer: the question's, as is the metadata.
    """
    fields = dict(zip(FIELDS, (list(messages), response, answer, metadata), strict=True))
    return json.dumps(finite(fields), default=str)


def as_reply(value: object) -> Reply:
    """Return what an environment returned as a reply; Unscored where it is no reply."""
    if value is None:
        return None
    if not isinstance(value, dict):
        wrong = f"a value of type {type(value).__name__}"
    elif value.get("role") not in ROLES:
        wrong = f"a message with role {value.get('role')!r}"
    elif not isinstance(value.get("content"), str):
        wrong = f"a message whose content is of type {type(value.get('content')).__name__}"
    elif not value["content"].strip():
        wrong = "a message without text"  # after which the policy would talk to itself
    else:
        # Halves of a surrogate pair are text to Python, and to no tokenizer.
        content = value["content"].encode(errors="replace").decode()
        return {"role": value["role"], "content": content}
    return unscored(
        "invalid", f'{wrong}; return {{"role": "tool" or "user", "content": text}}, or None'
    )
