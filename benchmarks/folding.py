"""UAQ is a layer-wise learning rate: where the two are one, and how far they part elsewhere.

Adam's step does not grow with the gradient. Fold s into a norm and the linear layers that read it
(``checkpoints.uaq``), and the same step is s times as far in W, of which W / s is trained, and
1 / s times as far in the norm's gain. So training the folded model is training the unfolded one
with the learning rates that ``layerwise`` gives, as long as nothing looks at the size of a weight
or of a gradient: with ``eps``, weight decay, a clipped gradient norm or weights rounded to BF16
they part. Without Adam, a step along the gradient, which folding makes s times as large, the rates
are the squares of these: the s² of the paper's Eq. 12.

``python -m benchmarks.folding`` trains a small model both ways, under each of these, and
records how far they part in docs/results/folding.json; docs/algorithms.md has the table.

Shapes: B = sequences, T = tokens of each, V = vocabulary.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qurl_megatron.checkpoints.uaq import fold_uaq, folded, unfold_uaq
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.quant import quantize
from qurl_megatron.tensors.table import is_quantized, uaq_role

RECORD = Path(__file__).parents[1] / "docs/results/folding.json"

VOCABULARY, HIDDEN, INTERMEDIATE, HEADS, LAYERS = 64, 32, 64, 4, 2
SEQUENCES, LENGTH = 8, 16
LR = 2e-5
Weights = dict[str, Tensor]


def initial_weights() -> Weights:
    """Return a Qwen2-shaped model of ``LAYERS`` layers, float64, named as Hugging Face names it."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return 0.05 * torch.randn(*shape, generator=draw, dtype=torch.float64)

    def gain() -> Tensor:
        return 1.0 + random(HIDDEN)

    weights = {"model.embed_tokens.weight": 20 * random(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights[f"{name}input_layernorm.weight"] = gain()
        for part in "qkv":
            weights[f"{name}self_attn.{part}_proj.weight"] = random(HIDDEN, HIDDEN)
            weights[f"{name}self_attn.{part}_proj.bias"] = random(HIDDEN)
        weights[f"{name}self_attn.o_proj.weight"] = random(HIDDEN, HIDDEN)
        weights[f"{name}post_attention_layernorm.weight"] = gain()
        for part in ("gate", "up"):
            weights[f"{name}mlp.{part}_proj.weight"] = random(INTERMEDIATE, HIDDEN)
        weights[f"{name}mlp.down_proj.weight"] = random(HIDDEN, INTERMEDIATE)
    return weights | {"model.norm.weight": gain(), "lm_head.weight": random(VOCABULARY, HIDDEN)}


def log_probs(weights: Mapping[str, Tensor], tokens_BT: Tensor) -> Tensor:
    """Return the log-probs of every next token, computed in float64, [B, T, V]."""
    weights = {name: weight.double() for name, weight in weights.items()}
    x = weights["model.embed_tokens.weight"][tokens_BT]
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        x = x + _attention(weights, f"{name}self_attn.", _norm(weights, f"{name}input", x))
        h = _norm(weights, f"{name}post_attention", x)
        gate, up = (h @ weights[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ weights[f"{name}mlp.down_proj.weight"].T
    x = _rms(x) * weights["model.norm.weight"]
    return torch.log_softmax(x @ weights["lm_head.weight"].T, dim=-1)


def _rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _norm(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return _rms(x) * weights[f"{name}_layernorm.weight"]


def _attention(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    q, k, v = (
        (x @ weights[f"{name}{part}_proj.weight"].T + weights[f"{name}{part}_proj.bias"])
        .unflatten(-1, (HEADS, -1))
        .transpose(1, 2)
        for part in "qkv"
    )
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2) @ weights[f"{name}o_proj.weight"].T


def layerwise(name: str, s: float) -> float:
    """Return the factor on a tensor's learning rate that takes the place of folding ``s``.

    It is the reverse of folding's factor on the tensor: s for q, k, v, gate and up, 1 / s for their
    norms, 1 for all others.
    """
    return 1.0 / folded(name, torch.ones((), dtype=torch.float64), s).item()


@dataclass(frozen=True)
class Setting:
    """What Adam and its surroundings do beside a step of the learning rate's size."""

    label: str
    sgd: bool = False
    """Plain gradient steps in Adam's place, the first as large as Adam's; for no other setting."""

    eps: float = 0.0
    gradient: float = 0.0
    """Root mean square of the first gradient's elements; 0: as it comes."""

    decay: float = 0.0
    """Decoupled weight decay of matrices; norms and biases are exempt, as in a run."""

    clip: float = 0.0
    """Largest gradient norm, in norms of the unfolded model's first gradient; 0 is off."""

    bf16: bool = False
    """FP32 masters whose BF16 roundings compute."""


def train(
    weights: Weights, setting: Setting, rates: Mapping[str, float], steps: int, *, unit: float
) -> Weights:
    """Train on the next token of random sequences, the same ones in every call.

    Args:
        rates: learning rate of each tensor.
        unit: norm of the first gradient of the unfolded model.
    """
    dtype = torch.float32 if setting.bf16 else torch.float64
    leaves = {n: w.to(dtype, copy=True).requires_grad_() for n, w in weights.items()}
    groups = [
        {"params": [leaf], "lr": rates[name], "weight_decay": setting.decay * (leaf.ndim > 1)}
        for name, leaf in leaves.items()
    ]
    count = sum(w.numel() for w in weights.values())
    scale = setting.gradient * count**0.5 / unit if setting.gradient else 1.0
    # eps -> 0, but a gradient of exactly 0 must not become 0 / 0.
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=setting.eps or 1e-30, foreach=False)
    optimizer: torch.optim.Optimizer = adam
    if setting.sgd:
        scale = count**0.5 / unit
        optimizer = torch.optim.SGD(groups, foreach=False)
    for step in range(steps):
        tokens = _batch(step)
        used = {n: _rounded(leaf) if setting.bf16 else leaf for n, leaf in leaves.items()}
        optimizer.zero_grad()
        (_loss(used, tokens) * scale).backward()
        if setting.clip:
            torch.nn.utils.clip_grad_norm_(leaves.values(), setting.clip * unit * scale)
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def _loss(weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the mean negative log-prob of all tokens but each sequence's first."""
    predicted = log_probs(weights, tokens[:, :-1])
    return F.nll_loss(predicted.flatten(0, 1), tokens[:, 1:].flatten())


def _batch(step: int) -> Tensor:
    """Return sequences in which a token follows from the one before, but a third is random."""
    draw = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=draw)
    random = torch.rand(SEQUENCES, LENGTH + 1, generator=draw) < 1 / 3
    for t in range(1, LENGTH + 1):
        follows = (5 * tokens[:, t - 1] + 7) % VOCABULARY
        tokens[:, t] = torch.where(random[:, t], tokens[:, t], follows)
    return tokens


def _rounded(leaf: Tensor) -> Tensor:
    """Round a master weight to BF16; its gradient passes unchanged."""
    return leaf + (leaf.detach().bfloat16().to(leaf.dtype) - leaf.detach())


def _first_norm(weights: Weights) -> float:
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    gradients = torch.autograd.grad(_loss(leaves, _batch(0)), list(leaves.values()))
    return torch.stack([gradient.norm() for gradient in gradients]).norm().item()


@dataclass(frozen=True)
class Parted:
    """How far two ways of training end from each other."""

    weights: float
    """Norm of the difference over that of what training changed, in q, k, v, gate, up and norms."""

    function: float
    """Root mean square of the difference of the log-probs over that of what training changed."""

    largest: float
    """Largest difference of a log-prob."""

    codes: float
    """Share of INT8 codes that differ, of all linear layers."""


def compare(setting: Setting, s: float, *, instead: float | None = None, steps: int = 60) -> Parted:
    """Train the model with ``s`` folded in, and unfolded with other learning rates in its place.

    Args:
        instead: one factor of the whole learning rate, in the place of ``layerwise`` (with
            ``sgd``, its square).
    """
    start, config = initial_weights(), {"model_type": "qwen2"}
    unit = _first_norm(start)
    power = 2 if setting.sgd else 1
    rates = {n: LR * (layerwise(n, s) ** power if instead is None else instead) for n in start}
    unfolded = train(start, setting, rates, steps, unit=unit)
    raw = train(fold_uaq(start, config, s), setting, dict.fromkeys(start, LR), steps, unit=unit)
    folded_in = unfold_uaq(raw, config)

    tokens = _batch(steps)  # none of those trained on
    before, by_rates, by_fold = (log_probs(w, tokens) for w in (start, unfolded, folded_in))
    changed = [name for name in start if uaq_role(name)]
    return Parted(
        weights=_distance(folded_in, unfolded, changed) / _distance(unfolded, start, changed),
        function=((by_fold - by_rates).norm() / (by_rates - before).norm()).item(),
        largest=(by_fold - by_rates).abs().max().item(),
        codes=codes_that_differ(raw, unfolded),
    )


def _distance(a: Weights, b: Weights, names: list[str]) -> float:
    squares = sum((a[n].double() - b[n].double()).square().sum().item() for n in names)
    return squares**0.5


def codes_that_differ(a: Weights, b: Weights) -> float:
    """Return the share of the INT8 codes of all linear layers that differ."""
    differ = total = 0
    for name in filter(is_quantized, a):
        codes = [quantize(weights[name], "int8").values for weights in (a, b)]
        differ += int((codes[0] != codes[1]).sum())
        total += codes[0].numel()
    return differ / total


S = 1.5
PLAIN_STEPS = Setting("no Adam, plain gradient steps", sgd=True)
SETTINGS = (
    Setting("Adam, eps near 0"),
    PLAIN_STEPS,
    Setting("eps 1e-8, gradients of 1e-5", eps=1e-8, gradient=1e-5),
    Setting("eps 1e-8, gradients of 1e-6", eps=1e-8, gradient=1e-6),
    Setting("weight decay 0.01", decay=0.01),
    Setting("weight decay 0.1", decay=0.1),
    Setting("gradient norm clipped in some steps", clip=1.0),
    Setting("gradient norm clipped in every step", clip=0.5),
    Setting("BF16 weights, FP32 masters", bf16=True),
    Setting("all of it", eps=1e-8, gradient=1e-5, decay=0.1, clip=1.0, bf16=True),
)
PLAIN = {"1 x": 1.0, "1.33 x": 1.33, "1.5 x": 1.5}
"""Factors on the learning rate of all layers, which a user would try instead, with Adam alone."""


def measured() -> dict[str, Any]:
    """Return the contents of docs/results/folding.json."""
    rows = {setting.label: compare(setting, S) for setting in SETTINGS}
    plain = {label: compare(SETTINGS[0], S, instead=rate) for label, rate in PLAIN.items()}
    return {
        "command": "python -m benchmarks.folding",
        "s": S,
        "layerwise": {label: asdict(parted) for label, parted in rows.items()},
        "plain": {label: asdict(parted) for label, parted in plain.items()},
    }


def table(record: Mapping[str, Any]) -> str:
    """Return the Markdown table of docs/algorithms.md."""
    lines = [
        f"| in place of s = {record['s']:g} | with | weights | log-probs | codes |",
        "|---|---|---:|---:|---:|",
    ]
    for label, row in record["layerwise"].items():
        squared = " squared" if label == PLAIN_STEPS.label else ""
        lines.append(f"| layer-wise learning rates{squared} | {label} | {_cells(row)} |")
    for label, row in record["plain"].items():
        lines.append(f"| {label} the learning rate | {SETTINGS[0].label} | {_cells(row)} |")
    return "\n".join(lines)


def _cells(row: Mapping[str, float]) -> str:
    return " | ".join(_share(row[name]) for name in ("weights", "function", "codes"))


def _share(value: float) -> str:
    if value == 0:
        return "0"
    return f"{100 * value:.2g} %" if value > 1e-6 else f"{value:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RECORD, help="where the record goes")
    out = parser.parse_args().out
    record = measured()
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
