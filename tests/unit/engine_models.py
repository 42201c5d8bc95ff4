"""Random models for engine tests, written as Hugging Face folders and as published versions."""

import contextlib
import json
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
import uvicorn
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from qurl_megatron.engines.embedded import native
from qurl_megatron.engines.embedded.decoder import Decoder
from qurl_megatron.engines.embedded.endpoints import Speech, build_app
from qurl_megatron.engines.embedded.engine import Engine, Sequence
from qurl_megatron.engines.embedded.read_weights import read_weights
from qurl_megatron.engines.embedded.thread import EngineThread
from qurl_megatron.fleet.client import EngineClient
from qurl_megatron.quant import quantize
from qurl_megatron.tensors.arch import read_arch, read_config
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.tensors.table import is_quantized
from qurl_megatron.wire.files import FilesSender
from qurl_megatron.wire.manifest import manifest_of
from tests.waiting import wait_until

TINY = {
    "model_type": "qwen2",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
CPU = torch.device("cpu")


def write_model(folder: Path, *, seed: int = 0, **changes) -> Path:
    """A Hugging Face folder with random weights, large enough for a peaked distribution."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}), encoding="utf-8")
    save_file(random_tensors(folder, seed), folder / "model.safetensors")
    return folder


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer whose first 256 tokens are the bytes of UTF-8, and 8 special ones after them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<eos>", *(f"<s{index}>" for index in range(1, 8))]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def random_tensors(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    slots = Decoder(read_arch(read_config(folder)), "none", torch.float32, CPU).slots
    return {
        name: torch.randn(slot.target.shape, generator=generator) * 0.3
        + name.endswith("norm.weight")
        for name, slot in slots.items()
    }


def write_version(
    folder: Path, tensors: dict[str, torch.Tensor], version: int, scheme: str = "none"
) -> Path:
    """Publish whole tensors as a version with two slices along the first dimension."""
    published = published_tensors(tensors, scheme)
    root = folder.with_name(f"{folder.name}-root")
    senders = [FilesSender(root, name, leads=False) for name in ("a", "b")]
    halves: list[list] = [[], []]
    for name, tensor in published.items():
        half = tensor.shape[0] // 2
        halves[0].append(Shard(name, tensor[:half], tensor.shape, 0, 0))
        halves[1].append(Shard(name, tensor[half:], tensor.shape, 0, half))
    blobs = []
    for sender, parts in zip(senders, halves, strict=True):
        sender.begin(version)
        blobs.append(sender.put(0, parts))
    shapes = {name: tuple(tensor.shape) for name, tensor in published.items()}
    manifest_of(version, scheme, blobs, shapes).write(senders[0].folder)
    return senders[0].folder.rename(folder)


def published_tensors(tensors: dict[str, torch.Tensor], scheme: str) -> dict[str, torch.Tensor]:
    published = {}
    for name, tensor in tensors.items():
        if scheme != "none" and is_quantized(name):
            quantized = quantize(tensor, scheme)
            published[name], published[name + "_scale"] = quantized.values, quantized.scale
        else:
            published[name] = tensor
    return published


def engine_for(
    folder: Path,
    *,
    scheme: str = "none",
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    cache_gb: float = 0.01,
    **options,
) -> Engine:
    decoder = Decoder(read_arch(read_config(folder)), scheme, dtype, device)
    decoder.load(read_weights(folder, decoder)[0])
    return Engine(decoder, cache_gb, **options)


@contextlib.contextmanager
def decoding_by(path: str):
    """ "torch", or "native", which skips the test where there is none."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            if path == "torch":
                patch.setenv("QURL_NATIVE", "0")
            native._found.cache_clear()
            if path == "native" and native.library() is None:
                pytest.skip(f"no native step: {native._found()}")
            yield
    finally:
        native._found.cache_clear()


def sequence(prompt: list[int], new: int = 12, *, seed: int = 0, **options) -> Sequence:
    return Sequence(f"s{seed}", list(prompt), new, seed, **options)


def finish(engine: Engine, *sequences: Sequence) -> None:
    engine.add(list(sequences))
    while engine.busy:
        engine.step()


class LiveServer:
    """The real app behind a real socket, in a thread.

    ``token_s`` is what a decode step takes at least: set it where something has to happen while a
    request is under way.
    """

    def __init__(self, folder, *, scheme="int8", api_key=None, speech=None) -> None:
        self.folder = folder
        engine, self.token_s = engine_for(folder, scheme=scheme), 0.0
        step = engine.step

        def slowed() -> None:
            time.sleep(self.token_s)
            step()

        engine.step = slowed
        self.worker = EngineThread(engine)
        config = uvicorn.Config(
            build_app(self.worker, str(folder), api_key=api_key, speech=speech or Speech()),
            port=0,
            log_level="warning",
            lifespan="off",
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.client = EngineClient(self.url, timeout_s=60, api_key=api_key)

    def post(self, endpoint: str, body: dict | None = None) -> httpx.Response:
        return httpx.post(self.url + endpoint, json=body, timeout=60, trust_env=False)

    def load(self, folder: Path, version: int | str, **options) -> httpx.Response:
        """Weights from a folder, which the trainer itself never asks for."""
        body = {"model_path": str(folder), "weight_version": str(version), **options}
        return self.post("/update_weights_from_disk", body)

    def wait_for(self, key: str, value: int) -> None:
        wait_until(lambda: self.client.server_info()[key] == value)

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join()
        self.worker.close()
