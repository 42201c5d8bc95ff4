"""The compiler with which SGLang and FlashInfer build kernels on a node, at their first use.

``python -P -m qurl_megatron.engines.sglang.compiling`` builds one in the same way. If that fails,
it prints a sentence and exits with 1.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

KERNEL = """\
#include <cuda/std/cstdint>  // refuses headers of another release than the compiler's
#if CUDART_VERSION / 1000 != TORCH
#error "torch is built for another CUDA"
#endif
__global__ void set(int *at) { *at = 1; }
void run(int *at) { set<<<1, 1>>>(at); }
"""
BUILD = """\
"$CUDA/bin/nvcc" "-DTORCH=$TORCH" -Xcompiler -fPIC -c kernel.cu -o kernel.o &&
${CXX:-c++} -shared kernel.o -o kernel.so "-L$CUDA/lib64" "-L$CUDA/lib64/stubs" -lcudart -lcuda
"""


def use_cuda_of_pip() -> None:
    """Set ``CUDA_HOME`` to the compiler that pip installed in this environment, unless it is set.

    pip installs the runtime only as lib/libcudart.so.13, and SGLang links lib64/libcudart.so.
    """
    cuda = Path(sysconfig.get_path("purelib"), "nvidia/cu13")
    if {"CUDA_HOME", "CUDA_PATH"} & {*os.environ} or not (cuda / "bin/nvcc").is_file():
        return
    kernels = os.environ.get("SGLANG_JIT_CACHE_DIR") or "~/.cache/sglang/jit"  # as SGLang
    links = Path(kernels).expanduser() / "cuda"
    scratch = links / f".{os.getpid()}"  # other engines may do the same at this moment
    try:
        links.mkdir(parents=True, exist_ok=True)
        scratch.unlink(missing_ok=True)  # left by a killed process with the same id
        scratch.symlink_to(cuda / "lib/libcudart.so.13")
        scratch.replace(links / "libcudart.so")
    except OSError:  # a read-only cache with all kernels in it needs no compiler
        return
    # In a container, LD_LIBRARY_PATH alone may lead to libcuda.so.
    inherited = [os.environ.get(name) for name in ("LIBRARY_PATH", "LD_LIBRARY_PATH")]
    searched = [str(links), str(cuda / "lib"), *filter(None, inherited)]
    os.environ.update(CUDA_HOME=str(cuda), LIBRARY_PATH=":".join(searched))


def fault(torch_cuda: str) -> str | None:
    """Return why no kernel can be built here; None if one was.

    Args:
        torch_cuda: CUDA release that torch is built for, such as "13.0".
    """
    use_cuda_of_pip()
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"  # as SGLang looks for it
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or Path(nvcc).parents[1]
    env = {**os.environ, "CUDA": str(home), "TORCH": torch_cuda.partition(".")[0]}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.cu").write_text(KERNEL)
        command = ["sh", "-c", BUILD]
        process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if not process.returncode:
        return None
    lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
    reason = next((line for line in lines if "error" in line or "cannot find" in line), lines[-1])
    mend = (
        f"install cuda-toolkit[nvcc,cccl,crt] {torch_cuda} in its environment and unset "
        "CUDA_HOME, or set it to a whole toolkit of that release"
    )
    if re.search(r"-lcuda\b", reason):  # the driver's, which no toolkit has
        mend = "link libcuda.so to the driver's libcuda.so.1 in a folder of LIBRARY_PATH"
    return f"SGLang cannot compile kernels with CUDA_HOME={home} ({reason}); {mend}"


if __name__ == "__main__":
    import torch

    if reason := fault(torch.version.cuda or ""):
        sys.exit(reason)
