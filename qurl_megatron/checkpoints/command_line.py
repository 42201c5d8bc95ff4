"""Shared parts of the checkpoint commands: options, mistakes, dry runs, progress, the summary."""

import argparse
import hashlib
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qurl_megatron.config.arguments import Parser, parse
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.text import byte_size

if TYPE_CHECKING:
    import torch

    from qurl_megatron.checkpoints.job import ConversionJob
    from qurl_megatron.checkpoints.workers import Workers

DTYPES = ("bfloat16", "float32", "float16")


def parser(description: str, example: str) -> Parser:
    """A parser whose --help ends with an example to copy."""
    return Parser(
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_job_options(parser: argparse.ArgumentParser, *, file_gb: float) -> None:
    """The options every converter has."""
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
    parser.add_argument(
        "--no-checksums",
        dest="checksums",
        action="store_false",
        help="leave SHA-256 sums out of the manifest: faster, but nothing can be verified later",
    )


def add_folder_options(parser: argparse.ArgumentParser, *, auto: str) -> None:
    """The options of those that write a Hugging Face folder.

    Args:
        auto: what --dtype auto means.
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
    """Plan a job and run it, alone or with the ranks a launcher started."""
    from qurl_megatron.checkpoints.job import is_done, run
    from qurl_megatron.checkpoints.workers import AnotherFailed, workers

    started = time.monotonic()
    with workers(Path(arguments.out)) as ranks:
        try:
            with ranks.together():
                job = make()
            if arguments.dry_run:
                if ranks.leads:
                    done = is_done(job, checksums=arguments.checksums)
                    print(f"{job.out} is there already" if done else preview(job, ranks.size))
                return 0
            with _progress(job, ranks):
                written = run(
                    job, workers=ranks, restart=arguments.restart, checksums=arguments.checksums
                )
        except AnotherFailed:
            return 2  # that one says why
        if ranks.leads:
            seconds = time.monotonic() - started
            print(summary(job, seconds) if written else f"{job.out} is there already, unchanged")
    return 0


def file_bytes(gigabytes: float) -> int:
    """--file-gb as bytes."""
    if not 0 < gigabytes < math.inf:
        raise ConfigError(f"--file-gb must be positive, got {gigabytes}")
    return int(gigabytes * 1e9)


def torch_dtype(name: str) -> "torch.dtype | None":
    """--dtype as torch's; None for "auto"."""
    import torch

    return None if name == "auto" else getattr(torch, name)


def preview(job: "ConversionJob", workers: int) -> str:
    """What a job would write, whether it fits, and about how long it takes."""
    existing = next(path for path in (job.out, *job.out.absolute().parents) if path.exists())
    rate = _hash_rate() * workers
    free = shutil.disk_usage(existing).free
    lines = [f"would write {job.out}: {byte_size(job.bytes)} in {len(job.files)} files"]
    lines += [f"  {file.name}  {byte_size(file.bytes)}" for file in job.files]
    lines += [
        f"free on that disk: {byte_size(free)}"
        + ("" if free > job.bytes else ", which is too little"),
        f"about {job.bytes / rate:.0f} s, at the {byte_size(rate)}/s at which this machine hashes",
    ]
    return "\n".join(lines)


def summary(job: "ConversionJob", seconds: float) -> str:
    """One line for what was done."""
    return (
        f"wrote {job.out}: {byte_size(job.bytes)} in {len(job.files)} files, {seconds:.1f} s "
        f"({byte_size(job.bytes / seconds)}/s)"
    )


def _hash_rate() -> float:
    """Bytes per second of SHA-256, the slowest part of a conversion where no unit does it."""
    data = bytes(16 << 20)
    start = time.perf_counter()
    hashlib.sha256(data)
    return len(data) / (time.perf_counter() - start)


@contextmanager
def _progress(job: "ConversionJob", ranks: "Workers") -> Iterator[None]:
    """A bar on a terminal, fed by what all workers have put on the disk."""
    if not ranks.leads or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from qurl_megatron.checkpoints.job import bytes_on_disk

    ended = threading.Event()
    with Progress(
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(job.out.name, total=job.bytes)

        def watch() -> None:
            while not ended.wait(0.3):
                bar.update(task, completed=min(job.bytes, bytes_on_disk(job)))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
