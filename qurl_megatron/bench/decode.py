"""Decode speed of the embedded engine: tokens per second by number format and batch size.

``python -m qurl_megatron.bench.decode --hidden 1024 --layers 8 --batch 1 8 32``

The model is random, the prompts are short, and only decode steps count: prefill is over before the
clock starts. The rate is that of the fastest of several spans of steps, because other processes
share the machine's cores; the median tells how much they did.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

from qurl_megatron.rollout.embedded.engine import Engine, Sequence
from qurl_megatron.rollout.embedded.model import DTYPES, Decoder
from qurl_megatron.weights.arch import Arch

SCHEMES = ("int8", "fp8", "bfloat16", "float32")
PROMPT = 32


def run(
    arch: Arch,
    schemes: list[str],
    batches: list[int],
    *,
    dtype: str = "float32",
    steps: int = 16,
    repeats: int = 5,
    device: str = "cpu",
) -> list[dict]:
    """One row per scheme and batch size.

    Args:
        schemes: of SCHEMES; int8 and fp8 keep everything else in ``dtype``.
        steps: decode steps in one timed span.
        repeats: timed spans.
    """
    rows = []
    for scheme in schemes:
        quantized = scheme in ("int8", "fp8")
        rest = dtype if quantized else scheme
        decoder = random_decoder(arch, scheme if quantized else "none", rest, torch.device(device))
        for batch in batches:
            engine = Engine(decoder, cache_gb=1.0)
            spans = _time_decode(engine, batch, steps, repeats)
            rates = [batch * steps / span for span in spans]
            rows.append(
                {
                    "scheme": scheme,
                    "dtype": rest,
                    "batch": batch,
                    "tokens_per_s": round(max(rates), 1),
                    "tokens_per_s_median": round(statistics.median(rates), 1),
                    "ms_per_step": round(1000 * min(spans) / steps, 3),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


@torch.inference_mode()
def random_decoder(arch: Arch, scheme: str, dtype: str, device: torch.device) -> Decoder:
    """A decoder whose values do not matter, but are small enough to stay finite."""
    torch.manual_seed(0)
    decoder = Decoder(arch, scheme, DTYPES[dtype], device)
    for name, slot in decoder.slots.items():
        if slot.dtypes == (torch.int8,):
            slot.target.random_(-127, 128)
        elif name.endswith("_scale"):
            slot.target.fill_(1e-4)
        elif name.endswith("norm.weight"):
            slot.target.fill_(1.0)
        else:
            slot.target.copy_(torch.randn(slot.target.shape) * 0.02)
    decoder.pack()
    return decoder


def _time_decode(engine: Engine, batch: int, steps: int, repeats: int) -> list[float]:
    vocab = engine.decoder.arch.vocab
    new = steps * (repeats + 1) + 1
    prompts = [[(7 * i + j) % vocab for j in range(PROMPT)] for i in range(batch)]
    engine.add([Sequence(str(i), p, new, seed=i) for i, p in enumerate(prompts)])
    while engine.waiting:
        engine.step()
    spans = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        spans.append(time.perf_counter() - start)
    return spans[1:]  # the first span warms caches and allocator up


def machine() -> dict:
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_before": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="float32", help="beside int8, fp8"
    )
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    arch = Arch(
        family="qwen2",
        vocab=options.vocab,
        hidden=options.hidden,
        intermediate=options.intermediate,
        num_layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.hidden // options.heads,
        rms_eps=1e-6,
        max_position=4096,
        tied=False,
        qkv_bias=True,
        qk_norm=False,
        rope_theta=10000.0,
        rope_scaling=None,
    )
    names = ("hidden", "intermediate", "num_layers", "heads", "kv_heads")
    shape = {name: getattr(arch, name) for name in names}
    report = {"machine": machine(), "model": {**shape, "vocab": arch.vocab}}
    report["results"] = run(
        arch,
        options.schemes,
        options.batch,
        dtype=options.dtype,
        steps=options.steps,
        repeats=options.repeats,
        device=options.device,
    )
    text = json.dumps(report, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
