"""The decode step in C++, called from Python.

The install builds ``decode.cpp`` where there is a compiler. It runs on processors with AVX-512
VNNI, for INT8 weights and float32 activations. In all other cases torch computes the same, and is
the reference. ``QURL_NATIVE=0`` turns it off. For a model with experts only the products are
native, not the whole step.

Shapes: B rows, T tokens, H hidden, I inputs and O outputs of a matrix.
"""

import ctypes
import functools
import os
import re
import sysconfig
import zlib
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qurl_megatron.engines.embedded.cache import Cache
    from qurl_megatron.engines.embedded.decoder import Decoder, Layer, Matrix

SOURCE = Path(__file__).with_name("decode.cpp")
BUILT = SOURCE.with_name("_decode" + sysconfig.get_config_var("EXT_SUFFIX"))
# Instructions that setup.py lets the compiler use. The library may be built on another machine.
INSTRUCTIONS = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma"}
BLOCK = 32  # outputs of a block of weights
BUILT_BY = (
    "with a C++ compiler, `python setup.py build_ext --inplace --force` in the checkout builds it"
)
THREAD_PAYS_FROM = 1 << 20  # products of a layer: a barrier takes as long as some 20,000


@functools.cache
def library() -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none."""
    if os.environ.get("QURL_NATIVE") == "0":
        return "QURL_NATIVE=0"
    if missing := INSTRUCTIONS - instructions():
        return f"the processor has no {', '.join(sorted(missing))}"
    if not BUILT.exists():
        return f"{BUILT.name} is not built; {BUILT_BY}"
    try:
        # It uses the OpenMP that torch has loaded, and so its threads.
        loaded = ctypes.CDLL(str(BUILT))
    except OSError as error:
        return f"{BUILT.name} cannot be loaded: {error}"
    if loaded.source() & 0xFFFFFFFF != zlib.crc32(SOURCE.read_bytes()):
        return f"{BUILT.name} is built from another {SOURCE.name}; {BUILT_BY}"
    loaded.pack.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_int]
    matrix_and_input: list = [POINTER(_Matrix), c_void_p, c_int64, c_float]
    loaded.linear.argtypes = [*matrix_and_input, c_void_p, c_int64, c_void_p, c_int]
    loaded.decode.argtypes = [POINTER(_Model), c_void_p, c_int64, c_int64, c_void_p, c_int]
    return loaded


@functools.cache
def instructions() -> frozenset[str]:
    """Return the processor's instruction sets by Linux's names; empty on ARM."""
    flags = re.findall(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return frozenset("".join(flags[:1]).split())


def available() -> bool:
    return not isinstance(library(), str)


def refusal(decoder: "Decoder") -> str | None:
    """Return why torch computes a decoder's steps; None if they are native."""
    if decoder.largest_code is None or decoder.device.type != "cpu":
        return f"scheme {decoder.scheme} on {decoder.device.type} has no native step"
    if isinstance(reason := library(), str):
        return reason
    if decoder.dtype is not torch.float32:
        return "native steps need float32 activations (--dtype float32)"
    if decoder.arch.experts:
        return f"{decoder.arch.family} models have experts, which the native step lacks"
    return None


def _built() -> ctypes.CDLL:
    loaded = library()
    assert not isinstance(loaded, str), "there are blocks only where there is a library"
    return loaded


class _Matrix(Structure):
    _fields_ = [
        ("blocks", c_void_p),
        ("scale", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
    ]


class _Layer(Structure):
    _fields_ = [
        ("input_norm", c_void_p),
        ("qkv", _Matrix),
        ("qkv_bias", c_void_p),
        ("qk_norm", c_void_p),
        ("out", _Matrix),
        ("post_norm", c_void_p),
        ("gate_up", _Matrix),
        ("down", _Matrix),
        ("keys", c_void_p),
        ("values", c_void_p),
    ]


class _Model(Structure):
    _fields_ = [
        ("layer", POINTER(_Layer)),
        ("frequencies", c_void_p),
        *((name, c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "dim")),
        ("intermediate", c_int64),
        ("eps", c_float),
        ("largest", c_float),
    ]


class Blocks:
    """INT8 weights [O, I] in the layout of ``decode.cpp``, and their scales [O]."""

    def __init__(self, w_OI: Tensor, scale_O: Tensor) -> None:
        outputs, inputs = w_OI.shape
        self._blocks = torch.empty(
            -(-outputs // BLOCK) * BLOCK, -(-inputs // 4) * 4, dtype=torch.uint8
        )
        self._scale_O = scale_O  # kept alive: C++ knows addresses only
        self.matrix = _Matrix(self._blocks.data_ptr(), scale_O.data_ptr(), inputs, outputs)
        self.fill(w_OI)

    def fill(self, w_OI: Tensor) -> None:
        """Take in other weights, at the same address."""
        target = self._blocks.data_ptr()
        _built().pack(w_OI.data_ptr(), *w_OI.shape, target, torch.get_num_threads())

    def linear(self, x_TI: Tensor, addend: Tensor | None, largest: float) -> Tensor:
        """Return [T, O] float32: what ``decoder.Matrix`` computes without blocks, to the last bit.

        Args:
            addend: [O], or [T, O].
            largest: code of an activation.
        """
        x_TI = x_TI.contiguous().float()
        y_TO = torch.empty(len(x_TI), self.matrix.outputs)
        step = 0  # between the rows of the addend
        if addend is not None:
            addend = addend.contiguous().float()
            step = addend.stride(0) if addend.ndim == 2 else 0
        _built().linear(
            self.matrix,
            x_TI.data_ptr(),
            len(x_TI),
            largest,
            _address(addend),
            step,
            y_TO.data_ptr(),
            torch.get_num_threads(),
        )
        return y_TO


class NativeStep:
    """All layers of a decode step, for a decoder and a cache whose memory never moves."""

    def __init__(self, decoder: "Decoder", cache: "Cache") -> None:
        arch = decoder.arch
        self._decoder, self._cache = decoder, cache  # C++ knows addresses only
        layers = [
            _layer(*parts) for parts in zip(decoder.layers, cache.keys, cache.values, strict=True)
        ]
        self._model = _Model(
            layer=(_Layer * len(layers))(*layers),
            frequencies=decoder.inverse_frequencies.data_ptr(),
            layers=len(layers),
            hidden=arch.hidden,
            heads=arch.heads,
            kv_heads=arch.kv_heads,
            dim=arch.head_dim,
            intermediate=arch.intermediate,
            eps=arch.rms_eps,
            largest=decoder.largest_code,
        )
        self._products = sum(m.weight_OI.numel() for m in decoder.layers[0].matrices)

    def __call__(self, x_BH: Tensor, position_B: Tensor) -> Tensor:
        """Turn embeddings [B, H] into the hidden states before the final norm, in place."""
        work = len(x_BH) * self._products
        threads = min(torch.get_num_threads(), 1 + work // THREAD_PAYS_FROM)
        batch, length = len(x_BH), self._cache.length
        _built().decode(self._model, position_B.data_ptr(), batch, length, x_BH.data_ptr(), threads)
        return x_BH


def _layer(of: "Layer", keys: Tensor, values: Tensor) -> _Layer:
    qkv, out, gate_up, down = map(_matrix, of.matrices)
    return _Layer(
        input_norm=of.input_norm.data_ptr(),
        qkv=qkv,
        qkv_bias=_address(of.qkv_bias),
        qk_norm=_address(of.qk_norm),
        out=out,
        post_norm=of.post_norm.data_ptr(),
        gate_up=gate_up,
        down=down,
        keys=keys.data_ptr(),
        values=values.data_ptr(),
    )


def _matrix(of: "Matrix") -> _Matrix:
    assert of.blocks is not None
    return of.blocks.matrix


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
