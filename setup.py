"""Package metadata; the pinned environments are in requirements/."""

import re
import shutil
import zlib
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "(.+)"', (HERE / "qurl_megatron/__init__.py").read_text()
).group(1)

DECODE = "qurl_megatron/engines/embedded/decode.cpp"
# Plain C++ behind ctypes, so that no version of torch or Python is compiled in. Optional: without
# a compiler, or for another processor, the embedded engine computes the same with torch.
NATIVE = Extension(
    "qurl_megatron.engines.embedded._decode",
    [DECODE],
    optional=True,
    # native.py loads it only if it was built from the source that lies beside it.
    define_macros=[("QURL_SOURCE", f"{zlib.crc32((HERE / DECODE).read_bytes())}u")],
    # native.INSTRUCTIONS has the same list. No contraction: codes are to equal torch's bit by bit.
    extra_compile_args=[
        *("-std=c++17", "-O3", "-fopenmp", "-ffp-contract=off"),
        *("-fno-math-errno", "-fno-trapping-math", "-mprefer-vector-width=512", "-mfma"),
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
    ],
    extra_link_args=["-fopenmp"],
)


class BuildWithShipped(build_py):
    """Put recipes, model shapes and cluster files into the wheel; kit/shipped.py finds them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a checkout has them beside the package
            for folder in ("launch", "slurm"):
                target = Path(self.build_lib) / "qurl_megatron/shipped" / folder
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(HERE / folder, target, ignore=shutil.ignore_patterns("__pycache__"))


setup(
    name="qurl-megatron",
    version=VERSION,
    description=(
        "Reinforcement learning of LLMs with quantized rollouts, on Megatron-Core and SGLang"
    ),
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["qurl_megatron", "qurl_megatron.*"]),
    package_data={
        "qurl_megatron": [*("observe/*.html", "observe/*.css", "engines/embedded/*.cpp")]
    },
    ext_modules=[NATIVE],
    cmdclass={"build_py": BuildWithShipped},
    install_requires=[
        "aiohttp<4",
        "jinja2",
        "math-verify",
        "matplotlib",
        # 0.16 is the newest for Python 3.11; 0.17 and later want Python 3.12.
        "megatron-core>=0.16,<0.20",
        "msgspec<1",
        "numpy<3",
        "orjson",
        "psutil",  # dist_checkpointing hangs without it
        "pyarrow",
        "pydantic<3",
        "reasoning-gym",
        "rich",
        "safetensors",
        "scipy",
        "starlette<2",
        "tensorboard",
        "tokenizers",
        "torch>=2.6,<2.15",  # 2.14 is the newest that this has been built against
        "transformers>=4.51,<6",
        "uvicorn",
        "xxhash",
    ],
    extras_require={
        # Needs a machine with CUDA: the bare wheel breaks `import megatron.core` elsewhere. Its
        # binding to torch is built on the spot, so torch first and then --no-build-isolation; pip
        # would build it against the newest torch otherwise. requirements/gpu-trainer.txt has all.
        "gpu": [
            "nvidia-ml-py",  # without it `qurl slurm` cannot examine GPUs before models load
            'transformer-engine[core-cu13,pytorch]==2.11.0; python_version < "3.12"',
            'transformer-engine[core-cu13,pytorch]==2.20.2; python_version >= "3.12"',
        ],
        "sglang": ["sglang>=0.5"],
        # ModelOpt's data helpers import requests, which it does not ask for.
        "modelopt": ["nvidia-modelopt>=0.47", "requests"],
        # For transformers to load what checkpoints_tools/quantize.py writes.
        "compressed-tensors": ["compressed-tensors>=0.15"],
        "dev": ["httpx", "hypothesis", "mypy", "pytest", "pytest-timeout", "pytest-xdist", "ruff"],
    },
    entry_points={
        "console_scripts": ["qurl = qurl_megatron.cli:main"],
        # SGLang calls it in each of its processes; does nothing where there is CUDA.
        "sglang.srt.plugins": [
            "qurl_cpu = qurl_megatron.engines.sglang.cpu_layers:register",
            "qurl_cache = qurl_megatron.engines.sglang.loader:register",
        ],
    },
)
