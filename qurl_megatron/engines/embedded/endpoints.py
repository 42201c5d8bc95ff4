"""The embedded engine behind SGLang's HTTP endpoints, so that one client drives either.

Handlers parse, hand a command to the engine's thread and wait; none of them touches the engine
itself. Every message of a weight update is handled there too, between two decode steps. Nothing
from the network is unpickled.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from qurl_megatron import __version__
from qurl_megatron.engines.embedded import native
from qurl_megatron.engines.embedded.decoder import DTYPES, Decoder
from qurl_megatron.engines.embedded.engine import Engine
from qurl_megatron.engines.embedded.live_weights import EmbeddedWeights
from qurl_megatron.engines.embedded.openai import models, parse_completion
from qurl_megatron.engines.embedded.protocol import Generation, RequestLimits, parse_generate
from qurl_megatron.engines.embedded.read_weights import read_weights, refuse_other_scheme
from qurl_megatron.engines.embedded.stream import Bell, Stream, StreamProgress
from qurl_megatron.engines.embedded.text_codec import TextCodec
from qurl_megatron.engines.embedded.thread import EngineInfo, EngineThread
from qurl_megatron.engines.kinds import ENGINE_KINDS
from qurl_megatron.engines.session import UpdateEnd
from qurl_megatron.errors import ConfigError
from qurl_megatron.observe.clock import now
from qurl_megatron.tensors.arch import arch_of, facts_of, read_eos
from qurl_megatron.weights.places import description_of
from qurl_megatron.wire.lease import ENDPOINT, Lease
from qurl_megatron.wire.message import LOADER, message_in

log = logging.getLogger(__name__)

PAUSE_MODES = ("abort", "retract", "in_place")


@dataclass(frozen=True, kw_only=True)
class Speech:
    """How the engine speaks, where SGLang leaves a choice; the options have SGLang's names."""

    skip_tokenizer_init: bool = False
    """Token ids only, as a trainer wants it: no text is read or written."""

    stream_interval: int = 1
    """Tokens per event of a stream; ``sampling_params.stream_interval`` overrides it."""

    incremental_streaming_output: bool = False
    """Events have what is new; SGLang's default is all there is so far."""

    def __post_init__(self) -> None:
        if self.stream_interval < 1:
            raise ConfigError(f"--stream-interval must be >= 1, got {self.stream_interval}")


def serve(
    model_dir: str | Path,
    *,
    scheme: str = "none",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    host: str = "127.0.0.1",
    port: int = 0,
    port_file: str | Path | None = None,
    threads: int = 0,
    cache_gb: float = 2.0,
    exit_with_stdin: bool = False,
    api_key: str | None = None,
    speech: Speech = Speech(),
) -> None:
    """Serve one model until SIGTERM, SIGINT or, if asked, the end of standard input.

    Args:
        model_dir: Hugging Face folder; quantized on load unless it is quantized already.
        scheme: format of the block's linear layers.
        dtype: format of everything else, and of the activations between layers.
        port: 0 takes a free one.
        port_file: gets the port, atomically, once requests are answered.
        threads: CPU threads; 0 leaves torch's default.
        cache_gb: key/value cache in GiB.
        exit_with_stdin: leave when stdin reaches its end, so that a dead parent leaves no orphan.
        api_key: required as ``Authorization: Bearer`` on everything but /health.
        speech: text or token ids, and how to stream.

    Raises:
        ConfigError: the address is not one of this machine, or the port is taken.
    """
    if threads:
        torch.set_num_threads(threads)
    with bound(host, port) as listener:
        engine = load_engine(Path(model_dir), scheme=scheme, dtype=dtype, cache_gb=cache_gb)
        worker = EngineThread(engine, threads)
        config = uvicorn.Config(
            build_app(worker, str(model_dir), api_key=api_key, speech=speech),
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=5,
        )
        server = _Server(config, worker, port_file)
        if exit_with_stdin:
            threading.Thread(target=server.leave_with_stdin, daemon=True).start()
        server.run(sockets=[listener])
    if worker.failure is not None:
        raise RuntimeError("the engine failed") from worker.failure
    worker.close()


def load_engine(
    model_dir: Path,
    *,
    scheme: str,
    dtype: str,
    cache_gb: float,
    device: str = "auto",
) -> Engine:
    """Engine with the weights of a Hugging Face folder, quantized or not, or a Megatron checkpoint.

    Raises:
        ConfigError: the weights are not of a model, a kind or a scheme that the engine computes.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {list(DTYPES)}, got {dtype!r}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    refuse_other_scheme(model_dir, scheme)
    arch = arch_of(description_of(model_dir), quantized=True)
    decoder = Decoder(arch, scheme, DTYPES[dtype], torch.device(device))
    tensors, _ = read_weights(model_dir, decoder)
    decoder.load(tensors)
    if decoder.largest_code and device == "cpu" and (why := native.refusal(decoder)):
        log.warning("decode steps are computed by torch, which takes longer: %s", why)
    return Engine(decoder, cache_gb)


def bound(host: str, port: int) -> socket.socket:
    """A socket to listen at.

    Raises:
        ConfigError: the address is not one of this machine, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Were TCP not named, asyncio would not know it for TCP and leave Nagle's algorithm on: on a
    # connection that is kept, an answer of two writes then waits 40 ms for the client's ACK.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except (OSError, OverflowError) as error:  # the latter: a port above 65535
        made.close()
        why = getattr(error, "strerror", error)
        raise ConfigError(
            f"nothing can listen at {host}, port {port} ({why}); give another --port or --host"
        ) from None
    return made


def build_app(
    worker: EngineThread,
    model_path: str,
    *,
    api_key: str | None = None,
    speech: Speech = Speech(),
) -> Starlette:
    handlers = _Handlers(worker, model_path, speech)
    get, post = ["GET"], ["POST"]
    app = Starlette(
        routes=[
            Route("/health", handlers.health, methods=get),
            Route("/health_generate", handlers.health_generate, methods=get),
            # SGLang's present names, and those of earlier releases.
            Route("/server_info", handlers.server_info, methods=get),
            Route("/get_server_info", handlers.server_info, methods=get),
            Route("/model_info", handlers.model_info, methods=get),
            Route("/get_model_info", handlers.model_info, methods=get),
            Route("/v1/loads", handlers.loads, methods=get),
            Route("/v1/models", handlers.models, methods=get),
            Route("/generate", handlers.generate, methods=post),
            Route("/v1/completions", handlers.completions, methods=post),
            Route("/flush_cache", handlers.flush_cache, methods=get + post),
            Route("/pause_generation", handlers.pause, methods=post),
            Route("/continue_generation", handlers.resume, methods=post),
            Route("/update_weights_from_disk", handlers.update_from_disk, methods=post),
            Route("/update_weights_from_tensor", handlers.update_from_tensor, methods=post),
            Route("/begin_weight_update", handlers.begin_update, methods=post),
            Route("/end_weight_update", handlers.end_update, methods=post),
            Route("/update_weight_version", handlers.rename, methods=post),
            Route("/abort_request", handlers.abort, methods=post),
            Route(ENDPOINT, handlers.lease, methods=post),
        ],
        exception_handlers={ConfigError: _bad_request},
    )
    if api_key is not None:
        app.add_middleware(_RequireKey, api_key=api_key)
    return app


class _Handlers:
    def __init__(self, worker: EngineThread, model_path: str, speech: Speech) -> None:
        self.worker, self.model_path, self.speech = worker, model_path, speech
        self.served = model_path  # the name by which clients know the model
        decoder = worker.engine.decoder
        self.decoder, self.scheme = decoder, decoder.scheme
        self.dtype = str(decoder.dtype).removeprefix("torch.")
        folder = description_of(model_path)
        self.codec = None if speech.skip_tokenizer_init else TextCodec.of(folder)
        self.limits = RequestLimits(
            decoder.arch.vocab, worker.engine.max_total_tokens, read_eos(folder)
        )
        self._updating = asyncio.Lock()
        self._open = False  # a session for weights
        self._end = UpdateEnd(EmbeddedWeights(worker.engine))
        self._lease = Lease(facts_of(folder))
        self._bell: Bell | None = None

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.worker.failure is None else 503)

    async def health_generate(self, request: Request) -> Response:
        """Generate one token, as proof that the engine's thread is alive; waits while paused."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        await asyncio.wrap_future(self.worker.submit(parse_generate(body, self.limits).sequences))
        return Response()

    async def server_info(self, request: Request) -> Response:
        info = await asyncio.wrap_future(self.worker.info())
        return JSONResponse(
            {
                "engine": ENGINE_KINDS["embedded"].says,
                "custom_weight_loader": [LOADER],
                "version": __version__,
                "model_path": self.model_path,
                "tokenizer_path": self.tokenizer_path,
                "weight_version": info.version,
                "scheme": self.scheme,
                "dtype": self.dtype,
                "device": str(self.decoder.device),
                "decode_step": self.worker.engine.decode_step,
                "threads": torch.get_num_threads(),
                "context_length": self.decoder.arch.max_position,
                "stream_interval": self.speech.stream_interval,
                "incremental_streaming_output": self.speech.incremental_streaming_output,
                **self._load(info),
                "num_generated_tokens": info.generated,
                "num_retractions": info.retractions,
                "is_paused": info.paused,
            }
        )

    async def loads(self, request: Request) -> Response:
        """SGLang's /v1/loads, as far as it means anything here."""
        info = await asyncio.wrap_future(self.worker.info())
        queues = {"waiting": info.waiting, "retracted": info.retracted}
        load = {"timestamp": now(), "dp_rank": 0, **self._load(info), "queues": queues}
        return JSONResponse({"version": __version__, "loads": [load]})

    def _load(self, info: EngineInfo) -> dict:
        """What is in the cache and in the queue, by SGLang's names."""
        capacity = self.worker.engine.cache.capacity
        return {
            "num_running_reqs": info.running,
            "num_waiting_reqs": info.waiting,
            "max_running_requests": self.worker.engine.cache.max_rows,
            "num_used_tokens": info.cached_tokens,
            "max_total_num_tokens": capacity,
            "token_usage": round(info.cached_tokens / capacity, 4),
            "cache_hit_rate": 0.0,  # nothing is cached across requests
        }

    @property
    def tokenizer_path(self) -> str | None:
        return None if self.codec is None else str(self.codec.path.parent)

    async def model_info(self, request: Request) -> Response:
        info = await asyncio.wrap_future(self.worker.info())
        return JSONResponse(
            {
                "model_path": self.model_path,
                "served_model_name": self.served,
                "tokenizer_path": self.tokenizer_path,
                "is_generation": True,
                "weight_version": info.version,
            }
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse(models(self.served, self.limits.max_total_tokens))

    async def generate(self, request: Request) -> Response:
        generation = parse_generate(await _json(request), self.limits, self.codec)
        if generation.stream:
            incremental = self.speech.incremental_streaming_output

            def event(index: int, progress: StreamProgress) -> dict:
                return generation.event(index, progress, incremental=incremental)

            return _events(self._follow(generation, event))
        await self._finish(request, generation)
        return JSONResponse(generation.answer(self.codec))

    async def completions(self, request: Request) -> Response:
        body = await _json(request)
        completion = parse_completion(body, self.limits, self.codec, self.served)
        if completion.generation.stream:
            follow = self._follow(completion.generation, completion.chunk, completion.last_chunks)
            return _events(follow)
        await self._finish(request, completion.generation)
        return JSONResponse(completion.answer(self.codec))

    async def _finish(self, request: Request, generation: Generation) -> None:
        """Generate all of it; a client that leaves ends its sequences."""
        finished = asyncio.wrap_future(self.worker.submit(generation.sequences))
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not finished.done():
            self._abandon(generation)
        await finished

    async def _follow(
        self,
        generation: Generation,
        event: Callable[[int, StreamProgress], dict],
        last_events: Callable[[list[StreamProgress]], Iterable[dict]] = lambda parts: (),
    ) -> AsyncGenerator[dict, None]:
        """Generate, with an event for each piece; closed early, it ends the sequences."""
        interval = generation.interval or self.speech.stream_interval
        if self._bell is None:  # the event loop runs by now
            self._bell = Bell()
        stream = Stream(generation.sequences, generation.styles, self.codec, interval, self._bell)
        finished = self.worker.submit(generation.sequences)
        parts: dict[int, StreamProgress] = {}
        try:
            async for index, progress in stream.pieces(finished):
                parts[index] = progress
                yield event(index, progress)
        finally:
            if not finished.done():
                self._abandon(generation)
        for one in last_events([parts[index] for index in sorted(parts)]):
            yield one

    def _abandon(self, generation: Generation) -> None:
        mine = set(map(id, generation.sequences))
        self.worker.call(lambda engine: engine.abort(lambda s: id(s) in mine, "Client left."))

    async def flush_cache(self, request: Request) -> Response:
        """Nothing is cached across requests; SGLang's answer while some run is a refusal, but for
        those that a pause has retracted."""
        info = await asyncio.wrap_future(self.worker.info())
        if info.running or (info.waiting and not info.paused):
            message = f"Not flushed: {info.running} running and {info.waiting} waiting requests.\n"
            return Response(message, status_code=400)
        return Response("Cache flushed.\n")

    async def pause(self, request: Request) -> Response:
        mode = (await _json(request, empty={})).get("mode") or "abort"
        if mode not in PAUSE_MODES:
            raise ConfigError(f"mode must be one of {list(PAUSE_MODES)}, got {mode!r}")
        await asyncio.wrap_future(self.worker.pause(mode))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        await asyncio.wrap_future(self.worker.resume())
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def abort(self, request: Request) -> Response:
        body = await _json(request)
        rid = body.get("rid") or ""
        if not body.get("abort_all") and not rid:
            raise ConfigError("abort_request needs a rid, or abort_all: true")

        def matches(sequence) -> bool:  # by prefix, as SGLang does: one rid covers its n samples
            return bool(body.get("abort_all")) or sequence.rid.startswith(rid)

        await asyncio.wrap_future(
            self.worker.call(lambda engine: engine.abort(matches, "Aborted by abort_request."))
        )
        return Response()

    async def lease(self, request: Request) -> Response:
        return JSONResponse(self._lease.ask(await _json(request)))

    async def update_from_disk(self, request: Request) -> Response:
        """A whole set of weights, read and checked while the engine keeps generating."""
        body = await _json(request)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not Path(path).is_dir():
            return _outcome(f"model_path {path!r} is not a folder on this machine", success=False)
        async with self._updating:
            try:
                tensors, found = await run_in_threadpool(read_weights, Path(path), self.decoder)
                name = str(version if version is not None else path if found is None else found)
                recompute = bool(body.get("flush_cache"))

                def update(engine: Engine) -> None:
                    engine.update(tensors, name, recompute=recompute)
                    self._end.forget()

                await asyncio.wrap_future(self.worker.call(update))
            except (ConfigError, OSError) as error:
                return _outcome(str(error), success=False)
            self.model_path = path
        return _outcome(f"Weights are now version {name}.")

    async def begin_update(self, request: Request) -> Response:
        if self._open:
            return _outcome("A weight-update session is already open.", success=False)
        self._open = True
        return _outcome("A weight-update session is open.")

    async def end_update(self, request: Request) -> Response:
        self._open = False
        return _outcome("The weight-update session is closed.")

    async def update_from_tensor(self, request: Request) -> Response:
        """A message of an update: what comes of it is in the receipts, as with SGLang."""
        body = await _json(request)
        if body.get("load_format") != LOADER:
            raise ConfigError(f"load_format must be {LOADER!r}: this engine has no other loader")
        parts = body.get("serialized_named_tensors")
        if not isinstance(parts, list) or len(parts) != 1:
            raise ConfigError("serialized_named_tensors must be a list of one text: one rank's")
        if not self._open:
            return _outcome("No weight-update session is open.", success=False)
        message = await run_in_threadpool(message_in, parts[0])  # may be megabytes

        def take(engine: Engine) -> None:
            with torch.inference_mode():  # as the weights were made
                self._end.handle(message)

        await asyncio.wrap_future(self.worker.call(take))
        return _outcome("The message was received.")

    async def rename(self, request: Request) -> Response:
        version = (await _json(request)).get("new_version")
        if not isinstance(version, str) or not version:
            raise ConfigError(f"new_version must be a text, got {version!r}")
        await asyncio.wrap_future(self.worker.call(lambda engine: engine.rename(version)))
        return _outcome(f"Weights are now version {version}.")


def _outcome(message: str, *, success: bool = True) -> Response:
    return JSONResponse(
        {"success": success, "message": message}, status_code=200 if success else 400
    )


async def _json(request: Request, empty: dict | None = None) -> dict:
    raw = await request.body()
    if not raw and empty is not None:
        return empty
    try:
        body = await request.json()
    except ValueError as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ConfigError("the body must be a JSON object")
    return body


def _events(bodies: AsyncGenerator[dict, None]) -> Response:
    """Bodies as server-sent events, in SGLang's form; what fails on the way is the last of them."""

    async def texts() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(bodies):
            try:
                async for body in bodies:
                    yield b"data: " + orjson.dumps(body) + b"\n\n"
            except Exception as error:  # the status has been sent: the client must get it here
                log.exception("a stream failed")
                failure = {"message": str(error), "type": "internal_server_error", "code": 500}
                yield b"data: " + orjson.dumps({"error": failure}) + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(texts(), media_type="text/event-stream")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _bad_request(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": {"message": str(error)}}, status_code=400)


class _RequireKey:
    """Plain ASGI: Starlette's BaseHTTPMiddleware would hide disconnects from the handlers."""

    def __init__(self, app, api_key: str) -> None:
        self.app, self.expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope, receive, send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["path"] == "/health" or hmac.compare_digest(given, self.expected):
            await self.app(scope, receive, send)
        else:
            refusal = JSONResponse({"error": {"message": "Unauthorized"}}, status_code=401)
            await refusal(scope, receive, send)


class _Server(uvicorn.Server):
    """Uvicorn that reports its port when ready, and ends requests instead of waiting for them."""

    def __init__(self, config, worker: EngineThread, port_file: str | Path | None) -> None:
        super().__init__(config)
        self._worker, self._port_file = worker, port_file

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets=sockets)
        if self._port_file is not None:
            aside = Path(f"{self._port_file}.tmp")
            aside.write_text(f"{sockets[0].getsockname()[1]}\n", encoding="utf-8")
            os.replace(aside, self._port_file)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._worker.failure is not None

    async def shutdown(self, sockets=None) -> None:
        self._worker.call(lambda engine: engine.abort(lambda _: True, "The engine is leaving."))
        await super().shutdown(sockets=sockets)

    @contextlib.contextmanager
    def capture_signals(self):
        # Uvicorn's own would raise the signal again after a clean shutdown: exit status -15, not 0.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self.handle_exit)
        yield

    def leave_with_stdin(self) -> None:
        # The bare descriptor: a thread inside sys.stdin's lock aborts the interpreter's own exit.
        while os.read(0, 4096):
            pass
        self.should_exit = True
