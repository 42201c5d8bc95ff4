"""CPU seconds of the leading rank in a step, as the number of engines grows.

One process answers for 4, 16 and 64 engines of eight GPUs over HTTP, as SGLang's servers would if
they took no time: health checks, leases, the messages that bring a version of a 32B model from
eight training ranks, and 256 responses each, which all are in flight before the first is answered.
What is measured is the real ``Fleet``, ``Update`` and ``collect``. The limit is a twentieth of the
time that ``qurl plan`` predicts for generating them on H100s in INT8.

    python -m benchmarks.scale --out DIR
"""

import argparse
import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import orjson
import uvicorn
import xxhash
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.harness import measure, parser_of
from qurl_megatron.bench.command import count
from qurl_megatron.bench.record import Case, Figure, progress
from qurl_megatron.bench.rollout_engines import config_of
from qurl_megatron.checkpoints.ops import hf_shapes
from qurl_megatron.config import RolloutConfig, SyncConfig
from qurl_megatron.engines.kinds import LOADER
from qurl_megatron.fleet.collect import collect
from qurl_megatron.fleet.fleet import EngineRecord, Fleet
from qurl_megatron.fleet.tenancy import ANSWER_S, LEASE_S, RENEW_S
from qurl_megatron.plan.constants import Constants, gpu_of
from qurl_megatron.plan.seconds import Engine, Roofline, Workload, rollout_time
from qurl_megatron.publish.update import Update
from qurl_megatron.tensors.arch import Arch, read_arch
from qurl_megatron.tensors.slice import buckets
from qurl_megatron.tensors.table import hf_tensor, is_quantized
from qurl_megatron.types import Prompt
from qurl_megatron.wire import packed
from qurl_megatron.wire.files import FilesReceiver, FilesSender
from qurl_megatron.wire.lease import ENDPOINT, Lease, Owner
from qurl_megatron.wire.message import Blob, Piece, Receipt, aligned, encoded, message_in

TP = 8  # GPUs of an engine; tensor ranks of the trainer
GROUP = 16  # responses of a prompt
PROMPT_TOKENS = 256
BUCKET = 256 << 20  # bytes
SHARE = 0.05  # of a step that the leading rank may take
ANSWERS = ("packed", "JSON")  # of our SGLang server, and of SGLang's own
SMALL = 1 << 15  # characters of a message that brings no weights


def parser() -> argparse.ArgumentParser:
    options = parser_of("scale", __doc__, model="Qwen2.5-32B")
    add = options.add_argument
    add(
        "--engines", type=count, nargs="+", default=[4, 16, 64], metavar="N", help="default 4 16 64"
    )
    add("--responses", type=count, default=256, metavar="N", help="of an engine; default 256")
    add("--tokens", type=count, default=4096, metavar="N", help="of a response; default 4096")
    add("--answers", nargs="+", choices=ANSWERS, default=list(ANSWERS), help="of ours, SGLang's")
    add("--serve", type=Path, help=argparse.SUPPRESS)
    return options


def run(options: argparse.Namespace) -> list[Case]:
    """Return a case per number of engines."""
    arch = read_arch(config_of(options.model))
    version = version_of(arch)
    cases = []
    for engines, answers in product(options.engines, options.answers):
        work = Workload(
            prompts=engines * options.responses // GROUP,
            samples=GROUP,
            prompt=PROMPT_TOKENS,
            mean=options.tokens,
            longest=2 * options.tokens,
            minibatches=1,
            epochs=1,
        )
        roof = Roofline(gpu=gpu_of("h100", "int8"), constants=Constants(), node=TP)
        room = work.responses * (PROMPT_TOKENS + work.longest)  # enough for all
        engine = Engine(arch, "int8", TP)
        rollout = rollout_time(
            roof, engine, work, engines=engines, room=room, requests=options.responses
        )
        steps = []
        for _ in range(options.repeats):
            with answering(options, engines, answers) as urls:
                steps.append(measured(options, urls, answers, rollout.seconds, work, arch, version))
        figures = []
        for name in steps[0]:
            figures.append(
                Figure(
                    name=name,
                    unit="CPU s",
                    better="lower",
                    repeats=[step[name] for step in steps],
                    limit=SHARE * rollout.seconds if name == "step" else None,
                    limit_of=f"{SHARE:.0%} of a step" if name == "step" else "",
                )
            )
        keys = {"engines": engines, "answers": answers, "tokens": options.tokens}
        case = Case(
            name=f"{engines} engines, {answers} answers",
            keys={"model": options.model, **keys},
            figures=figures,
            notes={"responses": work.responses, "step_s": rollout.seconds},
        )
        cases.append(case)
        progress("\n".join(f"{case.name}: {f.name} {f.median:.3f} {f.unit}" for f in figures))
    return cases


@contextmanager
def answering(options: argparse.Namespace, engines: int, answers: str) -> Iterator[list[str]]:
    """Yield the URLs of engines, for which a process answers inside the block."""
    with tempfile.TemporaryDirectory(prefix="qurl-scale-") as folder:
        ports = Path(folder) / "ports.json"
        words = ["--serve", str(ports), "--engines", str(engines), "--tokens", str(options.tokens)]
        words += ["--responses", str(options.responses), "--answers", answers]
        server = subprocess.Popen([sys.executable, "-m", "benchmarks.scale", *words])
        try:
            while not ports.exists():
                if server.poll() is not None:
                    raise RuntimeError(f"the engines' process ended: {server.returncode}")
                time.sleep(0.05)
            yield [f"http://127.0.0.1:{port}" for port in orjson.loads(ports.read_bytes())]
        finally:
            server.kill()  # it may hold requests that never became as many as it waits for
            server.wait()


def measured(
    options: argparse.Namespace,
    urls: list[str],
    answers: str,
    step_s: float,
    work: Workload,
    arch: Arch,
    version: list[list[Blob]],
) -> dict[str, float]:
    """Return the CPU seconds of this process for one step, by their purpose.

    Args:
        step_s: seconds that a step takes.
    """
    with tempfile.TemporaryDirectory(prefix="qurl-scale-") as folder:
        config = RolloutConfig(
            backend="sglang",
            urls=tuple(urls),
            samples_per_prompt=GROUP,
            max_new_tokens=options.tokens,
            requests_per_engine=options.responses,
            health_every_s=1e6,  # they are checked below
        )
        owner = Owner.nobody_else()
        fleet = Fleet(
            config, folder, scheme="int8", log_dir=folder, vocabulary=arch.vocab, owner=owner
        )
        sender = FilesSender(Path(folder) / "versions", "rank0", leads=True)
        prompts = [
            Prompt(index, tuple(range(PROMPT_TOKENS)), "", "") for index in range(work.prompts)
        ]
        with fleet:
            for engine in fleet.engines():  # each client learns it once in a run
                engine.api.packs = answers == "packed"
            parts = {
                "health": lambda: [engine.api.info() for engine in fleet.engines()],
                "leases": lambda: [
                    engine.api.lease(owner, LEASE_S, timeout_s=ANSWER_S)
                    for engine in fleet.engines()
                ],
                "publish": lambda: publish(fleet, version, sender),
                "collect": lambda: collect(fleet, prompts, config, seed=0, step=1),
            }
            seconds = {name: cpu(act) for name, act in parts.items()}
            seconds["health"] *= step_s / RolloutConfig.health_every_s
            seconds["leases"] *= step_s / RENEW_S
        sender.close()
    return {**seconds, "step": sum(seconds.values())}


def cpu(act: Callable[[], object]) -> float:
    """Return the CPU seconds that ``act`` takes in this process."""
    start = time.process_time()
    act()
    return time.process_time() - start


def publish(fleet: Fleet, version: list[list[Blob]], sender: FilesSender) -> None:
    """Bring version 1 to all engines."""
    with fleet.publication() as engines:
        update = Update(fleet, engines, 1, SyncConfig(), sender.describe)
        with update:
            for blobs in version:
                once = encoded(blobs)
                update.bucket(partial(_blobs_of, once))
            update.commit(sender.receipts)


def _blobs_of(blobs: bytes, _engine: EngineRecord, _rank: int) -> bytes:
    return blobs


def version_of(arch: Arch) -> list[list[Blob]]:
    """Return what ``TP`` training ranks say of each bucket of an INT8 version."""
    ranks: list[list[Blob]] = []
    for rank in range(TP):
        pieces: list[Piece] = []
        for name, shape in hf_shapes(arch).items():
            if is_quantized(name):
                pieces += piece_of(arch, name, shape, "int8", rank)
                pieces += piece_of(arch, f"{name}_scale", (shape[0], 1), "float32", rank)
            else:
                pieces += piece_of(arch, name, shape, "bfloat16", rank)
        blobs = []
        for index, some in enumerate(buckets(pieces, [piece.bytes for piece in pieces], BUCKET)):
            offset, placed = 0, []
            for piece in some:
                placed.append(msgspec.structs.replace(piece, offset=offset))
                offset = aligned(offset + piece.bytes)
            slot = {"slot": f"/dev/shm/qurl-0123456789ab/rank{rank}-{index % 2}", "inode": 1234567}
            blobs.append(Blob({**slot, "size": BUCKET}, offset, tuple(placed)))
        ranks.append(blobs)
    rounds = max(map(len, ranks))
    return [[blobs[index] for blobs in ranks if index < len(blobs)] for index in range(rounds)]


def piece_of(
    arch: Arch, name: str, shape: tuple[int, ...], dtype: str, rank: int
) -> Iterator[Piece]:
    """Yield a tensor's part on one training rank, if the rank sends one."""
    dim, start, part = hf_tensor(arch, name).split_dim, 0, list(shape)
    if dim is not None:
        part[dim] = shape[dim] // TP
        start = rank * part[dim]
    elif rank:
        return
    digest = xxhash.xxh3_128_hexdigest(f"{rank}/{name}".encode())
    yield Piece(name, dtype, tuple(part), dim, start, 0, digest)


# The engines.


def serve(options: argparse.Namespace) -> int:
    """Answer for all engines until this process is ended."""
    engines, sockets = {}, []
    everything = Arrivals(options.engines[0] * options.responses)
    for _ in range(options.engines[0]):
        sockets.append(socket.create_server(("127.0.0.1", 0), backlog=4096))
        engine = ScaleEngine(everything, options.tokens, packs=options.answers == ["packed"])
        engines[sockets[-1].getsockname()[1]] = engine
    aside = options.serve.with_suffix(".tmp")
    aside.write_bytes(orjson.dumps(list(engines)))

    async def answer(request: Request) -> Response:
        engine = engines[request.scope["server"][1]]
        content = await engine.answer(request.url.path, await request.body())
        return Response(content, media_type="application/json")

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=3600)
    aside.rename(options.serve)
    asyncio.run(uvicorn.Server(config).serve(sockets))
    return 0


class Arrivals:
    """Requests wait until so many responses are asked for."""

    def __init__(self, responses: int) -> None:
        self._missing, self._all = responses, asyncio.Event()

    async def come(self, responses: int) -> None:
        self._missing -= responses
        if self._missing <= 0:
            self._all.set()
        await self._all.wait()


class ScaleEngine:
    """SGLang's protocol without a model."""

    def __init__(self, everything: Arrivals, tokens: int, *, packs: bool) -> None:
        self._everything, self._tokens = everything, tokens
        self._lease, self._version = Lease(), "default"
        draw = np.random.default_rng(0)
        ids = draw.integers(10_000, 150_000, tokens).tolist()
        log_probs = (-draw.exponential(1, tokens)).astype(np.float32).tolist()
        triples = [[p, i, None] for p, i in zip(log_probs, ids, strict=True)]
        self._meta: dict = {"finish_reason": {"type": "length", "length": tokens}}
        self._answer: dict = {"text": ""}
        self._encode: Callable[[list], bytes] = orjson.dumps
        if packs:
            meta = {**self._meta, "output_token_logprobs": triples}
            whole = {**self._answer, "output_ids": ids, "meta_info": meta}
            (self._answer,) = msgspec.msgpack.decode(packed.pack([whole]))
            self._encode, self._meta = msgspec.msgpack.encode, self._answer["meta_info"]
        else:
            self._answer["output_ids"] = orjson.Fragment(orjson.dumps(ids))
            self._meta["output_token_logprobs"] = orjson.Fragment(orjson.dumps(triples))

    async def answer(self, endpoint: str, content: bytes) -> bytes:
        match endpoint:
            case "/server_info":
                return orjson.dumps({"tp_size": TP, "custom_weight_loader": [LOADER]})
            case "/model_info":
                return orjson.dumps({"weight_version": self._version})
            case "/generate" | packed.ENDPOINT:
                return await self._generate(orjson.loads(content))
            case "/update_weight_version":
                self._version = orjson.loads(content)["new_version"]
            case "/update_weights_from_tensor":
                if len(content) < SMALL:
                    for rank, text in enumerate(orjson.loads(content)["serialized_named_tensors"]):
                        leave_receipt(text, rank)
            case _ if endpoint == ENDPOINT:
                return orjson.dumps(self._lease.ask(orjson.loads(content)))
        return b'{"success":true}'

    async def _generate(self, body: dict) -> bytes:
        await self._everything.come(len(body["rid"]))
        span = {"version": self._version, "start": 0, "end": self._tokens}
        meta, answers = {**self._meta, "weight_versions": [span]}, []
        for rid in body["rid"]:
            answers.append({**self._answer, "meta_info": {**meta, "id": rid}})
        return self._encode(answers)


def leave_receipt(text: str, rank: int) -> None:
    """Report that everything has come, if the message asks for a receipt."""
    message = message_in(text)
    if message.action in ("check", "finish"):
        FilesReceiver(message.transport, rank).report(Receipt(message.session, rank, None, 0, 0.0))


def main() -> int:
    options = parser().parse_args()
    return serve(options) if options.serve else measure("scale", options, run)


if __name__ == "__main__":
    sys.exit(main())
