"""One client for SGLang's HTTP protocol: embedded engines and real SGLang servers alike.

Control requests block and are thread-safe. Generation is a coroutine, so that hundreds of requests
can wait, and be given up, without a thread each. Every failure is an EngineError that names the
engine, the endpoint and the cause.

Both run on an event loop, where one limit holds for a whole exchange. A socket's own limit starts
again with every byte, so a peer that sends a byte now and then could keep us waiting forever.
"""

import asyncio
import atexit
import contextlib
import functools
import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
import orjson

from qurl_megatron.config.keys import names_a_user
from qurl_megatron.engines.kinds import LOADER
from qurl_megatron.engines.starting import API_KEY
from qurl_megatron.fleet.answer import Info, parsed, read_info, uncollected
from qurl_megatron.kit import event_loop
from qurl_megatron.kit.errors import Foreseen, keep_secret
from qurl_megatron.kit.record import Malformed, convert, shortened
from qurl_megatron.wire import packed
from qurl_megatron.wire.lease import ENDPOINT, LeaseRequest, LeaseVerdict, Owner

GENERATE = "/generate"
CONTROL_BYTES = 16 << 20  # of an answer to anything but a generation
CONTROL_TIMEOUT_S = 60.0  # pause, abort, info: answered between two decode steps
GRACE_S = 1.0  # for connections to close when the process ends
KEPT_S = 2.0  # for an idle connection; servers close theirs after 5 s

Item = TypeVar("Item")
Read = TypeVar("Read")
Result = TypeVar("Result")

_DEADLINE: ContextVar[float] = ContextVar("deadline", default=math.inf)


class EngineError(Foreseen, RuntimeError):
    """An engine failed a request; names the engine, the endpoint and the answer."""

    def __init__(self, message: str, *, status: int | None = None, faulty: bool = False) -> None:
        super().__init__(message)
        self.status = status  # of the HTTP answer, where there was one
        self.faulty = faulty  # the answer cannot be true

    @property
    def refused(self) -> bool:
        """Whether the engine refused our key; another engine may take it."""
        return self.status in (401, 403)

    @property
    def ours(self) -> bool:
        """Whether the engine blames the request; another engine may answer it."""
        client_error = self.status is not None and 400 <= self.status < 500
        return client_error and not self.refused and self.status not in (408, 429)


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Inside, all requests of this thread together wait at most ``seconds``."""
    token = _DEADLINE.set(min(time.monotonic() + seconds, _DEADLINE.get()))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def in_parallel(
    act: Callable[[Item], Result], items: Sequence[Item], timeout_s: float
) -> tuple[dict[Item, Result], dict[Item, EngineError]]:
    """Call ``act`` on all items at once; return the results and the errors by item.

    An item that takes longer than ``timeout_s`` has an error. Daemon threads, because one whose
    engine hangs must not keep the interpreter from ending.
    """
    outcomes: dict[Item, Result | BaseException] = {}

    def run(item: Item) -> None:
        try:
            with deadline(timeout_s):
                outcomes[item] = act(item)
        except BaseException as error:  # raised below, unless it is an EngineError
            outcomes[item] = error

    threads = [threading.Thread(target=run, args=(item,), daemon=True) for item in items]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s + 1.0  # a request that meets the deadline raises first
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    results, errors = {}, {}
    for item in items:
        overdue = EngineError(f"{item} was not done within {timeout_s:.0f} s")
        match outcomes.get(item, overdue):
            case EngineError() as error:
                errors[item] = error
            case BaseException() as error:
                raise error
            case result:
                results[item] = result
    return results, errors


class EngineClient:
    """Requests to one engine."""

    def __init__(self, url: str, *, timeout_s: float = 600.0, api_key: str | None = None) -> None:
        if names_a_user(url):
            raise EngineError(
                "an engine's URL has a user name or a password, which logs would show; give its "
                f"key in {API_KEY}"
            )
        self.url, self.timeout_s, self.api_key = url.rstrip("/"), timeout_s, api_key
        keep_secret(api_key)  # the engine, or a proxy before it, may quote it
        # A compressed answer could expand to any size.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._headers = headers
        self._tls = _tls() if self.url.startswith("https:") else False
        self._closed = False
        self.packs = True  # it packs its answers; False once it has turned out that it cannot
        try:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
                raise ValueError("give e.g. http://127.0.0.1:30000")
            parts.hostname.encode("idna")  # raises for names that cannot be looked up
        except ValueError as error:
            raise EngineError(f"{url} is not an engine URL: {error}") from None

    @contextlib.contextmanager
    def believing(self, endpoint: str) -> Iterator[None]:
        """Turn ``Malformed`` into an ``EngineError`` that blames the engine."""
        try:
            yield
        except Malformed as error:
            raise EngineError(f"{self.url}{endpoint}: {error}", faulty=True) from None

    def close(self) -> None:
        """Refuse all further requests: the engine has left, or another process has its place."""
        self._closed = True

    def server_info(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict:
        """Ask the engine's own loop, which answers even while paused: so it runs."""
        return self._object("/server_info", None, timeout_s)

    def info(self, timeout_s: float = CONTROL_TIMEOUT_S) -> Info:
        """Return the checked fields of ``server_info``."""
        with self.believing("/server_info"):
            return read_info(self.server_info(timeout_s))

    def weight_version(self) -> str:
        # Not from server_info, where SGLang reports the model of its start.
        version = self._object("/model_info").get("weight_version")
        if version is None:
            raise EngineError(f"{self.url} reports no weight_version; this server is too old")
        return shortened(str(version))

    def pause(self, mode: str) -> None:
        self._request("/pause_generation", {"mode": mode}, CONTROL_TIMEOUT_S)

    def resume(self) -> None:
        self._request("/continue_generation", {}, CONTROL_TIMEOUT_S)

    def flush(self) -> None:
        self._request("/flush_cache", {}, CONTROL_TIMEOUT_S)

    def abort(self, rid: str) -> None:
        """Abort the requests whose id starts with ``rid``."""
        self._request("/abort_request", {"rid": rid, "abort_all": False}, CONTROL_TIMEOUT_S)

    def begin_weight_update(self) -> None:
        """Open a session for weights; one that a dead trainer left open is taken over."""
        try:
            self._succeed("/begin_weight_update", {})
        except EngineError as error:
            if "already open" not in str(error):
                raise

    def update_weights_from_tensor(self, serialized: Sequence[str]) -> None:
        """Call our weight loader with a message per tensor-parallel rank (``wire.payload``)."""
        body = {
            "serialized_named_tensors": list(serialized),
            "load_format": LOADER,
            "flush_cache": False,
        }
        self._succeed("/update_weights_from_tensor", body)

    def end_weight_update(self) -> None:
        self._succeed("/end_weight_update", {})

    def lease(
        self, owner: Owner, seconds: float, *, take_over: bool = False, timeout_s: float
    ) -> LeaseVerdict | None:
        """Ask for the engine, or for more time with it; 0 seconds give it back.

        Returns:
            None if the engine keeps no leases: SGLang's own server.
        """
        request = LeaseRequest(owner.token, owner.label, seconds, take_over)
        try:
            answer = self._object(ENDPOINT, msgspec.structs.asdict(request), timeout_s)
        except EngineError as error:
            if error.status in (404, 405):
                return None
            raise
        with self.believing(f"{ENDPOINT}: a malformed answer to a request for a lease"):
            return convert(LeaseVerdict, answer)

    def set_weight_version(self, version: str) -> None:
        """Name the weights from now on; running requests keep their earlier spans."""
        body = {"new_version": version, "abort_all_requests": False}
        self._succeed("/update_weight_version", body)

    def release_memory(self) -> None:
        """Free the device memory of weights and cache, when idle."""
        self._request("/release_memory_occupation", {})

    def resume_memory(self) -> None:
        """Take the device memory back; its contents must be written again."""
        self._request("/resume_memory_occupation", {})

    def _succeed(self, endpoint: str, body: dict) -> None:
        answer = self._object(endpoint, body)
        if not answer.get("success"):
            reason = shortened(answer.get("message"))
            raise EngineError(f"{self.url}{endpoint} failed: {reason}")

    def _object(
        self, endpoint: str, body: dict | None = None, timeout_s: float | None = None
    ) -> dict:
        with self.believing(endpoint):
            answer = parsed(self._request(endpoint, body, timeout_s))
            if not isinstance(answer, dict):
                raise Malformed(f"the answer is not an object: {shortened(answer)}")
            return answer

    def _request(
        self, endpoint: str, body: dict | None = None, timeout_s: float | None = None
    ) -> bytes:
        """Return the body of an answer with status 200; without ``body`` the request is a GET."""
        if timeout_s is None:
            timeout_s = self.timeout_s
        timeout = min(timeout_s, _DEADLINE.get() - time.monotonic())
        if timeout <= 0:
            raise EngineError(f"{self.url}{endpoint} was not asked: the deadline has passed")
        if self._closed:
            raise EngineError(f"{self.url}{endpoint} was not asked: the engine has left")
        content = None if body is None else orjson.dumps(body)

        async def ask() -> bytes:
            return await self._exchange(_control(), endpoint, content, timeout, CONTROL_BYTES)

        return event_loop.run_shared(ask())

    async def _exchange(
        self,
        http: aiohttp.ClientSession,
        endpoint: str,
        content: bytes | None,
        timeout_s: float,
        limit: int,
    ) -> bytes:
        """Return the body of an answer with status 200.

        Args:
            timeout_s: for all of it, from the connection to the last byte.
            limit: bytes that the body has at most.
        """
        url, chunks, size = self.url + endpoint, [], 0
        method = "GET" if content is None else "POST"
        try:
            async with (
                asyncio.timeout(timeout_s),
                http.request(
                    method,
                    url,
                    data=content,
                    headers=self._headers,
                    ssl=self._tls,
                    allow_redirects=False,
                ) as response,
            ):
                async for chunk in response.content.iter_any():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > limit:
                        raise EngineError(
                            f"{url} answered with more than {limit} bytes", faulty=True
                        )
        except TimeoutError as error:
            limit_s = round(timeout_s, 1)
            raise EngineError(f"{url} did not answer within {limit_s:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineError(f"{url} did not answer: {shortened(_cause(error))}") from error
        answer, status = b"".join(chunks), response.status
        if status != 200:
            raise EngineError(
                f"{url} answered {status}: {shortened(_message(answer))}", status=status
            )
        return answer

    async def generate(
        self,
        http: aiohttp.ClientSession,
        input_ids: Sequence[Sequence[int]],
        params: Sequence[dict],
        rid: Sequence[str],
        read: Callable[[bytes], Read],
        *,
        limit: int,
        cache_key: str | None = None,
        routed: bool = False,
    ) -> Read:
        """Return ``read``'s result for the body of an answer; if cancelled, drop the request.

        Args:
            http: ``generations()``.
            read: must keep no parsed object: there are millions of small ones.
            limit: bytes that the body has at most.
            cache_key: SGLang's extra_key; only requests with equal keys share cached prefixes.
            routed: answers are to name each token's experts.
        """
        body = {
            "input_ids": input_ids,
            "sampling_params": params,
            "return_logprob": True,
            "rid": rid,
        }
        if cache_key is not None:
            body["extra_key"] = cache_key
        if routed:
            body["return_routed_experts"] = True
        content = orjson.dumps(body)
        endpoint = packed.ENDPOINT if self.packs else GENERATE
        try:
            answer = await self._exchange(http, endpoint, content, self.timeout_s, limit)
        except EngineError as error:
            if error.status != 404 or endpoint == GENERATE:
                raise
            self.packs, endpoint = False, GENERATE  # SGLang's own server
            answer = await self._exchange(http, endpoint, content, self.timeout_s, limit)
        with uncollected(), self.believing(endpoint):
            return read(answer)


def generations() -> aiohttp.ClientSession:
    """Open a session for many generations at once, of any engines, on the running event loop."""
    return _http(force_close=True)  # never reuse a dead engine's connection


def _http(**settings: Any) -> aiohttp.ClientSession:
    # Hundreds of requests wait at once. None may wait for another's name look-up, which may hang.
    connector = aiohttp.TCPConnector(limit=0, use_dns_cache=False, **settings)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(),  # none: each whole exchange has a limit
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


@functools.cache
def _control() -> aiohttp.ClientSession:
    """Return the session of all short requests, on the shared loop."""
    http = _http(keepalive_timeout=KEPT_S)
    atexit.register(_end, http)
    return http


def _end(http: aiohttp.ClientSession) -> None:
    with contextlib.suppress(TimeoutError):  # a peer may never read the bytes sent to it
        event_loop.run_shared(asyncio.wait_for(http.close(), GRACE_S))


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # reading certificates takes tens of milliseconds


def _cause(error: BaseException) -> str:
    """Return the reason of the system or name server, if there is one: it is shorter."""
    root = error
    while (beneath := root.__cause__ or root.__context__) is not None:
        root = beneath
    if isinstance(root, OSError) and not isinstance(root, ssl.SSLError):
        number = root.errno or 0
        reason = os.strerror(number) if number > 0 else root.strerror
        if reason:
            return reason
    return str(error) or type(error).__name__


def _message(content: bytes) -> str:
    """Return the reason in the body of a refusal."""
    try:
        body = parsed(content)
    except Malformed:
        body = None
    if not isinstance(body, dict):
        return shortened(content)
    match body.get("error"):
        case {"message": message}:
            return str(message)
    return str(body.get("message", body))
