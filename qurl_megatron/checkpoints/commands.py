"""Commands for checkpoints: convert, export, quantize, inspect and diff.

Each is ``qurl NAME`` and a script in checkpoints_tools/; options and bodies stand here once. torch
is imported when a command runs, not for ``--help``.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qurl_megatron.config.arguments import Parser, parse
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import free
from qurl_megatron.observe.text import byte_size
from qurl_megatron.schemes import EXPORTED

if TYPE_CHECKING:
    import torch

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
    command.add_argument(
        "--pipeline", type=int, default=1, help="stages that get files of their own (default 1)"
    )
    add_job_options(command, file_gb=0.25)


def convert(arguments: argparse.Namespace) -> int:
    """Convert a Hugging Face checkpoint into a Megatron one, folding UAQ on the way."""
    from qurl_megatron.checkpoints import open_checkpoint
    from qurl_megatron.checkpoints.to_megatron import to_megatron

    return run_job(
        lambda: to_megatron(
            open_checkpoint(arguments.hf),
            arguments.out.absolute(),
            uaq_scale=arguments.uaq_scale,
            dtype=torch_dtype(arguments.dtype),
            tensor=arguments.tensor,
            pipeline=arguments.pipeline,
            file_bytes=file_bytes(arguments.file_gb),
        ),
        arguments,
    )


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
    from qurl_megatron.checkpoints import open_checkpoint
    from qurl_megatron.checkpoints.to_huggingface import to_huggingface

    return run_job(
        lambda: to_huggingface(
            open_checkpoint(arguments.ckpt, arguments.hf),
            arguments.out.absolute(),
            unfold=arguments.unfold_uaq,
            dtype=torch_dtype(arguments.dtype),
            file_bytes=file_bytes(arguments.file_gb),
        ),
        arguments,
    )


def add_quantize_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", type=Path, required=True, help="checkpoint of either kind")
    command.add_argument("--scheme", choices=EXPORTED, required=True)
    command.add_argument(
        "--format",
        dest="fmt",
        choices=("compressed-tensors", "sglang", "modelopt"),
        default="compressed-tensors",
        help="layout of the folder (default %(default)s)",
    )
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
    from qurl_megatron.checkpoints import open_checkpoint
    from qurl_megatron.checkpoints.to_huggingface import to_quantized

    return run_job(
        lambda: to_quantized(
            open_checkpoint(arguments.model, arguments.hf),
            arguments.out.absolute(),
            scheme=arguments.scheme,
            fmt=arguments.fmt,
            backend=arguments.backend,
            uaq_scale=arguments.uaq_scale,
            dtype=torch_dtype(arguments.dtype),
            file_bytes=file_bytes(arguments.file_gb),
        ),
        arguments,
    )


def add_inspect_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("dir", type=Path, help="checkpoint of any kind, or a run directory")
    command.add_argument(
        "--hf", type=Path, help="folder with config.json, if a Megatron checkpoint has none"
    )
    command.add_argument("--verify", action="store_true", help="hash every file; exits 1 if wrong")
    command.add_argument("--json", action="store_true", help="print the facts as JSON")
    command.add_argument("--tensors", action="store_true", help="list every tensor")


def inspect_checkpoint(arguments: argparse.Namespace) -> int:
    """Describe a checkpoint from its headers alone; --verify hashes every file."""
    from qurl_megatron.checkpoints.inspect import inspect, open_any, tensor_rows, text
    from qurl_megatron.checkpoints.job import verify

    checkpoint = open_any(arguments.dir, arguments.hf)
    facts = inspect(checkpoint)
    wrong = verify(checkpoint.folder) if arguments.verify else []
    if arguments.json:
        print(json.dumps({**facts, "wrong": wrong} if arguments.verify else facts, indent=1))
        return 1 if wrong else 0
    print(text(facts))
    if arguments.tensors:
        print("\n".join(tensor_rows(checkpoint)))
    if arguments.verify:
        print("\n".join(wrong) or "  verified    every file is what was written")
    return 1 if wrong else 0


def add_diff_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("a", type=Path, help="a checkpoint")
    command.add_argument("b", type=Path, help="the one to compare with it")
    command.add_argument(
        "--tol", type=float, default=0.0, help="largest ||b-a||/||a|| that is no difference"
    )
    command.add_argument("--as-stored", action="store_true", help="do not unfold UAQ factors")
    command.add_argument("--all", action="store_true", help="list the tensors that agree, too")
    command.add_argument("--hf-a", type=Path, help="folder with config.json for A")
    command.add_argument("--hf-b", type=Path, help="folder with config.json for B")


def diff(arguments: argparse.Namespace) -> int:
    """Compare two checkpoints of any kinds, tensor by tensor; exits 1 where they differ."""
    from qurl_megatron.checkpoints.diff import differences, row
    from qurl_megatron.checkpoints.inspect import open_any

    a = open_any(arguments.a, arguments.hf_a)
    b = open_any(arguments.b, arguments.hf_b)
    if a.uaq_scale != b.uaq_scale and not arguments.as_stored:
        print(f"A has s = {a.uaq_scale:g} folded in, B {b.uaq_scale:g}: compared without")
    count = beyond = 0
    worst = ""
    furthest = -1.0
    for difference in differences(a, b, as_stored=arguments.as_stored):
        count += 1
        far = difference.beyond(arguments.tol)
        beyond += far
        if far or arguments.all:
            print(row(difference))
        if difference.relative > furthest:
            furthest, worst = difference.relative, row(difference)
    print(f"{count} tensors, {beyond} differ beyond {arguments.tol:g}; furthest: {worst}")
    return 1 if beyond else 0


DTYPES = ("bfloat16", "float32", "float16")


def parser(description: str, example: str) -> Parser:
    """Return a parser whose --help ends with an example to copy."""
    return Parser(
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_job_options(parser: argparse.ArgumentParser, *, file_gb: float) -> None:
    """Add the options that every converter has."""
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be written, and write nothing"
    )
    parser.add_argument(
        "--file-gb", type=float, default=file_gb, help="where a file is full (default %(default)s)"
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="throw away what an unfinished conversion with other options left",
    )


def add_folder_options(parser: argparse.ArgumentParser, *, auto: str) -> None:
    """Add the options of commands that write a Hugging Face folder.

    Args:
        auto: help for --dtype auto.
    """
    parser.add_argument(
        "--hf", type=Path, help="folder with config.json and tokenizer, if the checkpoint has none"
    )
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help=auto)
    add_job_options(parser, file_gb=5.0)


def run_main(
    body: Callable[[argparse.Namespace], int], command: Parser, argv: Sequence[str] | None
) -> int:
    """Run a command; a mistake is one sentence on stderr and exit code 2."""
    arguments = parse(command, argv)
    try:
        return body(arguments)
    except (ConfigError, PermissionError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has seen enough
        return 0
    except KeyboardInterrupt:
        return 130


def run_job(make: Callable[[], "ConversionJob"], arguments: argparse.Namespace) -> int:
    """Plan a job and run it, or with --dry-run describe it."""
    from qurl_megatron.checkpoints.job import is_done, run

    started = time.monotonic()
    job = make()
    if arguments.dry_run:
        print(f"{job.out} is there already" if is_done(job) else preview(job))
        return 0
    with _progress_bar(job) as progress:
        written = run(job, restart=arguments.restart, progress=progress)
    if not written:
        print(f"{job.out} is there already, unchanged")
        return 0
    seconds = time.monotonic() - started
    print(
        f"wrote {job.out}: {byte_size(job.bytes)} in {len(job.files)} files, {seconds:.1f} s "
        f"({byte_size(job.bytes / seconds)}/s)"
    )
    return 0


def file_bytes(gigabytes: float) -> int:
    """Return --file-gb in bytes."""
    if not 0 < gigabytes < math.inf:
        raise ConfigError(f"--file-gb must be positive, got {gigabytes}")
    return int(gigabytes * 1e9)


def torch_dtype(name: str) -> "torch.dtype | None":
    """Return --dtype as torch has it; None for "auto"."""
    import torch

    return None if name == "auto" else getattr(torch, name)


def preview(job: "ConversionJob") -> str:
    """Describe the files a job would write, and whether they fit."""
    free_bytes = free(job.out)
    lines = [f"would write {job.out}: {byte_size(job.bytes)} in {len(job.files)} files"]
    lines += [f"  {file.name}  {byte_size(file.bytes)}" for file in job.files]
    lines.append(f"free on that disk: {byte_size(free_bytes)}")
    if free_bytes < job.bytes:
        lines[-1] += ", which is too little"
    return "\n".join(lines)


@contextmanager
def _progress_bar(job: "ConversionJob") -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the bytes written so far; it draws a bar on a terminal."""
    if not sys.stderr.isatty():
        yield lambda done_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(job.out.name, total=job.bytes)
        yield lambda done_bytes: bar.update(task, completed=done_bytes)
