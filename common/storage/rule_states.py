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


def latest(folder: Path, name: str) -> Path | None:
    """Return the last state, by name, that is not beyond this name; None where there is none."""
    return max((path for path in _whole(folder) if path.name <= name), default=None)


def read(state: Path, restore: Callable[[Path, Mapping[str, object]], None]) -> None:
    """Hand a state's folder and facts to `restore`."""
    restore(state, json.loads((state / FACTS).read_text(encoding="utf-8")))


def prune(folder: Path, *, keep: int) -> None:
    """Remove all states but the last, by name."""
    for old in sorted(_whole(folder))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def _whole(folder: Path) -> list[Path]:
    return [facts.parent for facts in folder.glob(f"*/{FACTS}") if facts.parent.suffix != ".partial"]
