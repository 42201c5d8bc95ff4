#!/bin/bash
# Install QuRL's two environments, trainer and engines, on a bare system or on a CUDA 13.0
# development image: Debian 12 or Ubuntu 24.04, as root, without a GPU. The steps of docs/gpu.md, on
# the pins in requirements/, and the caches that can be filled before there is a GPU.
#
#     install.sh [CHECKOUT [TARGET]]     # the checkout that it lies in; /opt/qurl
#
# TARGET gets two virtual environments, trainer and sglang, with this package in both; CHECKOUT is
# not needed afterwards.
#
# MAX_JOBS    compilers at a time (as many as processors), each 2 to 4 GB of memory
# GPU_ARCHS   GPUs that kernels are compiled for: 8.0 (A100), 9.0a (H100, H200), 10.0a (B200)
#
# pip's own variables and files work as ever. PIP_FIND_LINKS may name a folder with a wheel of
# transformer-engine-torch that was built before for this torch and Python: it saves 13 minutes.
set -euo pipefail
checkout=$(realpath "${1:-$(dirname "$0")/../..}")
target=${2:-/opt/qurl}
export DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
export MAX_JOBS=${MAX_JOBS:-$(nproc)}
archs=${GPU_ARCHS:-8.0 9.0a 10.0a}
# What a Dockerfile's or a site's environment forbids would be missed at every start.
unset PYTHONDONTWRITEBYTECODE

say() { echo "== $(date +%H:%M:%S) $*"; }

say "system packages"
apt-get update -qq
# A compiler and Python's headers: Transformer Engine, Triton and SGLang compile, the latter two on
# the nodes. NCCL opens libibverbs by name where there is InfiniBand, SGLang's kernels libnuma.
apt-get install -qq --no-install-recommends \
    python3 python3-dev python3-venv g++ ca-certificates \
    rdma-core libibverbs1 ibverbs-providers librdmacm1 libnuma1
apt-get clean
rm -rf /var/lib/apt/lists/*

say "the trainer's environment"
python3 -m venv "$target/trainer"
pip=$target/trainer/bin/pip
site=$("$target/trainer/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
pins=$checkout/requirements/gpu-trainer.txt
# Transformer Engine is built against the torch that is there: torch comes first.
$pip install -q $(grep -v '^#\|^transformer-engine\|^megatron' "$pins")
say "Transformer Engine's binding to torch"
(
    export CUDA_HOME=$site/nvidia/cu13 NVTE_PYTORCH_FORCE_BUILD=TRUE
    export CPATH=$site/nvidia/cudnn/include:$site/nvidia/nccl/include
    $pip install -q --no-build-isolation -r "$pins"
)
$pip install -q --no-build-isolation "$checkout"

say "the engines' environment"
python3 -m venv "$target/sglang"
pip=$target/sglang/bin/pip
$pip install -q -r "$checkout/requirements/gpu-sglang.txt"
$pip install -q --no-deps --no-build-isolation "$checkout"

say "FlashInfer's sampling, for $archs"
# FlashInfer looks for kernels in its own package first, which may be read-only. All others are made
# on the nodes, at their first use: SGLang's and DeepGEMM's are for the shapes of a model, Triton's
# for the GPU that it finds. Their folders must be writable, which those of an image are not.
made=$(mktemp -d)
# The driver, which is not here, has the libcuda.so that they are linked to.
gcc -shared -x c /dev/null -Wl,-soname,libcuda.so.1 -o "$made/libcuda.so"
env HOME="$made" FLASHINFER_WORKSPACE_BASE="$made" FLASHINFER_CUDA_ARCH_LIST="$archs" \
    LIBRARY_PATH="$made" PATH="$target/sglang/bin:$PATH" python -P - << 'END'
import shutil

from qurl_megatron.engines.sglang.compiling import use_cuda_of_pip

use_cuda_of_pip()
from flashinfer.jit.sampling import gen_sampling_module

kernels = gen_sampling_module()
ready = kernels.aot_path
kernels.build(verbose=False)
ready.parent.mkdir(parents=True)
shutil.copy(kernels.jit_library_path, ready)
END
rm -r "$made"

say "bytecode"
# Nodes mount the image read-only: what is not compiled here is compiled at each start. Some files
# of the packages are templates, not Python.
for name in trainer sglang; do
    "$target/$name/bin/python" -m compileall -q -j 0 "$target/$name/lib" > /dev/null 2>&1 || true
done

say "done: $(du -sh "$target" | cut -f1) in $target"
