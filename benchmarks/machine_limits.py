"""Limits of a machine: measured, not read off a data sheet.

The rate at which all cores together read memory, and the fastest matrix products of each number
format. A figure beside them shows how much there is left to gain.
"""

import time
from collections.abc import Callable
from functools import cache, partial

SIZE = 1024  # of the square products that are timed
READ_MIB = 256  # more than caches hold
ON_A_GPU = 8  # times as much of both: less does not keep all of its units at work
TIMES = 5  # the fastest counts


@cache
def limits(device: str) -> dict[str, float]:
    """Return the most that the machine does with the threads that torch has at the first call: GB/s
    read from memory, and GFLOP/s (for INT8 10^9 operations per second) of products.

    Returns:
        ``read_gb_s``, ``int8_gop_s``, ``bf16_gflop_s``, ``fp32_gflop_s``; also ``fp8_gflop_s`` on
        GPUs with units for it.
    """
    import torch

    from qurl_megatron.quant.activations import int8_matmul

    size = SIZE if device == "cpu" else SIZE * ON_A_GPU
    kinds: dict[str, tuple[torch.dtype, Callable[..., torch.Tensor]]] = {
        "int8_gop_s": (torch.int8, lambda a, b: int8_matmul(a, b.t())),
        "bf16_gflop_s": (torch.bfloat16, torch.mm),
        "fp32_gflop_s": (torch.float32, torch.mm),
    }
    with torch.inference_mode():
        if device != "cpu" and torch.cuda.get_device_capability(device) >= (8, 9):
            unit_scale = torch.ones((), device=device)
            product = partial(
                torch._scaled_mm, scale_a=unit_scale, scale_b=unit_scale, out_dtype=torch.bfloat16
            )
            kinds["fp8_gflop_s"] = torch.float8_e4m3fn, product
        rates = {"read_gb_s": _read_gb_s(torch.device(device))}
        for name, (kind, multiply) in kinds.items():
            # Not of ones or zeros, with which chips draw less power and run faster.
            a, b = (torch.randint(-100, 100, (size, size), device=device).to(kind) for _ in "ab")
            # The second as weights lie: [out, in].
            seconds = fastest(partial(multiply, a, b.t()), device)
            rates[name] = _digits(2 * size**3 / 1e9 / seconds)
    return rates


def _read_gb_s(device) -> float:
    import torch

    mib = READ_MIB if device.type == "cpu" else READ_MIB * ON_A_GPU
    data = torch.ones(mib << 18, device=device).view(-1, 4096)  # float32
    vector = torch.ones(4096, device=device)
    # A product with a vector reads every number once, and so does a sum.
    ways = (lambda: torch.mv(data, vector), lambda: data.sum())
    seconds = min(fastest(way, str(device)) for way in ways)
    return _digits(data.nbytes / 1e9 / seconds)


def _digits(rate: float) -> float:
    """Round to four digits, not to decimals, which would turn a small rate into 0."""
    return float(f"{rate:.4g}")


def fastest(act: Callable[[], object], device: str = "cpu") -> float:
    """Return the seconds of the fastest of some calls, after one that does not count."""
    import torch

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    seconds = []
    for _ in range(TIMES + 1):
        wait()
        start = time.perf_counter()
        act()
        wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
