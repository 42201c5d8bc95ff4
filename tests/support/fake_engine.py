"""An engine without a model, that fails when told to: SGLang's protocol over plain HTTP.

The token at position p of a sequence is ``token_at(p)``, with a log-prob that follows from it: a
response that was interrupted and continued anywhere equals one that was not. In a test's own
process it is scripted by its attributes; ``python -m tests.support.fake_engine`` is the
same as a process, which can be stopped, killed and started again.
"""

import argparse
import base64
import json
import os
import pickletools
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from qurl_megatron.wire.lease import ENDPOINT, Lease
from qurl_megatron.wire.packed import pack


def token_at(position: int) -> int:
    return 10 + position % 50


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    engine: Any

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client may leave at any time
            super().handle_error(request, client_address)


class QuietHandler(BaseHTTPRequestHandler):
    server: QuietServer

    def log_message(self, *arguments) -> None:
        pass


class Served:
    """Answers in a thread until closed."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], *, tls: Path | None = None) -> None:
        """
        Args:
            tls: folder of cert.pem and key.pem; None speaks plain HTTP.
        """
        self.closing = threading.Event()
        self._server = QuietServer(("127.0.0.1", 0), handler)
        self._server.engine = self
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls / "cert.pem", tls / "key.pem")
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        serve = {"target": self._server.serve_forever, "kwargs": {"poll_interval": 0.02}}
        threading.Thread(**serve, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


class FakeEngine(Served):
    """Answers in a thread until closed. Faults are served once each, in order, to generations.

    500      refuses
    cut      drops the connection in the middle of the answer
    mixed    tokens tagged with a version in the middle of an update
    nan      a log-prob that is none
    nothing  aborts without a token
    """

    def __init__(
        self,
        *,
        embedded: bool = False,
        token_s: float = 0.0,
        tp: int = 1,
        api_key: str | None = None,
    ) -> None:
        self.embedded, self.token_s, self.tp, self.api_key = embedded, token_s, tp, api_key
        self.version = "default"
        self.stop_every = 0  # positions: where a sequence ends by itself
        self.room = 0  # tokens of prompt and response, which SGLang cuts there; 0: any number
        self.packs = False  # its answers, as our SGLang server does
        self.faults: list[str] = []
        self.update_fault = ""  # "hang" | "lie": says yes, serves the old version
        self.deaf = threading.Event()  # nothing at all is answered while it is set
        self.paused = threading.Event()
        self.calls: list[tuple[str, dict]] = []  # (endpoint, body) of every POST
        self.looks = 0  # GETs
        self.session_open = False
        self.lease = Lease()
        self.running = self.generated = 0
        self.most = 0  # responses at once
        self.stall_at = 0  # tokens of a response, at which its request stalls; 0: never
        self._under_way: list[str] = []  # rids
        self._aborted: list[str] = []  # and what begins like one of these
        self._lock = threading.Lock()
        super().__init__(_EngineHandler)

    def bodies(self, endpoint: str) -> list[dict]:
        return [body for called, body in self.calls if called == endpoint]

    # What the handler asks; each returns (status, JSON).

    def get(self, endpoint: str) -> tuple[int, dict]:
        self.looks += 1
        if endpoint in ("/health", "/server_info", "/model_info"):
            return 200, getattr(self, endpoint.strip("/").replace("/", "_"))()
        return 404, {"error": {"message": "no such endpoint"}}

    def health(self) -> dict:
        return {}

    def model_info(self) -> dict:
        return {"weight_version": self.version}

    def server_info(self) -> dict:
        if self.embedded:
            return {
                "engine": "qurl-embedded",
                "custom_weight_loader": ["qurl_megatron.engines.sglang.loader.load"],
                "model_path": "fake",
                "weight_version": self.version,
            }
        return {
            "tp_size": self.tp,
            "model_path": "fake",
            "weight_version": "default",
            **({"max_req_input_len": self.room - 4} if self.room else {}),
        }

    def post(self, endpoint: str, body: dict) -> tuple[int, object]:
        if endpoint == ENDPOINT:
            return 200, self.lease.ask(body)
        self.calls.append((endpoint, body))
        if endpoint in ("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"):
            return 200, {}
        act = getattr(self, endpoint.strip("/"), None)
        return (404, {"message": "no such endpoint"}) if act is None else act(body)

    def pause_generation(self, body: dict) -> tuple[int, dict]:
        self.paused.set()
        return 200, {"status": "ok"}

    def continue_generation(self, body: dict) -> tuple[int, dict]:
        self.paused.clear()
        return 200, {"status": "ok"}

    def abort_request(self, body: dict) -> tuple[int, dict]:
        self._aborted += self._under_way if body.get("abort_all") else [body["rid"]]
        return 200, {}

    def update_weight_version(self, body: dict) -> tuple[int, dict]:
        if self.update_fault != "lie" or body["new_version"].startswith("updating"):
            self.version = body["new_version"]
        return 200, {"success": True}

    def begin_weight_update(self, body: dict) -> tuple[int, dict]:
        if self.session_open:
            return 400, {"success": False, "message": "a weight-update session is already open"}
        self.session_open = True
        return 200, {"success": True}

    def end_weight_update(self, body: dict) -> tuple[int, dict]:
        self.session_open = False
        return 200, {"success": True}

    def update_weights_from_tensor(self, body: dict) -> tuple[int, dict]:
        if self.update_fault == "hang":
            self.closing.wait()
        if not self.session_open:
            return 400, {"success": False, "message": "no session is open"}
        for rank, text in enumerate(body["serialized_named_tensors"]):
            _leave_receipt(text, rank)
        return 200, {"success": True}

    def generate(self, body: dict) -> tuple[int, object]:
        with self._lock:
            fault = self.faults.pop(0) if self.faults else ""
            self.running += len(body["input_ids"])
            self.most = max(self.most, self.running)
            self._under_way += body["rid"]
        try:
            if fault == "500":
                return 500, {"error": {"message": "told to fail"}}
            rows = zip(body["input_ids"], body["sampling_params"], body["rid"], strict=True)
            sequences = [_Sequence(*row) for row in rows]
            while any(not sequence.finish for sequence in sequences):
                self._step(sequences, fault)
            answers = [sequence.answer() for sequence in sequences]
            if fault == "mixed":
                for span in answers[0]["meta_info"]["weight_versions"]:
                    span["version"] = f"updating-{self.version}"
            if fault == "nan":
                answers[0]["meta_info"]["output_token_logprobs"][0][0] = float("nan")
            return (-1 if fault == "cut" else 200), answers
        finally:
            with self._lock:
                self.running -= len(body["input_ids"])
                self._under_way = [rid for rid in self._under_way if rid not in body["rid"]]

    def qurl_generate(self, body: dict) -> tuple[int, object]:
        if not self.packs:
            return 404, {"message": "no such endpoint"}
        status, answers = self.generate(body)
        return status, pack(answers) if status == 200 else answers

    def _step(self, sequences: list["_Sequence"], fault: str) -> None:
        while self._holds(sequences) and not self.closing.is_set() and not self._aborts(sequences):
            time.sleep(0.005)
        time.sleep(self.token_s)
        for sequence in sequences:
            if sequence.finish:
                continue
            if self.closing.is_set() or fault == "nothing" or self._aborts([sequence]):
                sequence.finish = "abort"
            else:
                sequence.extend(self.version, self.stop_every, self.room)
                self.generated += 1

    def _holds(self, sequences: list["_Sequence"]) -> bool:
        stalled = self.stall_at and any(len(s.ids) >= self.stall_at for s in sequences)
        return bool(stalled) or self.paused.is_set()

    def _aborts(self, sequences: list["_Sequence"]) -> bool:
        return any(s.rid.startswith(rid) for s in sequences for rid in self._aborted)


class _Sequence:
    def __init__(self, prompt: list[int], params: dict, rid: str) -> None:
        self.prompt, self.limit, self.rid = prompt, params["max_new_tokens"], rid
        self.ids: list[int] = []
        self.versions: list[str] = []
        self.finish = ""

    def extend(self, version: str, stop_every: int, room: int) -> None:
        self.ids.append(token_at(len(self.prompt) + len(self.ids)))
        self.versions.append(version)
        if stop_every and (len(self.prompt) + len(self.ids)) % stop_every == 0:
            self.finish = "stop"
        elif len(self.ids) == self.limit or len(self.prompt) + len(self.ids) == room:
            self.finish = "length"

    def answer(self) -> dict:
        spans: list[dict] = []
        for index, version in enumerate(self.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": index})
            spans[-1]["end"] = index + 1
        return {
            "text": "",
            "output_ids": self.ids,
            "meta_info": {
                "id": self.rid,
                "finish_reason": {"type": self.finish, "message": "told to"},
                "weight_version": self.versions[-1] if self.versions else None,
                "weight_versions": spans,
                "output_token_logprobs": [[-token / 100, token, None] for token in self.ids],
            },
        }


def _leave_receipt(serialized: str, rank: int) -> None:
    """Where a message of an update asks for one: all is there. By hand, as torch starts slowly."""
    try:
        words = pickletools.genops(base64.b64decode(serialized))
        message = json.loads(next(word for _, word, _ in words if isinstance(word, str)))
    except (StopIteration, ValueError):
        return  # another loader's
    if message["action"] not in ("check", "finish") or "receipts" not in message["transport"]:
        return
    path = Path(message["transport"]["receipts"]) / f"{message['session']}-{rank}.json"
    receipt = {"session": message["session"], "rank": rank, "error": None, "pointers": ""}
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps({**receipt, "bytes": 0, "seconds": 0.0}), encoding="utf-8")
    aside.rename(path)


class _EngineHandler(QuietHandler):
    def do_GET(self) -> None:
        self._respond(self.server.engine.get)

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.loads(text) if text else {}
        self._respond(lambda endpoint: self.server.engine.post(endpoint, body))

    def _respond(self, act) -> None:
        engine = self.server.engine
        while engine.deaf.is_set() and not engine.closing.is_set():
            time.sleep(0.01)
        endpoint = self.path.split("?")[0]
        given = self.headers.get("authorization")
        if engine.api_key and endpoint != "/health" and given != f"Bearer {engine.api_key}":
            status, answer = 401, {"error": "Unauthorized"}
        else:
            status, answer = act(endpoint)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(200 if status == -1 else status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if status == -1 else data)


def main() -> None:
    """Takes the options of ``qurl serve``, and heeds those that the fleet needs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--fault", action="append", default=[])
    options, _ = parser.parse_known_args()
    key = os.environ.get("QURL_API_KEY")
    engine = FakeEngine(embedded=True, token_s=options.token_s, api_key=key)
    engine.faults = options.fault
    aside = options.port_file.with_suffix(".tmp")
    aside.write_text(str(engine.port))
    aside.replace(options.port_file)
    print("listening", flush=True)
    while os.read(0, 4096):
        pass


if __name__ == "__main__":
    main()
