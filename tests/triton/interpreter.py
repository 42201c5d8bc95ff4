"""A pytest plugin (``-p tests.triton.interpreter``): triton's interpreter rounds BF16 as GPUs do.

It cuts float32 off to bfloat16, where a GPU rounds half to even (``cvt.rn.bf16.f32``, which
test_compiles.py finds in what is compiled). Nothing else that the kernels use differs, apart from
``exp``, which is NumPy's here.
"""

import os

import numpy as np


def pytest_configure() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    np.seterr(invalid="ignore")  # inf - inf is nan, on a GPU without a word
    convert = interpreter._convert_float

    def rounded(data, source, target, mode):
        if source == tl.float32 and target == tl.bfloat16:
            bits = np.ascontiguousarray(data, np.float32).view(np.uint32).astype(np.uint64)
            whole = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            quiet = (bits >> 16) | 0x40
            return np.where(np.isnan(data), quiet, whole).astype(np.uint16)
        return convert(data, source, target, mode)

    interpreter._convert_float = rounded
