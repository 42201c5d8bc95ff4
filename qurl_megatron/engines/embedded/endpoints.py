"""The embedded engine behind SGLang's HTTP endpoints, so that one client drives either.

It has the endpoints that the fleet needs: token ids in and out, whole answers, new weights.
Handlers parse a request, hand a command to the engine's thread, and wait; none of them touches the
engine itself. Each message of a weight update is such a command too, and runs between two decode
steps. Nothing from the network is unpickled.
"""

import argparse
import asyncio
import contextlib
import hmac
import logging
import queue
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qurl_megatron import __version__
from qurl_megatron.checkpoints.places import description_of
from qurl_megatron.config.env import unseen_gpus
from qurl_megatron.engines.embedded import native
from qurl_megatron.engines.embedded.decoder import DTYPES, Decoder
from qurl_megatron.engines.embedded.engine import Engine
from qurl_megatron.engines.embedded.protocol import RequestLimits, parse_generate
from qurl_megatron.engines.embedded.read_weights import read_weights, refuse_other_scheme
from qurl_megatron.engines.kinds import ENGINE_KINDS, LOADER
from qurl_megatron.engines.starting import wait_for_end_of_stdin
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import arch_of, facts_of, read_eos
from qurl_megatron.wire.lease import ENDPOINT, Lease
from qurl_megatron.wire.message import message_in
from qurl_megatron.wire.session import UpdateEnd

log = logging.getLogger(__name__)

PAUSE_MODES = ("retract", "in_place")


def serve(options: argparse.Namespace, port: int, api_key: str | None) -> None:
    """Serve one model until SIGTERM, SIGINT or, if asked, the end of standard input.

    Args:
        options: of ``qurl serve``.
        port: 0 takes a free one.
        api_key: required as ``Authorization: Bearer`` on everything but /health.

    Raises:
        ConfigError: the address is not one of this machine, or the port is taken.
    """
    model_dir, threads = options.model_dir, options.threads
    if threads:
        torch.set_num_threads(threads)
    with bound(options.host, port) as listener:
        engine = load_engine(
            model_dir, scheme=options.scheme, dtype=options.dtype, cache_gb=options.cache_gb
        )
        worker = EngineThread(engine, threads)
        config = uvicorn.Config(
            build_app(worker, str(model_dir), api_key=api_key),
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=5,
        )
        server = _Server(config, worker, options.port_file)
        if options.exit_with_stdin:  # a dead parent leaves no orphan
            threading.Thread(target=server.leave_with_stdin, daemon=True).start()
        server.run(sockets=[listener])
    if worker.failure is not None:
        raise RuntimeError("the engine failed") from worker.failure
    worker.close()


def load_engine(
    model_dir: Path, *, scheme: str, dtype: str, cache_gb: float, device: str = "auto"
) -> Engine:
    """Return an engine with the weights of a Hugging Face folder or a Megatron checkpoint.

    Args:
        scheme: of ``SCHEMES``: format of the blocks' linear layers, quantized on load if necessary.
        dtype: of ``DTYPES``: format of everything else, and of the activations between layers.

    Raises:
        ConfigError: the engine cannot compute this model, format or scheme; or the device is "auto"
            and there are GPUs that torch does not see.
    """
    if device == "auto":
        if reason := unseen_gpus():
            raise ConfigError(reason)
        device = "cuda" if torch.cuda.is_available() else "cpu"
    refuse_other_scheme(model_dir, scheme)
    arch = arch_of(description_of(model_dir), quantized=True)
    decoder = Decoder(arch, scheme, DTYPES[dtype], torch.device(device))
    decoder.load(read_weights(model_dir, decoder))
    if decoder.largest_code and device == "cpu" and (reason := native.refusal(decoder)):
        log.warning("decode steps are computed by torch, which takes longer: %s", reason)
    return Engine(decoder, cache_gb)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket to listen at.

    Raises:
        ConfigError: the address is not one of this machine, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Name TCP, or asyncio does not recognize it and leaves Nagle's algorithm on: on a connection
    # that is kept open, an answer of two writes then waits 40 ms for the client's ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:  # OverflowError: a port above 65535
        listener.close()
        reason = getattr(error, "strerror", error)
        raise ConfigError(
            f"nothing can listen at {host}, port {port} ({reason}); give another --port or --host"
        ) from None
    return listener


def build_app(worker: "EngineThread", model_path: str, *, api_key: str | None = None) -> Starlette:
    handlers = _Handlers(worker, model_path)
    get, post = ["GET"], ["POST"]
    app = Starlette(
        routes=[
            Route("/health", handlers.health, methods=get),
            Route("/server_info", handlers.server_info, methods=get),
            Route("/model_info", handlers.model_info, methods=get),
            Route("/generate", handlers.generate, methods=post),
            Route("/flush_cache", handlers.nothing_to_do, methods=post),
            Route("/pause_generation", handlers.pause, methods=post),
            Route("/continue_generation", handlers.resume, methods=post),
            Route("/abort_request", handlers.abort, methods=post),
            Route("/begin_weight_update", handlers.nothing_to_do, methods=post),
            Route("/update_weights_from_tensor", handlers.update_from_tensor, methods=post),
            Route("/end_weight_update", handlers.nothing_to_do, methods=post),
            Route("/update_weight_version", handlers.rename, methods=post),
            Route(ENDPOINT, handlers.lease, methods=post),
        ],
        exception_handlers={ConfigError: _bad_request, 404: _not_found},
    )
    if api_key is not None:
        app.add_middleware(_RequireKey, api_key=api_key)
    return app


class EngineThread:
    """Owns an engine: runs commands between its steps, and sleeps when there is no work.

    All access to the engine is by such commands, so its state needs no lock, and weight updates
    and aborts happen between two steps.
    """

    def __init__(self, engine: Engine, threads: int = 0) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self._threads = threads
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Engine], Any]) -> Future:
        """Run a function between two steps."""
        future: Future = Future()
        self._commands.put((function, future))
        if self.failure is not None:
            self._fail_commands()
        return future

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        try:
            while self._obey():
                if self.engine.busy:
                    self.engine.step()
        except BaseException as error:
            # A failed step leaves the batch half written: no answer could be trusted.
            log.exception("the engine failed")
            self.failure = error
            for sequence in [*self.engine.running, *self.engine.waiting]:
                if not sequence.ended.done():
                    sequence.ended.set_exception(error)
            self._fail_commands()

    def _obey(self) -> bool:
        """Run the queued commands; sleep while there is nothing to generate. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            function, future = command
            try:
                future.set_result(function(self.engine))
            except Exception as error:  # the caller handles it
                future.set_exception(error)

    def _fail_commands(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    command[1].set_exception(RuntimeError(f"the engine failed: {self.failure!r}"))


class _Handlers:
    def __init__(self, worker: EngineThread, model_path: str) -> None:
        self.worker, self.model_path = worker, model_path
        folder, decoder = description_of(model_path), worker.engine.decoder
        self.limits = RequestLimits(
            vocab=decoder.arch.vocab,
            max_total_tokens=min(worker.engine.cache.capacity, decoder.arch.max_position),
            eos=read_eos(folder),
            routed=decoder.arch.experts is not None,
        )
        self._end = UpdateEnd(decoder)
        self._lease = Lease(facts_of(folder))

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.worker.failure is None else 503)

    async def server_info(self, request: Request) -> Response:
        def look(engine: Engine) -> dict[str, Any]:
            decoder = engine.decoder
            return {
                "engine": ENGINE_KINDS["embedded"].says,
                "custom_weight_loader": [LOADER],
                "version": __version__,
                "model_path": self.model_path,
                "weight_version": engine.version,
                "scheme": decoder.scheme,
                "dtype": str(decoder.dtype).removeprefix("torch."),
                "device": str(decoder.device),
                "decode_step": engine.decode_step,
                "threads": torch.get_num_threads(),
                "context_length": decoder.arch.max_position,
                "num_running_reqs": len(engine.running),
                "num_waiting_reqs": len(engine.waiting),
                "max_total_num_tokens": engine.cache.capacity,
                "num_generated_tokens": engine.generated,
                "is_paused": engine.paused,
            }

        return JSONResponse(await self._on_thread(look))

    async def model_info(self, request: Request) -> Response:
        version = await self._on_thread(lambda engine: engine.version)
        return JSONResponse({"model_path": self.model_path, "weight_version": version})

    async def generate(self, request: Request) -> Response:
        """Generate whole answers; if the client disconnects, abort its sequences."""
        generation = parse_generate(await _json(request), self.limits)
        await self._on_thread(lambda engine: engine.add(generation.sequences))
        finished = asyncio.gather(*(asyncio.wrap_future(s.ended) for s in generation.sequences))
        disconnected = asyncio.ensure_future(_disconnected(request))
        either: list[asyncio.Future] = [finished, disconnected]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        disconnected.cancel()
        if not finished.done():
            unfinished = set(map(id, generation.sequences))
            self.worker.call(
                lambda engine: engine.abort(lambda s: id(s) in unfinished, "Client left.")
            )
        await finished
        return JSONResponse(generation.answer())

    async def pause(self, request: Request) -> Response:
        mode = (await _json(request)).get("mode")
        if mode not in PAUSE_MODES:
            raise ConfigError(f"mode must be one of {list(PAUSE_MODES)}, got {mode!r}")
        await self._on_thread(lambda engine: engine.pause(retract=mode == "retract"))
        return Response()

    async def resume(self, request: Request) -> Response:
        await self._on_thread(Engine.resume)
        return Response()

    async def abort(self, request: Request) -> Response:
        """End the requests whose id begins with ``rid``, or all of them."""
        body = await _json(request)
        prefix = body.get("rid") or ""
        if body.get("abort_all"):
            prefix = ""
        elif not prefix:
            raise ConfigError("abort_request needs a rid, or abort_all: true")
        await self._on_thread(
            lambda engine: engine.abort(
                lambda sequence: sequence.rid.startswith(prefix), "Aborted by abort_request."
            )
        )
        return Response()

    async def lease(self, request: Request) -> Response:
        return JSONResponse(self._lease.ask(await _json(request)))

    async def nothing_to_do(self, request: Request) -> Response:
        """Answer requests that only SGLang needs: here no cache outlives its request, and each
        message of an update names its session."""
        return _SUCCESS

    async def update_from_tensor(self, request: Request) -> Response:
        """Handle a message of an update; as with SGLang, the receipts have the result."""
        body = await _json(request)
        if body.get("load_format") != LOADER:
            raise ConfigError(f"load_format must be {LOADER!r}: this engine has no other loader")
        parts = body.get("serialized_named_tensors")
        if not isinstance(parts, list) or len(parts) != 1:
            raise ConfigError("serialized_named_tensors must be a list of one text: one rank's")
        message = await run_in_threadpool(message_in, parts[0])  # may be megabytes

        def take(engine: Engine) -> None:
            with torch.inference_mode():  # as the weights were made
                self._end.handle(message)

        await self._on_thread(take)
        return _SUCCESS

    async def rename(self, request: Request) -> Response:
        version = (await _json(request)).get("new_version")
        if not isinstance(version, str) or not version:
            raise ConfigError(f"new_version must be a text, got {version!r}")
        await self._on_thread(lambda engine: engine.rename(version))
        return _SUCCESS

    async def _on_thread(self, function: Callable[[Engine], Any]) -> Any:
        return await asyncio.wrap_future(self.worker.call(function))


_SUCCESS = JSONResponse({"success": True})


async def _json(request: Request) -> dict:
    try:
        body = await request.json()
    except ValueError as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ConfigError("the body must be a JSON object")
    return body


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _bad_request(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": {"message": str(error)}}, status_code=400)


async def _not_found(request: Request, error: Exception) -> Response:
    message = f"the embedded engine has no {request.url.path}; send token ids to /generate"
    return JSONResponse({"error": {"message": message}}, status_code=404)


class _RequireKey:
    """Plain ASGI: Starlette's BaseHTTPMiddleware would hide disconnects from the handlers."""

    def __init__(self, app, api_key: str) -> None:
        self.app, self.expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope, receive, send) -> None:
        authorization = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["path"] == "/health" or hmac.compare_digest(authorization, self.expected):
            await self.app(scope, receive, send)
        else:
            refusal = JSONResponse({"error": {"message": "Unauthorized"}}, status_code=401)
            await refusal(scope, receive, send)


class _Server(uvicorn.Server):
    """Uvicorn, but it reports its port when ready, and at the end aborts requests."""

    def __init__(self, config, worker: EngineThread, port_file: str | Path | None) -> None:
        super().__init__(config)
        self._worker, self._port_file = worker, port_file

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets=sockets)
        if self._port_file is not None:
            write_whole(Path(self._port_file), f"{sockets[0].getsockname()[1]}\n")

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
        wait_for_end_of_stdin()
        self.should_exit = True
