"""Time and memory of the loss: log-probs, entropy, the ACR objective, forward and backward.

Every way of computing log-probs and entropy gets the same logits, split over 1, 2 and 4
tensor-parallel ranks, and the same objective on top. Each runs in fresh processes, gloo on a CPU
and nccl on GPUs, twice: all ways forwards, then backwards, with half of the repeats each. Peers
are in ``benchmarks/peers/losses.py``; verl is measured where an unpacked wheel is named
(``pip download --no-deps verl``), Liger on GPUs that have it. ``ours`` takes Triton's kernels on a
GPU where it is installed; there ``ours_torch`` is the same without them.

Seconds are those of the slowest rank. Memory is one rank's high-water mark above its logits. The
limit is one pass that reads the logits and one that writes their gradient. What needs more memory
than is free is not run, and the record says so.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.algo import objective, token_log_probs
from qurl_megatron.bench.options import BENCHMARKS, add_shared, chosen
from qurl_megatron.bench.peer import checkout, peer
from qurl_megatron.bench.random_model import config_of
from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.repeats import load_reasons, progress, yardstick
from qurl_megatron.config import ParallelConfig
from qurl_megatron.fused import SWITCH
from qurl_megatron.planning.machine_limits import limits
from qurl_megatron.runtime.megatron import megatron_runtime
from qurl_megatron.runtime.network import free_port

MIB = 1 << 20
ENTROPY_COEF = 0.01
SPARE_GIB = 3  # that others may take meanwhile; a machine without memory ends any of them
WARM_UP = ((8, 1000), (16, 1504), (40, 2016))  # two shapes more: compiled code stops to be special

# From this rank's slice of the logits, [T, v], and the targets, [T], the log-probs, [T], and the
# entropies, [T], or None where a way has none.
Way = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Candidate:
    """One way to compute what the loss needs."""

    make: Callable[[argparse.Namespace, dist.ProcessGroup], Way]
    gives: str
    peak: float  # about how many bytes it takes per logit, the BF16 logits included
    bonus: bool = False  # the entropy is differentiated, as part of the loss
    split: bool = True  # the vocabulary may be split
    cuda: bool = False  # runs on GPUs alone


def _ours(args: argparse.Namespace, group: dist.ProcessGroup) -> Way:
    return lambda logits, targets: token_log_probs(logits, targets, group=group)


def _ours_torch(args: argparse.Namespace, group: dist.ProcessGroup) -> Way:
    os.environ[SWITCH] = "0"  # of this rank's process, which measures nothing else
    return _ours(args, group)


def _dense(entropy: str) -> Callable:
    return lambda *_: peer("losses").dense(entropy)


def _megatron(*, compiled: bool) -> Callable:
    return lambda _, group: peer("losses").megatron(group, compiled=compiled)


def _verl(args: argparse.Namespace, group: dist.ProcessGroup) -> Way:
    return peer("losses").verl(args.verl)


LOG_PROBS = "log-probs"
LOGGED = "log-probs, entropy logged"
BONUS = "log-probs, entropy differentiated"

OURS = {
    "ours": Candidate(_ours, LOGGED, 2.2),
    "ours_torch": Candidate(_ours_torch, LOGGED, 2.2, cuda=True),
    "ours_entropy_gradient": Candidate(_ours, BONUS, 2.2, bonus=True),
}
PEERS = {
    "megatron": Candidate(_megatron(compiled=True), LOG_PROBS, 12),
    "megatron_eager": Candidate(_megatron(compiled=False), LOG_PROBS, 9),
    "verl": Candidate(_verl, LOGGED, 11),
    "verl_entropy_gradient": Candidate(_verl, BONUS, 11, bonus=True),
    "dense": Candidate(_dense("none"), LOG_PROBS, 14.1, split=False),
    "dense_entropy": Candidate(_dense("logged"), LOGGED, 14.1, split=False),
    "dense_entropy_gradient": Candidate(
        _dense("differentiated"), BONUS, 22.1, bonus=True, split=False
    ),
    "liger": Candidate(lambda *_: peer("losses").liger(), LOG_PROBS, 6, split=False, cuda=True),
}
CANDIDATES = OURS | PEERS


def run(options: argparse.Namespace) -> list[Case]:
    """A case per layout and way."""
    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.vocab is None:
        options.vocab = config_of(options.model)["vocab_size"]
    names = chosen(options.only, CANDIDATES, "--only")
    if any(name in PEERS for name in names):
        checkout("benchmarks/peers/losses.py", f", or give --only {' '.join(OURS)}")
    return [case for tensor in options.tensor for case in _layout(tensor, names, options)]


def _layout(tensor: int, names: list[str], args: argparse.Namespace) -> list[Case]:
    obstacles = {name: _obstacle(name, tensor, args) for name in names}
    there = [name for name in names if not obstacles[name]]
    runs: dict[str, list[dict]] = {name: [] for name in there}
    forwards = (args.repeats + 1) // 2
    for count, order in ((forwards, there), (args.repeats - forwards, there[::-1])):
        for name in order if count else ():
            progress(f"tensor {tensor}: {name}, {count} repeats")
            runs[name].append(_in_fresh_processes(name, tensor, count, args))
    found = [
        case_of(name, tensor, args, runs.get(name, [{"not run": obstacles[name]}]))
        for name in names
    ]
    _beside_megatron(found)
    return found


def _beside_megatron(cases: list[Case]) -> None:
    """Note what the benchmark is for: how many times as long ours takes as Megatron's fused cross
    entropy, the faster of its two forms, which gives no entropy."""
    seconds = {case.keys["way"]: case.figure("seconds").median for case in cases if case.figures}
    theirs = [value for way, value in seconds.items() if str(way).startswith("megatron")]
    for case in cases:
        if case.keys["way"] == "ours" and case.figures and theirs:
            case.notes["seconds_over_megatron"] = round(seconds["ours"] / min(theirs), 3)


def case_of(name: str, tensor: int, args: argparse.Namespace, runs: list[dict]) -> Case:
    """Of what the processes found: lists of seconds, of bytes, and errors; or why they did not."""
    given: dict[str, Any] = {
        "name": f"{name}, tensor {tensor}",
        "keys": {
            "way": name,
            "tensor": tensor,
            "tokens": args.tokens,
            "vocab": args.vocab,
            "dtype": args.dtype,
            "threads": args.threads,  # 0: each rank has its share of the cores
            "device": args.device,
        },
    }
    notes = {"gives": CANDIDATES[name].gives, "threads": _threads(tensor, args)}
    for reason in ("not run", "failed"):
        if why := next((each[reason] for each in runs if reason in each), None):
            return Case(**given, reasons=[reason], notes={**notes, reason: why})
    joined = {
        key: [value for each in runs for value in each[key]]
        for key in ("seconds", "peaks", "yardsticks")
    }
    logits = _logits_bytes(args)
    worst = {key: max(each[key] for each in runs) for key in runs[0] if key.endswith("_error")}
    return Case(
        **given,
        figures=[
            Figure(
                name="seconds",
                unit="s",
                better="lower",
                repeats=joined["seconds"],
                limit=2 * logits / 1e9 / limits(args.device)["read_gb_s"],
                limit_of="bytes moved",
            ),
            Figure(
                name="peak",
                unit="of the logits",
                better="lower",
                repeats=[1 + extra / (logits / tensor) for extra in joined["peaks"]],
                limit=1.0,
                limit_of="the logits",
            ),
        ],
        yardsticks=joined["yardsticks"],
        reasons=load_reasons(joined["yardsticks"]),
        notes={**notes, **worst, "logits_mib": round(logits / MIB, 1)},
    )


def _obstacle(name: str, tensor: int, args: argparse.Namespace) -> str | None:
    """Why a candidate cannot be measured here, or None."""
    candidate = CANDIDATES[name]
    if candidate.cuda and args.device != "cuda":
        return "needs CUDA"
    if args.device == "cuda" and torch.cuda.device_count() < tensor:
        return f"needs {tensor} GPUs"
    if not candidate.split and tensor > 1:
        return "needs the whole vocabulary"
    if name.startswith("verl") and args.verl is None:
        return "needs --verl"
    if name == "liger" and find_spec("liger_kernel") is None:
        return "needs liger-kernel"
    if args.device == "cpu":
        needed = _logits_bytes(args) * candidate.peak / 2 / (1 << 30) + 0.5 * tensor
        free = _free_memory() / (1 << 30)
        if needed + SPARE_GIB > free:
            return f"needs {needed:.0f} GiB and {SPARE_GIB} to spare, {free:.0f} are free"
    return None


def _in_fresh_processes(name: str, tensor: int, repeats: int, args: argparse.Namespace) -> dict:
    command = [sys.executable, "-W", "ignore", "-m", "qurl_megatron.bench.loss", name]
    command += ["--tensor", str(tensor), "--repeats", str(repeats)]
    for key in ("tokens", "vocab", "dtype", "device", "verl"):
        if getattr(args, key) is not None:
            command += [f"--{key}", str(getattr(args, key))]
    command += ["--threads", str(_threads(tensor, args))]
    port = str(free_port())
    # On the CPU nothing may land on a GPU that happens to be there.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
    world = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=None if rank == 0 else subprocess.DEVNULL,
            text=True,
            env={
                **os.environ,
                **hidden,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(tensor),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": str(_threads(tensor, args)),
                # Ranks that wait for each other had better not spin on the cores they share.
                "OMP_WAIT_POLICY": "PASSIVE",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
            },
        )
        for rank in range(tensor)
    ]
    code = _wait(world)
    if code:
        return {"failed": f"a rank left with code {code}"}
    assert world[0].stdout is not None
    return json.loads(world[0].stdout.read().splitlines()[-1])


def _wait(world: list[subprocess.Popen]) -> int:
    """Until all have left; the first failure ends the others, which would wait for it for ever."""
    code = 0
    while any(process.poll() is None for process in world):
        if not code and (codes := [p.returncode for p in world if p.returncode]):
            code = codes[0]
            for process in world:
                process.kill()
        time.sleep(0.1)
    return code or next((p.returncode for p in world if p.returncode), 0)


def _threads(tensor: int, args: argparse.Namespace) -> int:
    return args.threads or max(1, (os.cpu_count() or 1) // tensor)


def _logits_bytes(args: argparse.Namespace) -> int:
    return args.tokens * args.vocab * getattr(torch, args.dtype).itemsize


def _free_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def rank(argv: list[str]) -> int:
    """One rank of one way, in a process of its own; the leading one prints what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("candidate")
    add_shared(parser, BENCHMARKS["loss"])
    BENCHMARKS["loss"].add_options(parser)
    args = parser.parse_args(argv)
    (tensor,) = args.tensor
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    with megatron_runtime(ParallelConfig(tensor=tensor)) as ranks:
        group = ranks.tensor.group
        candidate = CANDIDATES[args.candidate]
        way = candidate.make(args, group)
        for tokens, vocab in WARM_UP:
            one_step(way, candidate, Batch.make(tokens, vocab // tensor * tensor, args, group))
        errors = accuracy(way, candidate, args, group)
        measured = measure(way, candidate, args, group)
        slices: list = [None] * tensor
        dist.all_gather_object(slices, {**measured, **errors})
        if ranks.leads:
            worst = {key: max(one[key] for one in slices) for key in errors}
            for key in ("seconds", "peaks"):
                worst[key] = [max(each) for each in zip(*(s[key] for s in slices), strict=True)]
            print(json.dumps({**worst, "yardsticks": measured["yardsticks"]}))
    return 0


@dataclass
class Batch:
    """One rank's slice of the logits, and what the objective needs; the same on all ranks."""

    logits: Tensor  # [T, v], with a gradient function, as the output layer hands them over
    targets: Tensor  # [T]
    advantages: Tensor  # [T]
    shifts: Tensor  # [2, T]: proximal and behaviour log-probs, from the current ones

    @staticmethod
    def make(tokens: int, vocab: int, args: argparse.Namespace, group: dist.ProcessGroup):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        generator = torch.Generator().manual_seed(0)
        # Few different rows: drawing all of them would take longer than all that is measured.
        rows = torch.randn(min(tokens, 4), vocab, generator=generator) * 3
        rows = rows.chunk(size, dim=1)[rank].to(getattr(torch, args.dtype))
        logits = torch.empty(tokens, rows.shape[1], dtype=rows.dtype, device=args.device)
        for start in range(0, tokens, len(rows)):
            part = logits[start : start + len(rows)]
            part.copy_(rows[: len(part)])
        anchor = torch.zeros((), dtype=rows.dtype, device=args.device, requires_grad=True)
        targets = torch.randint(vocab, (tokens,), generator=generator)
        normal = torch.randn(3, tokens, generator=generator)
        return Batch(
            # In place: one buffer alone is made.
            logits.add_(anchor),
            targets.to(args.device),
            normal[0].to(args.device),
            (normal[1:] * 0.3).to(args.device),
        )


def loss_of(log_probs: Tensor, entropy: Tensor | None, batch: Batch, *, bonus: bool) -> Tensor:
    """The ACR objective, and the entropy where it is differentiated."""
    proximal, behaviour = log_probs.detach() + batch.shifts
    value = objective(log_probs, proximal, behaviour, batch.advantages, kind="acr", cap=1.2)
    if bonus:
        assert entropy is not None
        value = value + ENTROPY_COEF * entropy
    return -value.mean()


def one_step(way: Way, candidate: Candidate, batch: Batch) -> Tensor:
    """The gradient of the logits."""
    loss = loss_of(*way(batch.logits, batch.targets), batch, bonus=candidate.bonus)
    return torch.autograd.grad(loss, batch.logits)[0]


def measure(
    way: Way, candidate: Candidate, args: argparse.Namespace, group: dist.ProcessGroup
) -> dict[str, list[float]]:
    """Seconds, bytes above the logits, and seconds of the yardstick, by repeat."""
    found: dict[str, list[float]] = {"seconds": [], "peaks": [], "yardsticks": []}
    for _ in range(args.repeats):
        batch = Batch.make(args.tokens, args.vocab, args, group)
        # Of the leading rank alone: on all at once it would measure the others.
        before = yardstick() if dist.get_rank() == 0 else 0.0
        dist.barrier()
        with high_water(args.device) as mark:
            start = _now(args.device)
            gradient = one_step(way, candidate, batch)
            dist.barrier()
            found["seconds"].append(_now(args.device) - start)
        after = yardstick() if dist.get_rank() == 0 else 0.0
        dist.barrier()
        found["yardsticks"].append((before + after) / 2)
        found["peaks"].append(mark[0])
        del batch, gradient
    return found


def accuracy(
    way: Way, candidate: Candidate, args: argparse.Namespace, group: dist.ProcessGroup
) -> dict[str, float]:
    """Largest errors against float64 on a small batch, relative to the largest true value."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    batch = Batch.make(48, 2000, args, group)
    parts = [torch.empty_like(batch.logits) for _ in range(size)]
    dist.all_gather(parts, batch.logits.detach().contiguous(), group=group)
    whole = torch.cat(parts, dim=1).double().requires_grad_()
    log_p = whole.log_softmax(-1)
    true_log_probs = log_p.gather(1, batch.targets[:, None]).squeeze(1)
    true_entropy = (log_p.exp() * log_p).sum(-1).neg()
    log_probs, entropy = way(batch.logits, batch.targets)
    found = {"log_prob_error": _relative(log_probs, true_log_probs)}
    if entropy is not None:
        found["entropy_error"] = _relative(entropy, true_entropy)
    own = loss_of(log_probs, entropy, batch, bonus=candidate.bonus)
    true = loss_of(true_log_probs, true_entropy, batch, bonus=candidate.bonus)
    gradient = torch.autograd.grad(own, batch.logits)[0]
    expected = torch.autograd.grad(true, whole)[0].chunk(size, dim=1)[rank]
    return {**found, "gradient_error": _relative(gradient, expected)}


def _relative(found: Tensor, true: Tensor) -> float:
    difference = (found.detach().double() - true.detach()).abs().max() / true.detach().abs().max()
    return float(f"{difference.item():.2g}")


@contextmanager
def high_water(device: str) -> Iterator[list[int]]:
    """Inside, memory is watched; afterwards the list has the bytes by which it rose at most."""
    mark = [0]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield mark
        mark[0] = torch.cuda.max_memory_allocated() - before
        return
    Path("/proc/self/clear_refs").write_text("5")  # the mark falls to what is used now
    before = _status("VmHWM")
    yield mark
    mark[0] = _status("VmHWM") - before


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(rank(sys.argv[1:]))
