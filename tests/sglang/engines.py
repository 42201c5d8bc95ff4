"""Real SGLang servers on tiny checkpoints, and updates of them driven call by call."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qurl_megatron.config import RolloutConfig
from qurl_megatron.engines.sglang import starting_sglang
from qurl_megatron.engines.sglang.starting_sglang import engine_launch
from qurl_megatron.engines.starting import Start
from qurl_megatron.fleet.client import EngineClient
from qurl_megatron.quant import quantize
from qurl_megatron.quant.export import quantization_config, stored
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire.files import FilesSender
from qurl_megatron.wire.message import Blob, Message, Receipt, payload
from qurl_megatron.wire.packed import unpack
from tests.support.generating import generate
from tests.support.models import tiny_checkpoint
from tests.support.waiting import PATIENCE_S

PYTHON = Path(__file__).parents[2] / ".venv-sglang/bin/python"
START_S = 300.0
PROMPTS = [list(range(5, 37)), [3, 1, 4, 1, 5, 9, 2, 6], [77]]

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One kind of model, and how engines hold it."""

    family: str
    scheme: str
    fmt: str = "sglang"
    dtype: str = "float32"
    tensor: int = 1
    expert: int = 1  # of how many ranks each holds a part of the experts, whole
    changes: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A version: its folder, and the tensors an update to it brings."""

    folder: Path
    tensors: Tensors


def checkpoints(case: Case, folder: Path, names: Sequence[str]) -> list[Checkpoint]:
    """Versions of one model that differ in every weight, as a quantizing trainer writes them."""
    base = tiny_checkpoint(folder / "base", case.family, **case.changes)
    return [_version(case, base, folder / name, seed) for seed, name in enumerate(names)]


def _version(case: Case, base: Path, folder: Path, seed: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, value in sorted(load_file(base / "model.safetensors").items()):
        value = value + 0.05 * torch.randn(value.shape, generator=generator)
        if case.scheme != "none" and name.endswith("_proj.weight"):
            tensors |= stored(name, quantize(value, case.scheme), case.scheme)
        else:
            tensors[name] = value.to(getattr(torch, case.dtype))
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if case.scheme != "none":
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = starting_sglang.quantization_config(case.scheme)
        if case.fmt == "compressed-tensors":
            config["quantization_config"] = quantization_config(case.scheme, ["lm_head"])
        (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint(folder, tensors)


def start_of(model: Path, case: Case, api_key: str, empty: bool) -> Start:
    return Start(
        config=RolloutConfig(backend="sglang", engine_tensor=case.tensor, engine_threads=1),
        model_dir=model,
        folder=model,
        scheme=case.scheme,
        dtype=case.dtype,
        api_key=api_key,
        empty=empty,
        routed=case.family.endswith("_moe"),
    )


class Server:
    """One SGLang server of the test's own, with an API key."""

    def __init__(
        self,
        model: Path,
        case: Case,
        folder: Path,
        *,
        empty: bool = False,
        extra: Sequence[str] = (),
    ) -> None:
        self.case = case
        self.key = secrets.token_hex(16)
        self.log = folder / "engine.log"
        self._port = folder / "engine.port"
        extra = [*extra, "--ep-size", str(case.expert)] if case.expert > 1 else extra
        launch = engine_launch(start_of(model, case, self.key, empty), PYTHON, self._port, extra)
        folder.mkdir()
        with self.log.open("wb") as out:
            self.popen = subprocess.Popen(
                launch.command,
                env={**os.environ, **launch.env},
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_port(self) -> "Server":
        deadline = time.monotonic() + START_S
        while not self._port.exists():
            assert self.popen.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.1)
        url = f"http://127.0.0.1:{self._port.read_text()}"
        self.client = EngineClient(url, api_key=self.key, timeout_s=120)
        return self

    def processes(self) -> list[psutil.Process]:
        process = psutil.Process(self.popen.pid)
        return [process, *process.children(recursive=True)]

    def answers(self) -> list[tuple[list, Tensor]]:
        return answers(self.client)

    def close(self) -> None:
        """What a trainer's death does."""
        self.popen.stdin.close()
        try:
            self.popen.wait(PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, 9)


@contextlib.contextmanager
def servers(*starts: Callable[[], Server]) -> Iterator[list[Server]]:
    """Start several at once, and end them whatever happens."""
    running: list[Server] = []
    try:
        for start in starts:
            running.append(start())
        yield [server.await_port() for server in running]
    finally:
        for server in running:
            server.close()


def answers(client: EngineClient) -> list[tuple[list, Tensor]]:
    """Greedy token ids, and their log-probs, of each prompt alone."""
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    found = []
    for prompt in PROMPTS:
        (answer,) = generate(client, [prompt], params, packs=True)
        numbers = answer["output_ids"], answer["meta_info"]["output_token_logprobs"]
        ids, log_probs = unpack(*numbers)
        found.append((ids.tolist(), torch.tensor(log_probs)))
    return found


def running(client: EngineClient) -> int:
    """Requests that the engine computes."""
    return sum(rank["num_running_reqs"] for rank in client._object("/v1/loads")["loads"])


def difference(one: list[tuple[list, Tensor]], other: list[tuple[list, Tensor]]) -> float:
    """Largest difference of the log-probs; infinite where the tokens differ."""
    if [ids for ids, _ in one] != [ids for ids, _ in other]:
        return float("inf")
    return max((a - b).abs().max().item() for (_, a), (_, b) in zip(one, other, strict=True))


def shards(tensors: Tensors, ranks: int) -> list[list[Shard]]:
    """The parts that tensor-parallel training ranks would send."""
    parts: list[list] = [[] for _ in range(ranks)]
    for name, value in tensors.items():
        dim = _split_dim(name)
        if dim is None:
            parts[0].append(Shard.whole(name, value))
            continue
        start = 0
        for rank, part in enumerate(value.chunk(ranks, dim)):
            parts[rank].append(Shard(name, part.contiguous(), value.shape, dim, start))
            start += part.shape[dim]
    return parts


def _split_dim(name: str) -> int | None:
    if any(part in name for part in ("o_proj", "down_proj")):
        return 1 if name.endswith("weight") else None
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
    return 0 if any(part in name for part in columns) else None


class Publication:
    """One update of one server; every step of the protocol can be left out or spoilt."""

    def __init__(self, server: Server, version: int, folder: Path, *, ranks: int = 2) -> None:
        self.server, self.version = server, version
        self.session = f"v{version}-{secrets.token_hex(4)}"
        self.senders = [FilesSender(folder, f"tp{rank}", leads=rank == 0) for rank in range(ranks)]
        self.buckets = 0

    def begin(self) -> None:
        for sender in self.senders:
            sender.begin(self.version)
        self.server.client.pause("retract")
        self.server.client.set_weight_version(f"updating-{self.version}")
        self.server.client.begin_weight_update()

    def put(self, tensors: Tensors) -> list[Blob]:
        parts = shards(tensors, len(self.senders))
        pairs = zip(self.senders, parts, strict=True)
        return [sender.put(self.buckets, part) for sender, part in pairs]

    def bucket(self, blobs: Sequence[Blob]) -> None:
        self.call("bucket", self.buckets, blobs)
        self.buckets += 1

    def call(self, action: str, index: int = 0, blobs: Sequence[Blob] = ()) -> None:
        transport = self.senders[0].describe("engine", self.server.case.tensor)
        message = Message(action, self.session, index, transport, tuple(blobs))
        ranks = self.server.case.tensor
        self.server.client.update_weights_from_tensor([payload(message)] * ranks)

    def check(self) -> list[Receipt]:
        self.call("check", self.buckets)
        return self.senders[0].receipts(self.session, self.server.case.tensor)

    def commit(self) -> None:
        self.call("finish")
        self.server.client.end_weight_update()
        self.server.client.flush()
        self.server.client.set_weight_version(str(self.version))
        self.server.client.resume()


def publish(server: Server, tensors: Tensors, version: int, folder: Path) -> list[Receipt]:
    """A whole update in three buckets; it is committed whatever the receipts say."""
    update = Publication(server, version, folder)
    update.begin()
    names = sorted(tensors)
    for part in range(3):
        update.bucket(update.put({name: tensors[name] for name in names[part::3]}))
    receipts = update.check()
    update.commit()
    return receipts


def score(server: Server, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Log-probs of a given response under what the server holds now."""
    body = {
        "input_ids": [[*prompt, *response]],
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    (answer,) = orjson.loads(server.client._request("/generate", body))
    pairs = answer["meta_info"]["input_token_logprobs"]
    return torch.tensor([pair[0] for pair in pairs[len(prompt) :]])
