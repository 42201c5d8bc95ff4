"""Updates of real SGLang servers: what they hold afterwards is what a fresh start would hold."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from qurl_megatron.quant import quantize_tokens
from qurl_megatron.wire.packed import unpack_experts
from tests.sglang.engines import (
    PROMPTS,
    Case,
    Checkpoint,
    Server,
    checkpoints,
    difference,
    publish,
    servers,
)
from tests.support.generating import generate

IN_SLICE = ("int8", "fp8-tp2")
CASES = {
    "int8": Case("qwen2", "int8"),
    "fp8": Case("qwen2", "fp8", changes={"tie_word_embeddings": True}),
    "bf16": Case("llama", "none", dtype="bfloat16"),
    # One KV head for two ranks: each holds a copy.
    "fp8-tp2": Case(
        "qwen3",
        "fp8",
        "compressed-tensors",
        tensor=2,
        changes={"num_key_value_heads": 1, "num_attention_heads": 2},
    ),
    # A vocabulary that is padded before it is split.
    "int8-tp2": Case("llama", "int8", "compressed-tensors", tensor=2, changes={"vocab_size": 100}),
    "experts-int8": Case("qwen3_moe", "int8"),
    "shared-expert-int8": Case("qwen2_moe", "int8"),
    "shared-expert-none-tp2": Case("qwen2_moe", "none", tensor=2),
    "experts-none-ep2": Case("qwen3_moe", "none", tensor=2, expert=2),
    "experts-fp8-tp2": Case("qwen3_moe", "fp8", tensor=2),
    "experts-int8-ep2": Case("qwen3_moe", "int8", tensor=2, expert=2),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slice] if name in IN_SLICE else [])
        for name, case in CASES.items()
    ],
)
def test_an_updated_server_answers_as_one_started_from_that_checkpoint(case, tmp_path):
    first, second = checkpoints(case, tmp_path, ["first", "second"])
    with servers(
        lambda: Server(first.folder, case, tmp_path / "one"),
        lambda: Server(second.folder, case, tmp_path / "two"),
    ) as (one, two):
        from_first, from_second = one.answers(), two.answers()
        assert difference(from_first, from_second) > 0.01

        pointers = set()
        for version, (checkpoint, expected) in enumerate(
            [(second, from_second), (first, from_first), (second, from_second)]
        ):
            receipts = publish(one, checkpoint.tensors, version, tmp_path / "sync")
            assert [receipt.error for receipt in receipts] == [None] * case.tensor
            assert difference(one.answers(), expected) <= 1e-6
            assert one.client.weight_version() == str(version)
            pointers.add(tuple(receipt.pointers for receipt in receipts))
        assert len(pointers) == 1


@pytest.mark.parametrize(
    "family, scheme",
    [
        ("qwen3_moe", "none"),
        pytest.param("qwen3_moe", "int8", marks=pytest.mark.slice),
        ("qwen3_moe", "fp8"),
        ("qwen2_moe", "none"),
    ],
)
def test_experts_compute_as_transformers_on_the_published_grid(family, scheme, tmp_path):
    case = Case(family, scheme)
    first, second = checkpoints(case, tmp_path, ["first", "second"])
    with servers(lambda: Server(first.folder, case, tmp_path / "server")) as (server,):
        publish(server, second.tensors, 1, tmp_path / "sync")
        answers = server.answers()
        params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        told = generate(server.client, PROMPTS, params, packs=True, routed=True)
    model = _on_grid(second, tmp_path / "base", tmp_path / "plain")
    chosen, differences, same = [], [], []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, inputs, outputs: chosen.append(outputs[2]))
    for prompt, (ids, log_probs), answer in zip(PROMPTS, answers, told, strict=True):
        chosen.clear()
        with torch.no_grad(), _Tokens(scheme, model):
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        expected = torch.stack(chosen, dim=1)[:-1].sort(-1).values
        packed = answer["meta_info"]["routed_experts"]
        experts = unpack_experts(packed, expected.numel()).reshape(expected.shape)
        assert len(packed) == expected.numel()  # a byte each
        same.append((torch.from_numpy(experts.astype(int)).sort(-1).values == expected).all(-1))
        differences.append((log_probs - logits.log_softmax(-1)[range(len(ids)), ids]).abs())
    apart = torch.cat(differences)
    # The last bit of a sum may move a code to its neighbour, here and there.
    assert apart.median() < 1e-5
    assert apart.max() < (1e-4 if scheme == "none" else 0.02)
    assert torch.cat(same).float().mean() > (0.9999 if scheme == "none" else 0.97)


def _on_grid(version: Checkpoint, base: Path, folder: Path) -> Any:
    """The version's model in transformers, its weights dequantized."""
    plain = {
        name: value.float() * version.tensors.get(f"{name}_scale", 1.0)
        for name, value in version.tensors.items()
        if not name.endswith("_scale")
    }
    shutil.copytree(base, folder)
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )


class _Tokens(TorchFunctionMode):
    """Quantizes what every linear layer reads, but for the routers and the output layer."""

    def __init__(self, scheme: str, model: Any) -> None:
        super().__init__()
        self.scheme = scheme
        routers = [layer.mlp.gate.weight for layer in model.model.layers]
        self.plain = {id(weight) for weight in (model.lm_head.weight, *routers)}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is linear and self.scheme != "none" and id(args[1]) not in self.plain:
            codes, scale = quantize_tokens(args[0], self.scheme)
            args = (codes.float() * scale, *args[1:])
        return function(*args, **(kwargs or {}))
