"""Compile the emulated device for the installed torch; run this file, about a minute, once.

The binary's name carries the torch version and a digest of the sources, so that a stale one is
never loaded; it is made aside and renamed, so that two builds at once cannot harm each other.
Exit code 2 and one sentence where it cannot be built.
"""

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAME = "_emulated_cuda"
ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc"
CACHE = Path(os.environ.get("EMULATED_CUDA_BUILD") or ROOT / "build")


class CannotBuild(Exception):
    """One sentence that says what is missing."""


def torch_version() -> str:
    """Of the installed torch, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise CannotBuild("the emulated CUDA device needs torch, which is not installed") from None


def library() -> Path:
    """Where the binary for this torch and these sources is, or would be."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + source.read_bytes())
    name = f"{NAME}-torch{torch_version()}-{digest.hexdigest()[:12]}"
    return CACHE / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def build(jobs: int = 2) -> Path:
    """The binary, compiled where it is not there yet."""
    made = library()
    if made.exists():
        return made
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CannotBuild("the emulated CUDA device is compiled with g++, which is not installed")
    root = _torch_of_the_cpu()
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        # The slowest first, so that the last process does not work alone.
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(lambda one: _compile(compiler, root, one, scratch), sources))
        aside = Path(scratch) / made.name
        libraries = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", f"-Wl,-rpath,{root}/lib")
        _run(
            [compiler, "-shared", "-o", str(aside), *map(str, objects)]
            + [f"-L{root}/lib", "-Wl,--no-as-needed", *libraries]
        )
        os.replace(aside, made)  # a process that has the old one mapped keeps it
    for old in CACHE.glob(f"{NAME}-*"):
        if old != made and old.name.startswith(f"{NAME}-torch{torch_version()}-"):
            old.unlink(missing_ok=True)
    return made


def _compile(compiler: str, root: Path, source: Path, scratch: str) -> Path:
    made = Path(scratch) / f"{source.stem}.o"
    flags = [
        *("-O2", "-g0", "-fPIC", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wno-unused"),
        *(f"-DTORCH_EXTENSION_NAME={NAME}", "-DTORCH_API_INCLUDE_EXTENSION_H"),
        f"-I{root}/include",
        f"-I{root}/include/torch/csrc/api/include",
        f"-I{sysconfig.get_paths()['include']}",
    ]
    _run([compiler, *flags, "-c", str(source), "-o", str(made)])
    return made


def _torch_of_the_cpu() -> Path:
    import torch

    if torch.version.cuda or torch.version.hip:
        raise CannotBuild(
            f"the emulated CUDA device needs the CPU build of torch, and {torch.__version__} is not"
        )
    return Path(torch.__file__).parent


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CannotBuild(f"the emulated CUDA device does not compile:\n{done.stderr[-6000:]}")


if __name__ == "__main__":
    os.environ.pop("EMULATED_CUDA_DEVICES", None)
    try:
        print(build())
    except CannotBuild as error:
        print(error, file=sys.stderr)
        sys.exit(2)
