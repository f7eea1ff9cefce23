"""A rule's state on disk: a folder for each, which is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

FACTS: Final = "facts.json"


def write(folder: Path, name: str, save: Callable[[Path], Mapping[str, object]]) -> None:
    """Let `save` write into a fresh folder, which takes this name when all is there, with the facts it returns."""
    partial = folder / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    facts = save(partial)
    (partial / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    shutil.rmtree(folder / name, ignore_errors=True)
    os.replace(partial, folder / name)


def exists(folder: Path, name: str) -> bool:
    """Return whether a state of this name is there."""
    return (folder / name / FACTS).is_file()


def read(folder: Path, name: str, restore: Callable[[Path, Mapping[str, object]], None]) -> None:
    """Hand a state's folder and facts to `restore`."""
    restore(folder / name, json.loads((folder / name / FACTS).read_text(encoding="utf-8")))


def prune(folder: Path, *, keep: int) -> None:
    """Remove all states but the last, by name."""
    whole = sorted(path for path in folder.iterdir() if path.is_dir() and path.suffix != ".partial")
    for old in whole[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
