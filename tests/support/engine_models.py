"""Random models for engine tests, written as Hugging Face folders and as published versions."""

import contextlib
import json
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
import uvicorn
from safetensors.torch import save_file

from qurl_megatron.engines.embedded import native
from qurl_megatron.engines.embedded.decoder import Decoder
from qurl_megatron.engines.embedded.endpoints import EngineThread, build_app
from qurl_megatron.engines.embedded.engine import Engine, Sequence
from qurl_megatron.engines.embedded.read_weights import read_weights
from qurl_megatron.fleet.client import EngineClient
from qurl_megatron.quant import quantize
from qurl_megatron.quant.export import stored
from qurl_megatron.tensors.arch import read_arch, read_config
from qurl_megatron.tensors.table import is_quantized
from tests.support.waiting import wait_until

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
EXPERTS = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
SHARED = {  # and one that every token meets; probabilities as they are
    **EXPERTS,
    "model_type": "qwen2_moe",
    "head_dim": 8,
    "norm_topk_prob": False,
    "shared_expert_intermediate_size": 40,
}
CPU = torch.device("cpu")


def write_model(folder: Path, *, seed: int = 0, **changes) -> Path:
    """A Hugging Face folder with random weights, large enough for a peaked distribution."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}), encoding="utf-8")
    save_file(random_tensors(folder, seed), folder / "model.safetensors")
    return folder


def random_tensors(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    slots = Decoder(read_arch(read_config(folder)), "none", torch.float32, CPU).slots
    return {
        name: torch.randn(slot.target.shape, generator=generator) * 0.3
        + name.endswith("norm.weight")
        for name, slot in slots.items()
    }


def published_tensors(tensors: dict[str, torch.Tensor], scheme: str) -> dict[str, torch.Tensor]:
    published = {}
    for name, tensor in tensors.items():
        if scheme != "none" and is_quantized(name):
            quantized = quantize(tensor, scheme)
            published |= stored(name, quantized, scheme)
        else:
            published[name] = tensor
    return published


def engine_for(
    folder: Path,
    *,
    scheme: str = "none",
    dtype: torch.dtype = torch.float32,
    cache_gb: float = 0.01,
    **options,
) -> Engine:
    decoder = Decoder(read_arch(read_config(folder)), scheme, dtype, CPU)
    decoder.load(read_weights(folder, decoder))
    return Engine(decoder, cache_gb, **options)


@contextlib.contextmanager
def decoding_by(path: str):
    """ "torch", or "native", which skips the test where there is none."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            if path == "torch":
                patch.setenv("QURL_NATIVE", "0")
            native.library.cache_clear()
            if path == "native" and not native.available():
                pytest.skip(f"no native step: {native.library()}")
            yield
    finally:
        native.library.cache_clear()


def sequence(prompt: list[int], new: int = 12, *, seed: int = 0, **options) -> Sequence:
    return Sequence(f"s{seed}", list(prompt), new, seed, **options)


def copies(sequences: list[Sequence]) -> list[Sequence]:
    """The same requests, not begun."""
    fresh = {"output_ids": list, "log_probs": list, "versions": list, "ended": Future}
    return [
        replace(sequence, **{name: make() for name, make in fresh.items()})
        for sequence in sequences
    ]


def switch(engine: Engine, tensors: dict[str, torch.Tensor], version: str) -> None:
    """Other weights between two steps; running sequences continue with them."""
    engine.decoder.load(tensors)
    engine.rename(version)


def advance(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        engine.step()


def drain(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def finish(engine: Engine, *sequences: Sequence) -> None:
    engine.add(list(sequences))
    drain(engine)


class LiveServer:
    """The real app behind a real socket, in a thread.

    ``token_s`` is what a decode step takes at least: set it where something has to happen while a
    request is under way.
    """

    def __init__(self, folder, *, api_key=None) -> None:
        self.folder = folder
        engine, self.token_s = engine_for(folder, scheme="int8"), 0.0
        step = engine.step

        def slowed() -> None:
            time.sleep(self.token_s)
            step()

        engine.step = slowed
        self.worker = EngineThread(engine)
        config = uvicorn.Config(
            build_app(self.worker, str(folder), api_key=api_key),
            port=0,
            log_level="warning",
            lifespan="off",
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.client = EngineClient(self.url, timeout_s=60, api_key=api_key)

    def post(self, endpoint: str, body: dict | None = None) -> httpx.Response:
        return httpx.post(self.url + endpoint, json=body, timeout=60, trust_env=False)

    def wait_for(self, key: str, value: int) -> None:
        wait_until(lambda: self.client.server_info()[key] == value)

    def __enter__(self) -> "LiveServer":
        return self

    def __exit__(self, *_) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join()
        self.worker.close()
