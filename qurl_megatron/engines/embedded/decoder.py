"""One decoder for all families, and the named buffers its weights live in.

q, k and v are one matrix, and so are gate and up: activations are quantized and multiplied once
instead of three times and twice. A layer's experts have their gates and ups in one buffer and their
downs in another; each multiplies by its own rows. ``slots`` maps every Hugging Face name to the
rows of the buffer that it fills, so an update is a series of copies into memory that never moves.

Shapes: T tokens (of all sequences, flattened), H hidden, D head dimension, O and I a matrix's
sides, E experts, k experts that a token meets, P = T * k pairs of a token and one of its experts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from qurl_megatron.engines.embedded import native
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant import quantize_tokens
from qurl_megatron.quant.activations import (
    has_fp8_hardware,
    product_of_groups,
    scaled_product,
)
from qurl_megatron.schemes import INTEGER as CODES
from qurl_megatron.schemes import SCALES, SCHEMES
from qurl_megatron.tensors.arch import Arch, Experts, Llama3Rope
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.tensors.table import hf_tensor

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
FLOATS: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""attend(layer, q [T, heads, D], kv [T, 2 * kv_heads, D]) -> [T, heads * D]; keys before values."""


@dataclass(frozen=True)
class Slot:
    """Where one named tensor goes, and the formats it may have."""

    target: Tensor  # a view
    dtypes: tuple[torch.dtype, ...]


@dataclass
class Matrix:
    """One (possibly fused) weight matrix and the way to multiply by it.

    Products of codes are the trainer's own (``quant.activations``). Where ``decode.cpp`` runs, INT8
    weights are also kept in its layout; the results are the same to the last bit.
    """

    scheme: str
    weight_OI: Tensor  # FP8 values are kept in FP32 where the hardware has no float8
    scale: Any  # a Tensor, [O] or of squares [R, C]; None if the scheme is "none"
    blocks: native.Blocks | None = None
    square_O: Tensor | None = None  # for each row of the weight its row of ``scale``

    def __call__(self, x_TI: Tensor, addend: Tensor | None = None) -> Tensor:
        if self.scheme == "none":
            if addend is None:
                return linear(x_TI, self.weight_OI)
            return torch.addmm(addend, x_TI, self.weight_OI.t())
        if self.blocks is not None:
            return self.blocks.linear(x_TI, addend, CODES[self.scheme]).to(x_TI.dtype)
        codes_TI, scale_TG = quantize_tokens(x_TI, self.scheme)
        weight_OI, scale, dtype = self.weight_OI, self.scale, x_TI.dtype
        if self.square_O is None:
            return scaled_product(codes_TI, scale_TG, weight_OI, scale, addend, dtype)
        scale_OG = scale[self.square_O]
        return product_of_groups(codes_TI, scale_TG, weight_OI, scale_OG, addend, dtype)

    def pack(self) -> None:
        """Take in newly written weights."""
        if self.blocks is not None:
            self.blocks.fill(self.weight_OI)
        elif self.scheme in CODES and self.weight_OI.device.type == "cpu" and native.available():
            self.blocks = native.Blocks(self.weight_OI, self.scale)

    def split(self, count: int) -> list["Matrix"]:
        """Cut the rows into ``count`` equal runs; return views of them."""
        scales = [None] * count if self.scale is None else self.scale.chunk(count)
        weights = self.weight_OI.chunk(count)
        # Counted from the run's own first square, as those of the first run are.
        square_O = None if self.square_O is None else self.square_O[: len(weights[0])]
        return [
            Matrix(self.scheme, *part, square_O=square_O)
            for part in zip(weights, scales, strict=True)
        ]


@dataclass(frozen=True)
class Mlp:
    gate_up: Matrix
    down: Matrix

    def __call__(self, x_TH: Tensor, addend: Tensor | None = None) -> Tensor:
        gate, up = self.gate_up(x_TH).chunk(2, dim=-1)
        return self.down(silu(gate).mul_(up), addend)


@dataclass(frozen=True)
class RoutedMlp:
    """Experts, and the router that chooses some of them for each token."""

    router_EH: Tensor  # never quantized
    mlps: list[Mlp]
    facts: Experts
    shared: Mlp | None = None  # met by every token
    shared_gate_1H: Tensor | None = None  # never quantized

    def route(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts' weights in the model's format and their numbers, [T, k] each.

        The largest weight comes first.
        """
        probability_TE = linear(x_TH, self.router_EH).softmax(dim=-1, dtype=torch.float32)
        weight_Tk, expert_Tk = probability_TE.topk(self.facts.top_k, dim=-1)
        if self.facts.norm_topk_prob:
            weight_Tk /= weight_Tk.sum(dim=-1, keepdim=True)
        return weight_Tk.to(x_TH.dtype), expert_Tk

    def __call__(self, x_TH: Tensor, addend_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over each token's experts plus the addend, and the experts' numbers."""
        weight_Tk, expert_Tk = self.route(x_TH)
        expert_P, top_k = expert_Tk.flatten(), self.facts.top_k
        order_P = expert_P.argsort(stable=True)
        counts = expert_P.bincount(minlength=len(self.mlps)).tolist()
        parts = x_TH[order_P // top_k].split(counts)
        outputs = [mlp(part) for mlp, part in zip(self.mlps, parts, strict=True) if len(part)]
        y_PH = torch.cat(outputs)[order_P.argsort()]
        # In an order that does not depend on which tokens share the experts.
        total_TH = addend_TH.to(torch.float32, copy=True)
        if self.shared is not None and self.shared_gate_1H is not None:
            total_TH.addcmul_(self.shared(x_TH), linear(x_TH, self.shared_gate_1H).sigmoid())
        for rank, y_TH in enumerate(y_PH.unflatten(0, (-1, top_k)).unbind(1)):
            total_TH.addcmul_(y_TH, weight_Tk[:, rank, None])
        return total_TH.to(x_TH.dtype), expert_Tk


@dataclass(frozen=True)
class Layer:
    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [heads + kv_heads, D]
    out: Matrix
    post_norm: Tensor
    mlp: Mlp | RoutedMlp

    @property
    def matrices(self) -> list[Matrix]:
        if isinstance(self.mlp, Mlp):
            mlps = [self.mlp]
        else:
            mlps = [*self.mlp.mlps, *([self.mlp.shared] if self.mlp.shared else [])]
        return [self.qkv, self.out, *(m for mlp in mlps for m in (mlp.gate_up, mlp.down))]


class Decoder:
    """Weights and forward pass; it knows neither requests nor a cache (see ``attend``)."""

    @torch.inference_mode()
    def __init__(self, arch: Arch, scheme: str, dtype: torch.dtype, device: torch.device) -> None:
        self.arch, self.scheme, self.dtype, self.device = arch, scheme, dtype, device
        self.largest_code = CODES.get(scheme)
        self.slots: dict[str, Slot] = {}
        self.embedding = self._float("model.embed_tokens.weight")
        self.layers = [self._layer(f"model.layers.{index}.") for index in range(arch.num_layers)]
        self.norm = self._float("model.norm.weight")
        self.head = self.embedding if arch.tied else self._float("lm_head.weight")
        self.inverse_frequencies = _inverse_frequencies(arch).to(device)

    @torch.inference_mode()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy a whole set of weights in; all are checked before the first copy.

        Raises:
            ConfigError: a tensor is missing, unexpected, of a wrong shape or type, or a scale is
                not positive and finite; nothing has changed.
        """
        self.check(tensors)
        for name, slot in self.slots.items():
            slot.target.copy_(tensors[name])
        self.finish()

    # For updates (``wire.session.LiveWeights``).

    def tensor_rank(self) -> int:
        return 0

    def targets(self) -> Mapping[str, Shard]:
        return {name: Shard.whole(name, slot.target) for name, slot in self.slots.items()}

    def takes(self, target: Shard, dtype: torch.dtype) -> bool:
        """Return True for the target's dtype, other floats, and FP8 codes that are kept as FP32."""
        return dtype in self.slots[target.name].dtypes

    @torch.inference_mode()
    def finish(self) -> None:
        """Take in newly written slots."""
        heads = self.arch.heads
        for layer in self.layers:
            if (norm := layer.qk_norm) is not None:
                norm[1:heads], norm[heads + 1 :] = norm[0], norm[heads]
            for matrix in layer.matrices:
                matrix.pack()

    def check(self, tensors: dict[str, Tensor]) -> None:
        for word, names in (
            ("missing", self.slots.keys() - tensors.keys()),
            ("unexpected", tensors.keys() - self.slots.keys()),
        ):
            if names:
                shown = ", ".join(sorted(names)[:5])
                raise ConfigError(
                    f"{len(names)} tensors are {word} (scheme {self.scheme}): {shown}"
                )
        for name, slot in self.slots.items():
            tensor = tensors[name]
            if tensor.shape != slot.target.shape or tensor.dtype not in slot.dtypes:
                raise ConfigError(
                    f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, the engine's is "
                    f"{' or '.join(map(str, slot.dtypes))} {list(slot.target.shape)}"
                )
            if name.endswith(SCALES) and not bool((tensor.isfinite() & (tensor > 0)).all()):
                raise ConfigError(f"tensor {name} holds scales that are not positive and finite")

    @torch.inference_mode()
    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        experts: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the hidden states [T, H] before the final norm.

        Args:
            experts: receives the numbers of the chosen experts, [T, k] for each layer that routes.
        """
        arch = self.arch
        cos_T1D, sin_T1D = self._rotary(positions_T)
        x_TH = self.embedding[ids_T]
        rotated = arch.heads + arch.kv_heads
        for index, layer in enumerate(self.layers):
            y_TH = rms_norm(x_TH, layer.input_norm, arch.rms_eps)
            qkv = layer.qkv(y_TH, layer.qkv_bias).view(len(ids_T), -1, arch.head_dim)
            qk = qkv[:, :rotated]
            if layer.qk_norm is not None:
                qk = rms_norm(qk, layer.qk_norm, arch.rms_eps)
            # Write into qkv itself: keys and values stay side by side, one copy from the cache.
            qkv[:, :rotated] = (qk * cos_T1D).addcmul_(qk.roll(arch.head_dim // 2, -1), sin_T1D)
            mixed = attend(index, qkv[:, : arch.heads], qkv[:, arch.heads :])
            x_TH = layer.out(mixed, x_TH)
            y_TH = rms_norm(x_TH, layer.post_norm, arch.rms_eps)
            if isinstance(layer.mlp, Mlp):
                x_TH = layer.mlp(y_TH, x_TH)
            else:
                x_TH, expert_Tk = layer.mlp(y_TH, x_TH)
                if experts is not None:
                    experts.append(expert_Tk)
        return x_TH

    @torch.inference_mode()
    def logits(self, x_TH: Tensor) -> Tensor:
        return linear(rms_norm(x_TH, self.norm, self.arch.rms_eps), self.head)

    def _rotary(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos, and sin signed such that ``x * cos + roll(x, D/2) * sin`` is the rotation."""
        angle = positions_T[:, None, None].float() * self.inverse_frequencies
        cos, sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _layer(self, prefix: str) -> Layer:
        attention = prefix + "self_attn."
        qkv = [f"{attention}{x}_proj" for x in "qkv"]
        return Layer(
            input_norm=self._float(prefix + "input_layernorm.weight"),
            qkv=self._matrix(*qkv),
            qkv_bias=self._float(*(f"{x}.bias" for x in qkv)) if self.arch.qkv_bias else None,
            qk_norm=self._qk_norm(attention) if self.arch.qk_norm else None,
            out=self._matrix(attention + "o_proj"),
            post_norm=self._float(prefix + "post_attention_layernorm.weight"),
            mlp=self._mlp(prefix + "mlp."),
        )

    def _mlp(self, prefix: str) -> Mlp | RoutedMlp:
        facts = self.arch.experts
        if facts is None:
            return self._mlps([prefix])[0]
        router = self._float(prefix + "gate.weight")
        mlps = self._mlps([f"{prefix}experts.{index}." for index in range(facts.count)])
        if not facts.shared:
            return RoutedMlp(router, mlps, facts)
        (shared,) = self._mlps([f"{prefix}shared_expert."])
        gate = self._float(prefix + "shared_expert_gate.weight")
        return RoutedMlp(router, mlps, facts, shared, gate)

    def _mlps(self, prefixes: list[str]) -> list[Mlp]:
        """Allocate MLPs of one size: a buffer for all gates and ups, and one for all downs."""
        gate_up = self._matrix(*(f"{p}{x}_proj" for p in prefixes for x in ("gate", "up")))
        down = self._matrix(*(f"{p}down_proj" for p in prefixes))
        parts = (matrix.split(len(prefixes)) for matrix in (gate_up, down))
        return [Mlp(*part) for part in zip(*parts, strict=True)]

    def _matrix(self, *modules: str) -> Matrix:
        """Allocate one matrix for several named ones, stacked along the output."""
        names = [f"{module}.weight" for module in modules]
        if self.scheme == "none":
            return Matrix("none", self._float(*names), None)
        rules = SCHEMES[self.scheme]
        sent = stored = rules.dtype
        if sent.is_floating_point and not has_fp8_hardware(self.device):
            stored = torch.float32  # same values, ready to multiply
        weight = self._stacked(names, stored, (sent,))
        scale_names = [name + rules.scale for name in names]
        scale = self._stacked(scale_names, torch.float32, (torch.float32,))
        if rules.block is None:
            return Matrix(self.scheme, weight, scale[:, 0])
        squares, first = [], 0
        for name, scale_name in zip(names, scale_names, strict=True):
            rows = torch.arange(len(self.slots[name].target), device=self.device)
            squares.append(first + rows // rules.block)
            first += len(self.slots[scale_name].target)
        return Matrix(self.scheme, weight, scale, square_O=torch.cat(squares))

    def _float(self, *names: str) -> Tensor:
        """Allocate one buffer in the model's format for several named tensors."""
        return self._stacked(names, self.dtype, FLOATS)

    def _stacked(
        self, names: Sequence[str], stored: torch.dtype, sent: tuple[torch.dtype, ...]
    ) -> Tensor:
        shapes = [hf_tensor(self.arch, name).shape for name in names]
        rows = [shape[0] for shape in shapes]
        buffer = torch.empty(sum(rows), *shapes[0][1:], dtype=stored, device=self.device)
        for name, part in zip(names, buffer.split(rows), strict=True):
            self.slots[name] = Slot(part, sent)
        return buffer

    def _qk_norm(self, prefix: str) -> Tensor:
        """Allocate a row per head: the first query and key row are slots that ``finish`` copies."""
        arch = self.arch
        norm = torch.empty(
            arch.heads + arch.kv_heads, arch.head_dim, dtype=self.dtype, device=self.device
        )
        for name, part in (("q_norm", norm[0]), ("k_norm", norm[arch.heads])):
            name = f"{prefix}{name}.weight"
            self.slots[name] = Slot(part, FLOATS)
        return norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize in FP32, cast, then scale, in this order as Hugging Face models were trained."""
    x32 = x.float()
    norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x32 * inverse).to(x.dtype).mul_(weight)


def _inverse_frequencies(arch: Arch) -> Tensor:
    """Return the radians per position of each pair of channels, [D / 2] float32, by transformers'
    formulas."""
    exponent = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
    inverse = 1.0 / (arch.rope_theta**exponent)
    return _llama3(inverse, arch.rope_scaling) if arch.rope_scaling else inverse


def _llama3(inverse: Tensor, rope: Llama3Rope) -> Tensor:
    """Scale frequencies as Llama 3.1: stretch long wavelengths, keep short ones, blend between."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    old_context = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    stretched = torch.where(wavelength > old_context / low, inverse / rope.factor, inverse)
    smooth = (old_context / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    middle = (wavelength >= old_context / high) & (wavelength <= old_context / low)
    return torch.where(middle, blended, stretched)
