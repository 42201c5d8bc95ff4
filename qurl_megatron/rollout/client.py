"""One client for SGLang's HTTP protocol: embedded engines and real SGLang servers alike.

Control is blocking and thread-safe; generation also comes as a coroutine, so that hundreds of
requests can wait, and be given up, without a thread each. Every failure is an EngineError that
names the engine, the endpoint and the cause.
"""

import contextlib
import functools
import gc
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import orjson

CONTROL_TIMEOUT_S = 60.0  # pause, abort, info: answered between two decode steps

Read = TypeVar("Read")

_DEADLINE: ContextVar[float | None] = ContextVar("deadline", default=None)


class EngineError(RuntimeError):
    """An engine did not do what it was asked: which one, at which endpoint, with what answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status  # of the HTTP answer, where there was one

    @property
    def ours(self) -> bool:
        """True where the request was wrong: no other engine would answer it either."""
        return (
            self.status is not None and 400 <= self.status < 500 and self.status not in (408, 429)
        )


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


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """No request of this thread waits beyond ``seconds`` from now, whatever its own limit is."""
    token = _DEADLINE.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _DEADLINE.reset(token)


class EngineClient:
    """Blocking and thread-safe. Every failure is an EngineError that names the engine."""

    def __init__(self, url: str, *, timeout_s: float = 600.0, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._options = {
            "base_url": self.url,
            "timeout": timeout_s,
            "headers": headers,
            # A proxy configured for the internet must not get traffic for 127.0.0.1.
            "trust_env": False,
            # A restarted engine leaves no dead socket behind.
            "limits": httpx.Limits(max_keepalive_connections=0),
            "verify": _certificates() if self.url.startswith("https:") else False,
        }
        self._timeout_s = timeout_s
        try:
            self._http = httpx.Client(**self._options)
        except (httpx.InvalidURL, ValueError) as error:
            raise EngineError(f"{url} is no address of an engine: {error}") from None

    def close(self) -> None:
        self._http.close()

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """Ready for requests, as the engine sees it; SGLang says no while it is paused."""
        try:
            return self._http.get("/health", timeout=timeout_s).status_code == 200
        except httpx.HTTPError:  # not up yet, or gone: that is the answer
            return False

    def server_info(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict:
        """Comes from the engine's own loop, paused or not: an answer proves that it runs."""
        return self._first(("/server_info", "/get_server_info"), timeout_s)

    def weight_version(self) -> str:
        # Not from server_info, where SGLang tells what it was started with.
        info = self._first(("/model_info", "/get_model_info"), CONTROL_TIMEOUT_S)
        version = info.get("weight_version")
        if version is None:
            raise EngineError(f"{self.url} reports no weight_version; this server is too old")
        return str(version)

    def load(self) -> Load:
        """Version, queue and speed, for a table."""
        info = self.server_info()
        states = info.get("internal_states")
        if states is None:  # embedded
            return Load(
                version=str(info.get("weight_version")),
                running=info.get("num_running_reqs", 0),
                waiting=info.get("num_waiting_reqs", 0),
                generated=info.get("num_generated_tokens"),
                tokens_per_s=None,
                paused=info.get("is_paused"),
                model=str(info.get("model_path")),
            )
        speeds = [state.get("last_gen_throughput") for state in states]
        loads = self._first(("/v1/loads",), CONTROL_TIMEOUT_S).get("loads", [])
        return Load(
            version=self.weight_version(),
            running=sum(load.get("num_running_reqs", 0) for load in loads),
            waiting=sum(load.get("num_waiting_reqs", 0) for load in loads),
            generated=None,
            tokens_per_s=sum(speed or 0.0 for speed in speeds),
            paused=None,
            model=str(info.get("model_path")),
        )

    def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling_params: dict | Sequence[dict],
        *,
        rid: Sequence[str] | None = None,
    ) -> list[dict]:
        """Responses with log-probs, in the order of the prompts, then of their samples."""
        body = _generation(input_ids, sampling_params, rid)
        return self._answers(self._request("POST", "/generate", body))

    def score(self, input_ids: Sequence[int], *, start: int) -> list[float]:
        """Log-probs of ``input_ids[start:]``, each given all tokens before it; SGLang only."""
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        scored = self._object("POST", "/generate", body)["meta_info"]["input_token_logprobs"]
        return [log_prob for log_prob, *_ in scored[start:]]

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator["Session"]:
        """For many generations at once on the running event loop."""
        async with httpx.AsyncClient(**self._options) as http:
            yield Session(self, http)

    def pause(self, mode: str = "retract") -> None:
        self._request("POST", "/pause_generation", {"mode": mode}, CONTROL_TIMEOUT_S)

    def resume(self) -> None:
        self._request("POST", "/continue_generation", {}, CONTROL_TIMEOUT_S)

    def flush(self) -> None:
        self._request("POST", "/flush_cache", {}, CONTROL_TIMEOUT_S)

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """Abort the requests whose id starts with ``rid``, or all of them."""
        body = {"rid": rid, "abort_all": everything}
        self._request("POST", "/abort_request", body, CONTROL_TIMEOUT_S)

    def update_weights_from_disk(
        self, folder: Path | str, version: int | str, *, flush_cache: bool = True
    ) -> None:
        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            "flush_cache": flush_cache,
        }
        self._succeed("/update_weights_from_disk", body)

    def begin_weight_update(self) -> None:
        """Open a session for weights; one that a dead trainer left open is taken over."""
        try:
            self._succeed("/begin_weight_update", {})
        except EngineError as error:
            if "already open" not in str(error):
                raise

    def update_weights_from_tensor(self, serialized: Sequence[str], load_format: str) -> None:
        """One call of the engine's weight loader.

        Args:
            serialized: what each tensor-parallel rank of the engine gets (``wire.payload``).
            load_format: dotted path of the loader, as the server was started with.
        """
        body = {
            "serialized_named_tensors": list(serialized),
            "load_format": load_format,
            "flush_cache": False,
        }
        self._succeed("/update_weights_from_tensor", body)

    def end_weight_update(self) -> None:
        self._succeed("/end_weight_update", {})

    def set_weight_version(self, version: int | str) -> None:
        """Stamp what is generated from now on; running requests keep their earlier spans."""
        body = {"new_version": str(version), "abort_all_requests": False}
        self._succeed("/update_weight_version", body)

    def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Free the device memory of ``tags`` ("weights", "kv_cache"; None: all), when idle."""
        self._request("POST", "/release_memory_occupation", {"tags": tags and list(tags)})

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Take the device memory back; its contents are to be written anew."""
        self._request("POST", "/resume_memory_occupation", {"tags": tags and list(tags)})

    def _first(self, endpoints: Sequence[str], timeout_s: float) -> dict:
        """What the first endpoint that exists answers: SGLang renames them between releases."""
        for endpoint in endpoints[:-1]:
            try:
                return self._object("GET", endpoint, None, timeout_s)
            except EngineError as error:
                if error.status != 404:
                    raise
        return self._object("GET", endpoints[-1], None, timeout_s)

    def _succeed(self, endpoint: str, body: dict) -> None:
        answer = self._object("POST", endpoint, body)
        if not answer.get("success"):
            raise EngineError(f"{self.url}{endpoint} failed: {answer.get('message')}")

    def _object(
        self, method: str, endpoint: str, body: dict | None, timeout_s: float | None = None
    ) -> dict:
        response = self._request(method, endpoint, body, timeout_s)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EngineError(
                f"{self.url}{endpoint} answered no JSON object: {response.text[:200]}"
            )
        return answer

    def _request(
        self, method: str, endpoint: str, body: dict | None = None, timeout_s: float | None = None
    ) -> httpx.Response:
        timeout = self._timeout_s if timeout_s is None else timeout_s
        if (limit := _DEADLINE.get()) is not None:
            timeout = min(timeout, limit - time.monotonic())
            if timeout <= 0:
                raise EngineError(f"{self.url}{endpoint} was not asked: the deadline has passed")
        try:
            content = None if body is None else orjson.dumps(body)
            response = self._http.request(method, endpoint, content=content, timeout=timeout)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._silent(endpoint, error, timeout) from error
        except RuntimeError as error:  # closed: the engine has left the fleet
            raise EngineError(f"{self.url}{endpoint} was not asked: {error}") from error
        return self._checked(endpoint, response)

    def _silent(self, endpoint: str, error: Exception, timeout_s: float) -> EngineError:
        if isinstance(error, httpx.TimeoutException):
            return EngineError(f"{self.url}{endpoint} did not answer within {timeout_s:.0f} s")
        return EngineError(
            f"{self.url}{endpoint} did not answer: {str(error) or type(error).__name__}"
        )

    def _checked(self, endpoint: str, response: httpx.Response) -> httpx.Response:
        if response.status_code == 200:
            return response
        raise EngineError(
            f"{self.url}{endpoint} answered {response.status_code}: {_message(response)}",
            status=response.status_code,
        )

    def _answers(self, response: httpx.Response) -> list[dict]:
        try:
            answer = parsed(response.content)
        except ValueError:
            answer = None
        if not isinstance(answer, list):
            raise EngineError(f"{self.url}/generate answered a batch with {response.text[:200]!r}")
        return answer


class Session:
    """Generation on an event loop; cancelling a call drops its connection, and the request."""

    def __init__(self, client: EngineClient, http: httpx.AsyncClient) -> None:
        self._client, self._http = client, http

    async def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        params: Sequence[dict],
        rid: Sequence[str],
        read: Callable[[list[dict]], Read],
        *,
        cache_key: str | None = None,
    ) -> Read:
        """What ``read`` makes of what ``EngineClient.generate`` would return.

        Args:
            read: must keep nothing of the answers: they are millions of small objects.
            cache_key: only requests with the same one share cached prefixes; SGLang's extra_key.
        """
        body = _generation(input_ids, params, rid)
        if cache_key is not None:
            body["extra_key"] = cache_key
        try:
            response = await self._http.post("/generate", content=orjson.dumps(body))
        except httpx.HTTPError as error:
            raise self._client._silent("/generate", error, self._client._timeout_s) from error
        with uncollected():
            return read(self._client._answers(self._client._checked("/generate", response)))


def _generation(
    input_ids: Sequence[Sequence[int]],
    sampling_params: dict | Sequence[dict],
    rid: Sequence[str] | None,
) -> dict:
    params = sampling_params if isinstance(sampling_params, dict) else list(sampling_params)
    body = {
        "input_ids": [list(ids) for ids in input_ids],
        "sampling_params": params,
        "return_logprob": True,
    }
    return body if rid is None else {**body, "rid": list(rid)}


def parsed(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return json.loads(content)  # knows NaN, which says more of an engine than "no JSON"


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


@functools.cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # reading them takes tens of milliseconds


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return response.text[:500]
    if not isinstance(body, dict):
        return response.text[:500]
    error = body.get("error")
    return str(error.get("message") if isinstance(error, dict) else body.get("message", body))
