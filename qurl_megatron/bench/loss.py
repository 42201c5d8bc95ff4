"""Memory and time of ``token_log_probs`` against the dense way: log-softmax of a float32 copy.

``python -m qurl_megatron.bench.loss --tokens 4096 --vocab 151936 --out docs/results/loss_cpu.json``

Every candidate runs in a process of its own, because the high-water mark of a process's memory
never falls. Memory counts what forward and backward need beyond the logits; seconds are the
fastest of several repeats of forward and backward together.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from qurl_megatron.algo import token_log_probs

MIB = 1 << 20


def ours(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probs differentiated, the entropy computed for the log."""
    return token_log_probs(logits, targets)[0].sum()


def ours_entropy_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    log_probs, entropy = token_log_probs(logits, targets)
    return log_probs.sum() + 0.01 * entropy.sum()


def dense(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probs alone."""
    return logits.float().log_softmax(-1).gather(1, targets[:, None]).sum()


def dense_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probs differentiated, the entropy computed for the log: what ``ours`` returns."""
    log_p = logits.float().log_softmax(-1)
    with torch.no_grad():
        (log_p.exp() * log_p).sum(-1).neg()
    return log_p.gather(1, targets[:, None]).sum()


def dense_entropy_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    log_p = logits.float().log_softmax(-1)
    entropy = (log_p.exp() * log_p).sum(-1).neg()
    return log_p.gather(1, targets[:, None]).sum() + 0.01 * entropy.sum()


CANDIDATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    f.__name__: f
    for f in (ours, dense, dense_entropy, ours_entropy_gradient, dense_entropy_gradient)
}

# (ours, the dense candidate with the same outputs and gradients)
PAIRS = {
    "log_probs_only": ("ours", "dense"),
    "entropy_logged": ("ours", "dense_entropy"),
    "entropy_gradient": ("ours_entropy_gradient", "dense_entropy_gradient"),
}


def main(argv: list[str] | None = None) -> int:
    args = _arguments().parse_args(argv)
    if args.candidate:
        print(json.dumps(measure(args)))
        return 0
    results = {}
    for name in CANDIDATES:
        results[name] = _in_fresh_process(name, args)
        print(f"{name:24s} {results[name]}", file=sys.stderr, flush=True)
    report = {
        "tokens": args.tokens,
        "vocab": args.vocab,
        "dtype": args.dtype,
        "logits_mib": args.tokens * args.vocab * getattr(torch, args.dtype).itemsize / MIB,
        "machine": machine(args.device, args.threads),
        "results": results,
        "ours_over_dense": {
            pair: {
                "seconds": round(results[a]["seconds"] / results[b]["seconds"], 3),
                "extra_mib": round(results[a]["extra_mib"] / results[b]["extra_mib"], 4),
            }
            for pair, (a, b) in PAIRS.items()
        },
        "largest_gradient_difference": {
            dtype: gradient_differences(args.device, dtype) for dtype in ("float32", "bfloat16")
        },
    }
    text = json.dumps(report, indent=2) + "\n"
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
    print(text, end="")
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m qurl_megatron.bench.loss", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--candidate", choices=CANDIDATES, help="measure one, in this process")
    return parser


def _in_fresh_process(name: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "qurl_megatron.bench.loss", "--candidate", name]
    for key in ("tokens", "vocab", "dtype", "device", "threads", "repeats"):
        command += [f"--{key}", str(getattr(args, key))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Extra memory of the first forward and backward, seconds of the fastest."""
    torch.set_num_threads(args.threads)
    run = CANDIDATES[args.candidate]
    _forward_backward(
        run, *make_batch(8, 1000, args.dtype, args.device), args.device
    )  # lazy imports
    logits, targets = make_batch(args.tokens, args.vocab, args.dtype, args.device)
    before = _memory_now(args.device)
    seconds = [_forward_backward(run, logits, targets, args.device)]
    extra = _memory_peak(args.device) - before
    for _ in range(args.repeats - 1):
        del logits, targets
        logits, targets = make_batch(args.tokens, args.vocab, args.dtype, args.device)
        seconds.append(_forward_backward(run, logits, targets, args.device))
    return {"seconds": round(min(seconds), 4), "extra_mib": round(extra / MIB, 1)}


def make_batch(tokens: int, vocab: int, dtype: str, device: str) -> tuple[Tensor, Tensor]:
    """Logits with a gradient function, as the output layer hands them over, made in one buffer."""
    generator = torch.Generator().manual_seed(0)
    some = (torch.randn(min(tokens, 4), vocab, generator=generator) * 3).to(getattr(torch, dtype))
    logits = torch.empty(tokens, vocab, dtype=some.dtype, device=device)
    for start in range(0, tokens, len(some)):
        rows = logits[start : start + len(some)]
        rows.copy_(some[: len(rows)])
    anchor = torch.zeros((), dtype=some.dtype, device=device, requires_grad=True)
    targets = torch.randint(vocab, (tokens,), generator=generator).to(device)
    return logits.add_(anchor), targets


def _forward_backward(
    run: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor, device: str
) -> float:
    """Seconds until the gradient of the logits exists."""
    start = _finish(device)
    torch.autograd.grad(run(logits, targets), logits)
    return _finish(device) - start


def _finish(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _memory_now(device: str) -> int:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    # Peak instead of present: making the batch must not have gone higher, or the difference
    # would be too small; it does not, since the logits are made in one buffer.
    return _memory_peak(device)


def _memory_peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine(device: str, threads: int) -> dict[str, object]:
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else name,
        "cores": os.cpu_count(),
        "threads": threads,
        # Several threads wait for each other after every operation: on a machine that others use,
        # times mean something with --threads 1 only.
        "load_average": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def gradient_differences(device: str, dtype: str) -> dict[str, float]:
    """Largest difference of a small case's gradients."""
    differences = {}
    for pair, names in PAIRS.items():
        grads = []
        for name in names:
            logits, targets = make_batch(64, 1000, dtype, device)
            grads.append(torch.autograd.grad(CANDIDATES[name](logits, targets), logits)[0].float())
        differences[pair] = (grads[0] - grads[1]).abs().max().item()
    return differences


if __name__ == "__main__":
    sys.exit(main())
