"""SGLang's server as one engine of a run: ``python -P -m qurl_megatron.engines.sglang.server``.

Takes SGLang's own options and two more, and always loads our weight loader. Without CUDA it adds
the options that SGLang needs there, unless they are given.

The API key comes in the environment (``QURL_API_KEY``), so no process list shows it. SGLang logs
its arguments at the start, and hands them to its other processes. So the key is set after that, and
only in the process that answers HTTP. Requests without it get 401; ``/health`` needs none.

Importing this module has an effect: SGLang's other processes are spawned, a spawned process imports
the main module first, and this one then fills the gaps of a machine without a GPU.
"""

import argparse
import asyncio
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
# Launch scripts of other trainers export it; log-probs would then belong to temperature 1.
os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "false"

from qurl_megatron.config.env import unseen_gpus
from qurl_megatron.engines.sglang import compiling, cpu_layers
from qurl_megatron.engines.sglang.starting_sglang import ask_itself_directly, server_arguments
from qurl_megatron.engines.starting import API_KEY, given_key, wait_for_end_of_stdin
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import facts_of
from qurl_megatron.wire import packed
from qurl_megatron.wire.lease import ENDPOINT, Lease

cpu_layers.install()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--exit-with-stdin", action="store_true")
    parser.add_argument("--port-file", type=Path)
    our_options, sglang_options = parser.parse_known_args(argv)
    try:
        key = given_key(os.environ)
    except ConfigError as error:
        sys.exit(f"qurl: {error}")
    os.environ.pop(API_KEY, None)
    if our_options.exit_with_stdin:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()

    if reason := unseen_gpus():
        sys.exit(f"qurl: {reason}")
    cuda = torch.cuda.is_available()
    if cuda:
        compiling.use_cuda_of_pip()
    from sglang.srt.entrypoints.http_server import app, launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    if cpu_layers.wanted() and not cpu_layers.registered():
        sys.exit(
            "SGLang did not find the plugin of qurl-megatron, needed without a GPU: install "
            "the package in this environment with `pip install --no-deps -e .`, and start with "
            "`python -P`, which leaves out what the working folder says of it"
        )
    reserved = [_keep_port() for _ in range(2)]
    port, nccl_port = (each.getsockname()[1] for each in reserved)
    args = prepare_server_args(
        server_arguments(sglang_options, cuda=cuda, port=port, nccl_port=nccl_port)
    )
    if cpu_layers.wanted():
        # SGLang demands an entry per rank, but only kernels that are missing here would use it.
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(["0"] * args.tp_size))
    ask_itself_directly(args.host)
    args.resolve_once()
    app.add_route(ENDPOINT, leases(args.model_path), methods=["POST"])
    _answer_packed(app)
    try:
        launch_server(
            args,
            init_tokenizer_manager_func=partial(_init_tokenizer_manager, key),
            launch_callback=partial(_announce, args.port, our_options.port_file),
        )
    finally:
        _end_children()


def leases(model_path: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of the engine's lease."""
    try:
        facts = facts_of(model_path)
    except ConfigError:  # a name on a hub, or a model that no run trains
        facts = None
    lease = Lease(facts)

    async def ask(request: Request) -> Response:
        try:
            return JSONResponse(lease.ask(await request.json()))
        except (ConfigError, ValueError) as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)

    return ask


def _answer_packed(app: Any) -> None:
    """Add SGLang's ``/generate`` with packed answers."""
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.utils.json_response import orjson_response

    @app.post(packed.ENDPOINT)
    async def generate(wanted: GenerateReqInput, request: Request):
        manager = get_global_state().tokenizer_manager
        try:
            answers = await anext(manager.generate_request(wanted, request))
        except ValueError as error:
            status = getattr(error, "status_code", 400)
            return orjson_response({"error": {"message": str(error)}}, status)
        # Packing the experts of a long answer takes tens of milliseconds: do not block the loop.
        content = await asyncio.to_thread(packed.pack, answers)
        return Response(content, media_type="application/msgpack")


def _init_tokenizer_manager(key: str | None, *args, **kwargs):
    """Call SGLang's own function, after setting the key: here its arguments have been logged."""
    from sglang.srt.entrypoints.engine import init_tokenizer_manager
    from sglang.srt.runtime_context import get_context

    if key is not None:
        get_context().override("qurl.api_key", api_key=key)
    return init_tokenizer_manager(*args, **kwargs)


def _announce(port: int, file: Path | None) -> None:
    """Tell the fleet the port of the healthy server, in a file that appears whole."""
    if file is not None:
        write_whole(file, str(port))


def _exit_with_stdin() -> None:
    wait_for_end_of_stdin()
    _end_children()
    os._exit(0)


def _end_children() -> None:
    """Send SIGKILL: a stopped or stuck scheduler reacts to nothing else."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:  # it has just ended
            continue


def _keep_port() -> socket.socket:
    """Return a socket bound to a free port, which nobody else gets until SGLang listens there.

    SGLang can, since this socket does not listen and both allow their address to be reused. If
    SGLang chose the port of its ranks by itself, two engines that start together could choose the
    same.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


if __name__ == "__main__":
    main()
