"""Slurm's programs as small shell scripts, which note in a file how they were called."""

import os
from pathlib import Path

import pytest


class Programs:
    """``programs(name, body)`` makes one, or makes it anew; nothing else of Slurm is on PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bin, self._notes = folder / "bin", folder / "called"
        self._bin.mkdir()
        monkeypatch.setenv("PATH", f"{self._bin}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def __call__(self, name: str, body: str) -> None:
        path = self._bin / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> {self._notes}\n{body}\n')
        path.chmod(0o755)

    @property
    def called(self) -> list[str]:
        """The command lines, in their order."""
        return self._notes.read_text().splitlines() if self._notes.exists() else []
