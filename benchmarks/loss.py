"""Time and memory of the loss: log-probs, entropy, the ACR objective, forward and backward.

Every way of computing log-probs gets the same logits, split over 1, 2 and 4 tensor-parallel ranks
(gloo on a CPU, nccl on GPUs), and the same objective on top; the ways take turns. ``ours`` takes
Triton's kernels on a GPU where it is installed; there ``ours_torch`` is the same without them.
``megatron`` is Megatron-Core's fused cross entropy, which gives no entropy.

Seconds are the slowest rank's. Memory is one rank's high-water mark above its logits. The
limit is one pass that reads the logits and one that writes their gradient. A way that needs more
memory than is free is not run, and the record says so.

    python -m benchmarks.loss --tensor 1 2 --out DIR
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import measure as record_of
from benchmarks.harness import parser_of
from benchmarks.machine_limits import limits
from benchmarks.quantize import switched
from benchmarks.repeats import Repeats, interleaved, yardstick
from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.algo import objective, token_log_probs
from qurl_megatron.bench.command import count
from qurl_megatron.bench.record import Case, Figure, progress
from qurl_megatron.bench.rollout_engines import config_of
from qurl_megatron.config import ParallelConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.launch import launch

MIB = 1 << 20
ENTROPY_COEF = 0.01
SPARE_GIB = 3  # that others may take meanwhile; a machine without memory ends any of them

Way = Callable[[Tensor, Tensor, dist.ProcessGroup], tuple[Tensor, Tensor | None]]
"""Makes log-probs, [T], and entropies, [T] or None, of this rank's logits, [T, v], and targets."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute log-probs for the loss."""

    way: Way
    gives: str
    peak: float  # about how many bytes it takes per logit, the BF16 logits included
    bonus: bool = False  # the entropy is differentiated, as part of the loss
    kernels: bool = True  # may take Triton's


def _ours(logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    return token_log_probs(logits, targets, group=group)


def _megatron(logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, None]:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    # It wants [sequence, batch, vocabulary].
    loss = fused_vocab_parallel_cross_entropy(logits[:, None], targets[:, None], group)
    return -loss.squeeze(1), None


LOGGED = "log-probs, entropy logged"
CANDIDATES = {
    "ours": Candidate(_ours, LOGGED, 2.2),
    "ours_torch": Candidate(_ours, LOGGED, 2.2, kernels=False),
    "ours_entropy_gradient": Candidate(_ours, "log-probs, entropy differentiated", 2.2, bonus=True),
    "megatron": Candidate(_megatron, "log-probs", 12),
}


def parser() -> argparse.ArgumentParser:
    options = parser_of("loss", __doc__)
    add = options.add_argument
    add("--tokens", type=count, default=8192, metavar="N", help="of the batch; default 8192")
    add("--vocab", type=count, metavar="N", help="default: that of --model")
    add("--tensor", type=count, nargs="+", default=[1, 2, 4], metavar="N", help="default 1 2 4")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of the logits")
    add("--device", choices=["cpu", "cuda"], help="default: cuda where it is")
    add("--threads", type=int, default=0, metavar="N", help="of a rank; default: its share")
    add("--only", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    return options


def run(options: argparse.Namespace) -> list[Case]:
    """Return a case per layout and way.

    Raises:
        ConfigError: a rank failed.
    """
    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.vocab is None:
        options.vocab = config_of(options.model)["vocab_size"]
    cases = []
    for tensor in options.tensor:
        obstacles = {name: _obstacle(name, tensor, options) for name in options.only}
        names = [name for name, obstacle in obstacles.items() if not obstacle]
        measured = _on_ranks(tensor, names, options)
        for name, obstacle in obstacles.items():
            cases.append(case_of(name, tensor, options, measured.get(name), obstacle))
    return cases


def _obstacle(name: str, tensor: int, options: argparse.Namespace) -> str:
    """Return why a candidate cannot be measured here, or ""."""
    candidate = CANDIDATES[name]
    if not candidate.kernels and options.device != "cuda":
        return "needs CUDA"
    if options.device == "cuda" and torch.cuda.device_count() < tensor:
        return f"needs {tensor} GPUs"
    if options.device == "cpu":
        needed = _logits_bytes(options) * candidate.peak / 2 / (1 << 30) + 0.5 * tensor
        free = psutil.virtual_memory().available / (1 << 30)
        if needed + SPARE_GIB > free:
            return f"needs {needed:.0f} GiB and {SPARE_GIB} to spare, {free:.0f} are free"
    return ""


def _on_ranks(
    tensor: int, names: list[str], options: argparse.Namespace
) -> dict[str, Repeats[tuple[float, float]]]:
    if not names:
        return {}
    progress(f"tensor {tensor}: {', '.join(names)}")
    os.environ |= {
        # Ranks that wait for each other had better not spin on the cores they share.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    if options.device == "cpu":  # where nothing may land on a GPU that happens to be there
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="qurl-bench-") as work:
        out = Path(work) / "measured.json"
        if status := launch(measure, (tensor, names, options, out), tensor):
            raise ConfigError(f"bench loss: a rank left with code {status}; it says why above")
        measured = json.loads(out.read_text(encoding="utf-8"))
    return {name: Repeats(**repeats) for name, repeats in measured.items()}


def measure(tensor: int, names: list[str], options: argparse.Namespace, out: Path) -> int:
    """Run one rank; the leading one writes the seconds and the bytes of the worst."""
    if options.device == "cpu":
        torch.set_num_threads(_threads(tensor, options))
    with megatron_runtime(ParallelConfig(tensor=tensor)) as ranks:
        measured = interleaved(
            {
                name: partial(one_step, CANDIDATES[name], options, ranks.tensor.group)
                for name in names
            },
            repeats=options.repeats,
            # Of the leading rank alone: on all at once it would measure the others.
            measure=yardstick if ranks.leads else lambda: 0.0,
        )
        if ranks.leads:
            text = json.dumps({name: vars(repeats) for name, repeats in measured.items()})
            out.write_text(text, encoding="utf-8")
    return 0


def one_step(
    candidate: Candidate, options: argparse.Namespace, group: dist.ProcessGroup
) -> tuple[float, float]:
    """Compute the gradient of the logits once.

    Returns:
        Seconds, and bytes above the logits, of the worst rank.
    """
    device = options.device
    logits, targets, advantages, shifts = _batch(options, group)
    dist.barrier()
    without = contextlib.nullcontext() if candidate.kernels else switched("0")
    with without, high_water(device) as mark:
        start = _now(device)
        log_probs, entropy = candidate.way(logits, targets, group)
        proximal, behaviour = log_probs.detach() + shifts
        value = objective(log_probs, proximal, behaviour, advantages, kind="acr", cap=1.2)
        if candidate.bonus:
            assert entropy is not None
            value = value + ENTROPY_COEF * entropy
        gradient = torch.autograd.grad(-value.mean(), logits)[0]
        dist.barrier()
        seconds = _now(device) - start
    del gradient
    worst = torch.tensor([seconds, float(mark[0])], dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return worst[0].item(), worst[1].item()


def _batch(options: argparse.Namespace, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Return this rank's logits, [T, v], as the output layer hands them over, and, the same on all
    ranks, targets and advantages, [T], and the shifts of proximal and behaviour log-probs from the
    current ones, [2, T]."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    tokens, vocab = options.tokens, options.vocab
    generator = torch.Generator().manual_seed(0)
    # Few different rows: drawing all of them would take longer than all that is measured.
    rows = torch.randn(min(tokens, 4), vocab, generator=generator) * 3
    rows = rows.chunk(size, dim=1)[rank].to(getattr(torch, options.dtype))
    logits = torch.empty(tokens, rows.shape[1], dtype=rows.dtype, device=options.device)
    for start in range(0, tokens, len(rows)):
        part = logits[start : start + len(rows)]
        part.copy_(rows[: len(part)])
    anchor = torch.zeros((), dtype=rows.dtype, device=options.device, requires_grad=True)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    normal = torch.randn(3, tokens, generator=generator)
    inputs = (targets, normal[0], normal[1:] * 0.3)
    # In place: one buffer alone is made.
    return logits.add_(anchor), *(each.to(options.device) for each in inputs)


def case_of(
    name: str,
    tensor: int,
    options: argparse.Namespace,
    measured: Repeats[tuple[float, float]] | None,
    obstacle: str,
) -> Case:
    """Return the case of one way on so many ranks, or why it was not run."""
    case = Case(
        name=f"{name}, tensor {tensor}",
        keys={
            "way": name,
            "tensor": tensor,
            "tokens": options.tokens,
            "vocab": options.vocab,
            "dtype": options.dtype,
            "threads": options.threads,  # 0: each rank has its share of the cores
            "device": options.device,
        },
        notes={"gives": CANDIDATES[name].gives, "threads": _threads(tensor, options)},
    )
    if measured is None:
        return replace(case, reasons=["not run"], notes={**case.notes, "not run": obstacle})
    logits = _logits_bytes(options)
    seconds, peaks = zip(*measured.results, strict=True)
    return replace(
        case,
        figures=[
            Figure(
                name="seconds",
                unit="s",
                better="lower",
                repeats=list(seconds),
                limit=2 * logits / 1e9 / limits(options.device)["read_gb_s"],
                limit_of="bytes moved",
            ),
            Figure(
                name="peak",
                unit="of the logits",
                better="lower",
                repeats=[1 + extra / (logits / tensor) for extra in peaks],
                limit=1.0,
                limit_of="the logits",
            ),
        ],
        yardsticks=measured.yardsticks,
        reasons=measured.reasons,
        notes={**case.notes, "logits_mib": round(logits / MIB, 1)},
    )


def _threads(tensor: int, options: argparse.Namespace) -> int:
    return options.threads or max(1, (os.cpu_count() or 1) // tensor)


def _logits_bytes(options: argparse.Namespace) -> int:
    return options.tokens * options.vocab * getattr(torch, options.dtype).itemsize


@contextlib.contextmanager
def high_water(device: str) -> Iterator[list[int]]:
    """Watch memory inside the block; afterwards the list has the bytes by which it rose at most."""
    mark = [0]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield mark
        mark[0] = torch.cuda.max_memory_allocated() - before
        return
    Path("/proc/self/clear_refs").write_text("5")  # the mark falls to the present use
    before = _high_water_bytes()
    yield mark
    mark[0] = _high_water_bytes() - before


def _high_water_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(record_of("loss", parser().parse_args(), run))
