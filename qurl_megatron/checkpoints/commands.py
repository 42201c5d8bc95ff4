"""Commands for checkpoints: ``qurl convert``, ``export``, ``quantize``, ``inspect`` and ``diff``.

torch is imported when a command runs, not for ``--help``.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qurl_megatron.observe.text import byte_size
from qurl_megatron.schemes import EXPORTED

if TYPE_CHECKING:
    from qurl_megatron.checkpoints.job import ConversionJob


def add_convert_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--hf", type=Path, required=True, help="Hugging Face folder, safetensors")
    command.add_argument(
        "--uaq-scale",
        type=float,
        default=1.0,
        help="update-aware factor s to fold in: norms * s, what reads them / s (default 1: none)",
    )
    command.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="auto loses nothing: the source's format, or float32 where s is no power of two "
        "(W/1.5 rounded to bfloat16 moves about 5 %% of the INT8 codes)",
    )
    command.add_argument(
        "--tensor", type=int, default=1, help="tensor-parallel size to cut for (default 1)"
    )
    add_out_option(command)


def convert(arguments: argparse.Namespace) -> int:
    """Convert a Hugging Face checkpoint into a Megatron one, folding UAQ on the way."""
    from qurl_megatron.checkpoints.to_megatron import to_megatron

    settings = {"uaq_scale": arguments.uaq_scale, "tensor": arguments.tensor}
    return run_job(to_megatron, arguments, arguments.hf, **settings)


def add_export_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--ckpt",
        type=Path,
        required=True,
        help="checkpoint or run directory; a Hugging Face folder, too, to unfold or round it",
    )
    command.add_argument(
        "--unfold-uaq",
        action="store_true",
        help="take the UAQ factor out again; else the weights stay folded and config.json says so",
    )
    add_folder_options(
        command,
        auto="auto: the format the model came in, or the stored one where a factor stays folded",
    )


def export(arguments: argparse.Namespace) -> int:
    """Convert a checkpoint of Megatron or of a run into a Hugging Face one."""
    from qurl_megatron.checkpoints.to_huggingface import to_huggingface

    source = arguments.ckpt, arguments.hf
    return run_job(to_huggingface, arguments, *source, unfold=arguments.unfold_uaq)


def add_quantize_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", type=Path, required=True, help="checkpoint of either kind")
    command.add_argument("--scheme", choices=EXPORTED, required=True)
    command.add_argument(
        "--backend",
        choices=("native", "modelopt", "te"),
        default="native",
        help="whose arithmetic: ours, ModelOpt's (same bits), Transformer Engine's (fp8_block on a "
        "GPU)",
    )
    command.add_argument(
        "--uaq-scale", type=float, default=1.0, help="update-aware factor s to fold in first"
    )
    add_folder_options(
        command, auto="format of what is not quantized; auto is the one the model came in"
    )


def quantize(arguments: argparse.Namespace) -> int:
    """Quantize a checkpoint into a W8A8 folder that engines load."""
    from qurl_megatron.checkpoints.to_huggingface import to_quantized

    settings = {name: vars(arguments)[name] for name in ("scheme", "backend", "uaq_scale")}
    return run_job(to_quantized, arguments, arguments.model, arguments.hf, **settings)


def add_inspect_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("dir", type=Path, help="checkpoint of any kind, or a run directory")
    command.add_argument(
        "--hf", type=Path, help="folder with config.json, if a Megatron checkpoint has none"
    )
    command.add_argument("--verify", action="store_true", help="hash every file; exits 1 if wrong")


def inspect_checkpoint(arguments: argparse.Namespace) -> int:
    """Describe a checkpoint from its headers alone; --verify hashes every file."""
    from qurl_megatron.checkpoints.inspect import inspect
    from qurl_megatron.checkpoints.integrity import all_damage
    from qurl_megatron.checkpoints.source import open_checkpoint

    checkpoint = open_checkpoint(arguments.dir, arguments.hf, quantized=True)
    print(inspect(checkpoint))
    if not arguments.verify:
        return 0
    wrong = all_damage(checkpoint.folder)
    print("\n".join(wrong) or "  verified    every file is what was written")
    return int(bool(wrong))


def add_diff_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("a", type=Path, help="a checkpoint")
    command.add_argument("b", type=Path, help="the one to compare with it")
    command.add_argument(
        "--tol", type=float, default=0.0, help="largest ||b-a||/||a|| that is no difference"
    )


def diff(arguments: argparse.Namespace) -> int:
    """Compare two checkpoints of any kinds, tensor by tensor; exits 1 where they differ."""
    from qurl_megatron.checkpoints.diff import differences, row
    from qurl_megatron.checkpoints.source import open_checkpoint

    a, b = (open_checkpoint(folder, quantized=True) for folder in (arguments.a, arguments.b))
    if a.uaq_scale != b.uaq_scale:
        print(f"A has s = {a.uaq_scale:g} folded in, B {b.uaq_scale:g}: compared without")
    compared = []
    beyond = 0
    for difference in differences(a, b):
        compared.append(difference)
        if difference.beyond(arguments.tol):
            beyond += 1
            print(row(difference))
    worst = row(max(compared, key=lambda difference: difference.relative))
    print(f"{len(compared)} tensors, {beyond} differ beyond {arguments.tol:g}; furthest: {worst}")
    return int(beyond > 0)


DTYPES = ("bfloat16", "float32", "float16")


def add_out_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")


def add_folder_options(command: argparse.ArgumentParser, *, auto: str) -> None:
    """Add the options of commands that write a Hugging Face folder.

    Args:
        auto: help for --dtype auto.
    """
    command.add_argument(
        "--hf", type=Path, help="folder with config.json and tokenizer, if the checkpoint has none"
    )
    command.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help=auto)
    add_out_option(command)


def run_job(
    make: Callable[..., "ConversionJob"], arguments: argparse.Namespace, *source: Path, **settings
) -> int:
    """Run a job on ``open_checkpoint(*source)``, with a bar on a terminal; print a summary."""
    from rich.console import Console
    from rich.progress import track

    from qurl_megatron.checkpoints.job import run
    from qurl_megatron.checkpoints.source import DTYPES_BY_NAME, open_checkpoint

    dtype = DTYPES_BY_NAME.get(arguments.dtype)
    job = make(open_checkpoint(*source), arguments.out.absolute(), dtype=dtype, **settings)
    started = time.monotonic()
    errors = Console(stderr=True)
    hidden = not errors.is_terminal
    bar = partial(track, description=job.out.name, console=errors, transient=True, disable=hidden)
    # A batch system ends a job by this signal; a clean exit removes the unfinished folder.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        run(job, watch=bar)
    finally:
        signal.signal(signal.SIGTERM, before)
    seconds = time.monotonic() - started
    print(
        f"wrote {job.out}: {byte_size(job.bytes)} in {len(job.files)} files, {seconds:.1f} s "
        f"({byte_size(job.bytes / seconds)}/s)"
    )
    return 0
