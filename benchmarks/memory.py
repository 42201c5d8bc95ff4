"""Memory of one GPU, beside the rows of ``qurl show RECIPE --dry-run``.

Exact rows (weights, gradients, optimizer) are held to models by tests; measured here are those that
`qurl_megatron/plan/memory.py` estimates: what CUDA and NCCL take, a pass' activations, gaps between
allocations, publishing, loading, and what an SGLang engine takes beside weights and cache. One rank
alone has no peers: NCCL's row is a floor.

    python -m benchmarks.memory --out DIR
"""

import argparse
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.harness import measure as record_of
from benchmarks.harness import parser_of
from qurl_megatron.bench.command import count
from qurl_megatron.bench.record import Case, Figure, gpus, progress
from qurl_megatron.bench.rollout_engines import Version, config_of, model_folder, started
from qurl_megatron.config import QuantConfig, RolloutConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.plan import memory
from qurl_megatron.plan.footprint import footprint
from qurl_megatron.plan.memory import GIB
from qurl_megatron.tensors.arch import read_arch

Rows = dict[str, tuple[float, float]]
"""Row of the dry run -> bytes measured, bytes predicted."""

ROWS = ("process", "trainer", "engine")


def parser() -> argparse.ArgumentParser:
    options = parser_of("memory", __doc__)
    add = options.add_argument
    add("--tokens", type=count, default=8192, metavar="N", help="of one pass; default 8192")
    add("--engine-model", default="Qwen2.5-Math-7B", help="default Qwen2.5-Math-7B")
    add("--sglang-python", default="", metavar="PATH", help="Python that has SGLang")
    add("--rows", nargs="+", choices=ROWS, default=ROWS, help="default: all")
    return options


def run(options: argparse.Namespace) -> list[Case]:
    """Return a case per row.

    Raises:
        ConfigError: no GPU is there; the engine does not start.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("bench memory: torch sees no GPU")
    rows = process_rows() if "process" in options.rows else {}
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as work:
        if "trainer" in options.rows:
            for recompute in (True, False):
                # In a process of its own, which leaves nothing on the GPU.
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    measured = process.submit(trainer_rows, options, recompute, Path(work))
                    rows |= measured.result()
        if "engine" in options.rows:
            rows |= engine_rows(options, Path(work))
    return [case_of(name, *pair, options) for name, pair in rows.items()]


def used() -> int:
    """Return the bytes of the GPU in use by all processes."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def process_rows() -> Rows:
    """Measure the driver, a process that has done nothing yet, and its communicator."""
    import torch

    rows: Rows = {}
    torch.zeros(1, device="cuda")
    if sizes := gpus():
        there = torch.cuda.get_device_properties(0).total_memory
        rows["driver"] = (sizes[0]["memory_gib"] * GIB - there, memory.DRIVER)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_grow, args=(theirs,))
    before = used()
    child.start()
    for row, estimate in (("trainer's context", memory.CONTEXT), ("trainer's NCCL", memory.NCCL)):
        held = ours.recv()
        now = used()
        rows[row] = (now - before - held, estimate)
        before = now - held
        ours.send(None)
    child.join()
    return rows


def _grow(pipe: Connection) -> None:
    """Take what a rank takes, and say each time what torch holds of it."""
    import torch
    import torch.distributed as dist

    matrix = torch.zeros(1024, 1024, dtype=torch.bfloat16, device="cuda")
    (matrix @ matrix).float().softmax(-1).sum().item()
    pipe.send(torch.cuda.memory_reserved())
    pipe.recv()
    with tempfile.TemporaryDirectory() as work:
        meeting = f"file://{work}/meet"
        dist.init_process_group("nccl", init_method=meeting, rank=0, world_size=1)
        dist.all_reduce(matrix)
        torch.cuda.synchronize()
        pipe.send(torch.cuda.memory_reserved())
        pipe.recv()
        dist.destroy_process_group()


def trainer_rows(options: argparse.Namespace, recompute: bool, work: Path) -> Rows:
    """Measure two steps and the loading of a checkpoint, by the peaks of torch's allocator."""
    import torch

    from benchmarks.alone import alone, made_up, recipe
    from qurl_megatron.actor.policy import Policy
    from qurl_megatron.observe.metrics import Timer
    from qurl_megatron.training import checkpoint
    from qurl_megatron.training.state import TrainState
    from qurl_megatron.training.step import improve

    model = work / "model"
    if not model.exists():
        model = model_folder(options.model, work, empty=False)
    config = recipe(model, options.tokens, recompute=recompute)
    (stage,) = footprint(config).stages
    run_dir = work / f"run-{recompute}"

    @contextmanager
    def peak(row: str, predicted: int):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        stats = torch.cuda.memory_stats()
        rows[f"{row}, {kind}"] = (stats["allocated_bytes.all.peak"] - before, predicted)
        gaps.append(stats["reserved_bytes.all.peak"] - stats["allocated_bytes.all.peak"])

    rows: Rows = {}
    gaps: list[int] = []
    kind = f"{options.tokens} tokens, {'recomputed' if recompute else 'kept'}"
    with alone(work / f"meet-{recompute}") as ranks:
        policy = Policy.build(config.model, config.parallel, config.optimizer, ranks)
        rows["trainer at rest"] = (torch.cuda.memory_allocated(), stage.at_rest)
        samples = made_up(config, policy.arch.vocab)
        for step in (1, 2):
            with peak("train", stage.total - stage.at_rest):
                improve(policy, samples, config, step=step, timer=Timer())
        saved = checkpoint.save(run_dir, policy, TrainState(step=2), keep=1)
        with peak("resume", stage.loading):
            checkpoint.load(saved, policy)
    rows[f"gaps, {kind}"] = (max(gaps), round(memory.GAPS * stage.total))
    return rows


def engine_rows(options: argparse.Namespace, work: Path) -> Rows:
    """Measure the memory of an engine with a version, beside its weights and its cache."""
    import torch

    folder = model_folder(options.engine_model, work, empty=True)
    arch = read_arch(config_of(options.engine_model))
    config = RolloutConfig(backend="sglang", sglang_python=options.sglang_python)
    scheme = QuantConfig().scheme
    version = Version(folder, scheme, "bfloat16", work / "version")
    before = used() - torch.cuda.memory_reserved()
    progress(f"starting an engine with {options.engine_model}")
    with started(config, folder, version, work / "logs") as engine:
        after = used() - torch.cuda.memory_reserved()
        tokens = engine.client.server_info()["max_total_num_tokens"]
    known = memory.engine_weights(arch, scheme, 1, 2) + tokens * memory.cached_token(arch, 1, 2)
    return {
        "engine beside weights and cache": (
            after - before - known,
            memory.CONTEXT + memory.NCCL + memory.ENGINE_RUNTIME,
        )
    }


def case_of(row: str, measured: float, predicted: float, options: argparse.Namespace) -> Case:
    """Return the case of one row of the dry run."""
    return Case(
        name=row,
        keys={"model": options.model, "row": row, "tokens": options.tokens},
        figures=[
            Figure(name="measured", unit="GiB", better="lower", repeats=[measured / GIB]),
            Figure(name="dry run", unit="GiB", better=None, repeats=[predicted / GIB]),
        ],
    )


if __name__ == "__main__":
    sys.exit(record_of("memory", parser().parse_args(), run))
