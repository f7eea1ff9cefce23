"""Disks of a test's own: small file systems in memory, which root can fill and make read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A mounted file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        """Leave no byte free."""
        with self._ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def empty(self) -> None:
        """Free what `fill` took."""
        self._ballast.unlink()

    def protect(self) -> None:
        """Make it read-only."""
        _run("mount", "-o", "remount,ro", str(self.path))


@contextmanager
def disk(path: Path, *, size: str = "1m") -> Iterator[Disk]:
    """Mount a file system for the `with` block; skip the test if that is refused."""
    path.mkdir()
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "none", str(path))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs root, who may mount")
    try:
        yield Disk(path)
    finally:
        _run("umount", "--lazy", str(path))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
