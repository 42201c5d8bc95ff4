"""What engines outside have answered, and how to compare answers with it."""

import json
from pathlib import Path
from typing import Any

SGLANG = json.loads((Path(__file__).parent / "sglang_0_5_23.json").read_text(encoding="utf-8"))

# Of SGLang's answers, what the embedded engine has nothing to say about.
LEFT_OUT = {
    *("cached_tokens_details", "dp_rank"),
    *("e2e_latency", "response_sent_to_client_ts"),  # by whose clock?
}
FREE = {"id", "created", "model", "root", "owned_by"}  # to choose


def events(raw: str) -> list[Any]:
    """The bodies of server-sent events, the last of which must be [DONE]."""
    *blocks, rest = raw.split("\n\n")
    assert rest == "" and all(block.startswith("data: ") for block in blocks)
    texts = [block.removeprefix("data: ") for block in blocks]
    assert texts.pop() == "[DONE]"
    return [json.loads(text) for text in texts]


def shape(value: Any, name: str = "") -> Any:
    """Names, nesting, order and types; lists of numbers as long as they are."""
    if isinstance(value, dict):
        return {key: shape(one, key) for key, one in value.items() if key not in LEFT_OUT}
    if isinstance(value, list):
        return [shape(one) for one in value]
    return "free" if name in FREE else type(value).__name__
