"""Names of number formats in safetensors; needs torch, as nothing else here does."""

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""The number formats of safetensors that checkpoints of this package may hold."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
