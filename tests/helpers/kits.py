"""Wheels for kits, which need no build."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

from docs.tools.locked import FOLDER


def wheel_in(folder: Path, *, version: str = "0.1.0", locked: bool = True) -> Path:
    """Return a wheel of fedstrata that has nothing but its exact versions."""
    path = folder / f"fedstrata-{version}-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    with ZipFile(path, "w") as archive:
        archive.writestr("fedstrata/__init__.py", "")
        for file in FOLDER.iterdir() if locked else ():
            archive.writestr(f"fedstrata/deploy/locked/{file.name}", file.read_bytes())
    return path
