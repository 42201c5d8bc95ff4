"""A liar in front of a real engine: 55 answers that an engine must never give.

Requests are passed on as they are, and so is what the engine says to them, but for the endpoint
that ``play`` names, generation unless told otherwise: each answer there is spoilt by the next fault
named, in the way its row of FAULTS says. So a fault differs from a true answer in one thing alone,
and whoever takes it for one has not looked at that thing.
"""

import copy
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from tests.support.fake_engine import QuietHandler, Served

HUGE = 64 << 20  # bytes
DRIP_S = 0.1


@dataclass
class Reply:
    """What goes out."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    raw: bool = False  # without HTTP around it
    length: int | None = None  # that is told; None: the true one
    late: bool = False  # never, that is: not before the proxy is closed
    drip: Literal["", "headers", "body"] = ""  # what goes out a byte at a time


@dataclass(frozen=True)
class Fault:
    """One answer that an engine must never give."""

    spoil: Callable[[Any], Reply]
    """Makes the reply of the true answers, parsed."""

    says: str
    """What the user is told, as a regular expression."""


def sent(answers: Any, **changes: Any) -> Reply:
    return Reply(json.dumps(answers).encode(), **changes)


def _spoilt(change: Callable[[dict], Any], says: str) -> Fault:
    """One answer of the batch, that to the first request, is changed in place."""

    def spoil(answers: list[dict]) -> Reply:
        answers = copy.deepcopy(answers)
        change(answers[0])
        return sent(answers)

    return Fault(spoil, says)


def _token(value: Any, says: str) -> Fault:
    """A token, and its log-prob with it."""

    def change(answer: dict) -> None:
        answer["output_ids"][-1] = value
        answer["meta_info"]["output_token_logprobs"][-1][1] = value

    return _spoilt(change, says)


def _log_prob(value: Any, says: str) -> Fault:
    return _spoilt(
        lambda answer: answer["meta_info"]["output_token_logprobs"][-1].__setitem__(0, value), says
    )


def _version(rename: Callable[[str], str], says: str) -> Fault:
    def change(answer: dict) -> None:
        for span in answer["meta_info"]["weight_versions"]:
            span["version"] = rename(span["version"])

    return _spoilt(change, says)


def _later(name: str, versions: int) -> str:
    number, _, token = name.partition("@")
    return f"{int(number) + versions}@{token}"


def _status(status: int) -> Fault:
    refusal = {"error": {"message": "the proxy says no"}}
    return Fault(lambda _: sent(refusal, status=status), f"answered {status}: the proxy says no")


def _body(body: bytes, says: str, **changes: Any) -> Fault:
    return Fault(lambda _: Reply(body, **changes), says)


def _repeated(answer: dict) -> None:
    """Many more tokens than any request asks for."""
    meta = answer["meta_info"]
    answer["output_ids"] *= 1000
    meta["output_token_logprobs"] *= 1000
    meta["weight_versions"] = [
        {**meta["weight_versions"][0], "start": 0, "end": len(answer["output_ids"])}
    ]


def _emptied(answer: dict) -> None:
    answer["output_ids"] = []
    answer["meta_info"].update(output_token_logprobs=[], weight_versions=[])


def _stopped_nowhere(answer: dict) -> None:
    answer["output_ids"][-1] = answer["meta_info"]["output_token_logprobs"][-1][1] = 5
    answer["meta_info"]["finish_reason"] = {"type": "stop", "matched": 5}


def _cut_short(answer: dict) -> None:
    meta = answer["meta_info"]
    answer["output_ids"].pop()
    meta["output_token_logprobs"].pop()
    meta["weight_versions"][-1]["end"] -= 1
    meta["finish_reason"] = {"type": "length", "length": len(answer["output_ids"])}


def _ids_swapped(answers: list[dict]) -> Reply:
    """Each answer to the request of another."""
    return sent(answers[1:] + answers[:1])


LOCKED_OUT = ("401", "403")  # faults that an engine is left out for until the end

FAULTS: dict[str, Fault] = {
    # The network.
    "never": Fault(lambda a: sent(a, late=True), "did not answer within"),
    "drip": Fault(lambda a: sent(a, drip="body"), "did not answer within"),
    "headers drip": Fault(lambda a: sent(a, drip="headers"), "did not answer within"),
    "cut": Fault(lambda a: sent(a, length=1 << 20), "did not answer"),
    "hung up": _body(b"", "did not answer", raw=True),
    "no http": _body(b"\x16\x03\x01 220 ready\r\n\r\n", "did not answer", raw=True),
    "huge": _body(b" " * HUGE, r"answered with more than \d+ bytes"),
    # The protocol.
    "400": _status(400),
    "404": _status(404),
    "422": _status(422),
    "500": _status(500),
    "503": _status(503),
    "204": _body(b"", "answered 204", status=204),
    "302": _body(b"", "answered 302", status=302, headers={"location": "http://127.0.0.1:9/"}),
    "a page": _body(b"<html>", "answer is not JSON", headers={"content-type": "text/html"}),
    "nothing": _body(b"", "not JSON"),
    "ok": _body(b"OK", "not JSON: OK"),
    "half": Fault(lambda a: Reply(json.dumps(a).encode()[:-2]), "not JSON"),
    "noise": _body(b"\xff\x00\xfe" * 99, "not MessagePack"),
    "deep": _body(b"[" * 100_000 + b"]" * 100_000, "not JSON"),
    # Whose answers.
    "an object": Fault(lambda a: sent(a[0]), "the answer is not a list"),
    "one less": Fault(lambda a: sent(a[:-1]), r"\d+ answers? to \d+ requests?"),
    "one more": Fault(lambda a: sent(a + a[:1]), r"\d+ answers? to \d+ requests?"),
    "swapped": Fault(_ids_swapped, "it answers request"),
    "null": Fault(lambda a: sent([None, *a[1:]]), "malformed answer"),
    "no meta_info": _spoilt(lambda a: a.pop("meta_info"), "malformed answer .*meta_info"),
    "half a character": _spoilt(
        lambda a: a["meta_info"].update(id="\ud800"), r"it answers request \?, not"
    ),
    "500 of half a character": Fault(
        lambda _: sent({"error": {"message": "\ud800"}}, status=500), r"answered 500: \?"
    ),
    # Tokens.
    "id = vocabulary": _token(1 << 20, "token id 1048576 is outside the vocabulary"),
    "id -3": _token(-3, "token id -3 is outside the vocabulary"),
    "id 5.5": _token(5.5, "malformed answer .*output_ids"),
    "id 2**70": _token(2**70, "malformed answer .*output_ids"),
    "too many tokens": _spoilt(_repeated, r"\d+ tokens, where \d+ were asked for"),
    "no tokens": _spoilt(_emptied, "the response is empty"),
    # Log-probs.
    "log-prob nan": _log_prob(float("nan"), "log-prob nan is not between"),
    "log-prob -inf": _log_prob(float("-inf"), "log-prob -inf is not between"),
    "log-prob 0.5": _log_prob(0.5, "log-prob 0.5 is not between"),
    "log-prob -10**400": _log_prob(-(10**400), "malformed .*output_token_logprobs"),
    "one log-prob less": _spoilt(
        lambda a: a["meta_info"]["output_token_logprobs"].pop(), "log-probs do not belong"
    ),
    "no log-probs": _spoilt(
        lambda a: a["meta_info"].pop("output_token_logprobs"), "0 log-probs do not belong"
    ),
    "unknown end": _spoilt(
        lambda a: a["meta_info"].update(finish_reason={"type": "tired"}), "malformed .*tired"
    ),
    "stopped nowhere": _spoilt(_stopped_nowhere, "it stopped at token 5, which ends no response"),
    "cut short": _spoilt(_cut_short, "it ended for its length after|the response is empty"),
    # Whose weights.
    "another run's": _version(lambda name: "7@0f0f0f", "7@0f0f0f: another run publishes"),
    "weights before": _version(lambda name: _later(name, -1), "where it had confirmed"),
    "weights to come": _version(lambda name: _later(name, 1), "where .* is the newest"),
    "mixed weights": _version(lambda name: f"updating-{name}", "tokens from mixed weights"),
    # At the end of the table: whoever gives these is not asked again.
    "401": _status(401),
    "403": _status(403),
}


COULD_BE_TRUE: dict[str, Fault] = {
    "log-prob -90": _log_prob(-90.0, r"1 token has more than 10000 times the probability")
}
"""Lies that no look at an answer finds out: the trainer's own numbers must."""


class Proxy(Served):
    """Answers in a thread until closed; honest while it has nothing to play."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.waiting: dict[str, list[str]] = defaultdict(list)  # faults to come, by endpoint
        self.played: list[str] = []
        self._lock = threading.Lock()
        self._http = httpx.Client(timeout=60.0, trust_env=False)
        super().__init__(_ProxyHandler)

    def close(self) -> None:
        super().close()
        self._http.close()

    def play(self, names: Iterable[str], at: str = "/generate") -> None:
        """Spoil as many answers of an endpoint, one by one."""
        with self._lock:
            self.waiting[at] += names

    def reply(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        """The engine's, or what becomes of it."""
        with self._lock:
            name = self.waiting[path].pop(0) if self.waiting[path] else None
        answer = self._http.request(method, self.target + path, headers=headers, content=body)
        kind = {"content-type": answer.headers.get("content-type", "")}
        if name is None or answer.status_code != 200:
            return Reply(answer.content, answer.status_code, kind)
        self.played.append(name)
        return (FAULTS | COULD_BE_TRUE)[name].spoil(answer.json())


class _ProxyHandler(QuietHandler):
    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("content-length", 0))))

    def _answer(self, body: bytes) -> None:
        proxy: Proxy = self.server.engine
        kept = ("authorization", "content-type")
        headers = {name: self.headers[name] for name in kept if name in self.headers}
        reply = proxy.reply(self.command, self.path, headers, body)
        if reply.late:
            proxy.closing.wait()
        if not reply.raw:
            self._write(_head(reply), drip=reply.drip == "headers")
        self._write(reply.body, drip=reply.drip == "body")

    def _write(self, data: bytes, *, drip: bool) -> None:
        if not drip:
            self.wfile.write(data)
            return
        for byte in data:
            if self.server.engine.closing.wait(DRIP_S):
                return
            self.wfile.write(bytes([byte]))


def _head(reply: Reply) -> bytes:
    length = {"content-length": str(reply.length or len(reply.body))}
    lines = [f"{name}: {value}" for name, value in (reply.headers | length).items()]
    return "\r\n".join([f"HTTP/1.0 {reply.status} said", *lines, "", ""]).encode()
