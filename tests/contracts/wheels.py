"""Which releases are read, and how they come here: ``python -m tests.contracts.wheels``.

Wheels are downloaded, never installed or imported: some need CUDA, some another Python.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".contracts"


@dataclass(frozen=True)
class Release:
    package: str
    version: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.package} {self.version}"

    def wheel(self, folder: Path = FOLDER) -> Path | None:
        name = f"{self.package.replace('-', '_')}-{self.version}-"
        return next(folder.glob(f"{name}*.whl"), None)


# Wheels for a Python that need not be ours.
_LINUX = tuple(
    part
    for tag in ("manylinux_2_34", "manylinux_2_28", "manylinux_2_24", "manylinux2014")
    for part in ("--platform", f"{tag}_x86_64")
)
_312 = ("--only-binary=:all:", "--python-version=3.12", *_LINUX)

RELEASES = (
    Release("megatron-core", "0.16.1"),
    Release("megatron-core", "0.17.1", _312),
    Release("megatron-core", "0.18.0", _312),
    Release("megatron-core", "0.19.0", _312),
    Release("transformer-engine", "2.11.0"),
    Release("transformer-engine", "2.20.2"),
    Release("sglang", "0.5.23", _312),
    Release("nvidia-modelopt", "0.47.0"),
)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for release in RELEASES:
        if release.wheel() is None:
            what = f"{release.package}=={release.version}"
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--disable-pip-version-check", "--dest", str(FOLDER), *release.options]
            subprocess.run([*command, what], check=True)
        print(f"{release}: {release.wheel().name}")


if __name__ == "__main__":
    main()
