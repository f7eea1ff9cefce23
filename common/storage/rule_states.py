"""A rule's states on disk: one folder per state, complete or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from common.host.files import PARTIAL, sync, writing

FACTS: Final = "facts.json"


def write(folder: Path, name: str, save: Callable[[Path], Mapping[str, object]]) -> None:
    """Call `save` with a new folder, add the facts it returns, and rename the folder to `name` when it is complete.

    A power loss leaves it complete or absent, too. Raises StorageFailed.
    """
    partial = folder / f"{name}{PARTIAL}"
    with writing(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        facts = save(partial)
        (partial / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        for path in (*partial.rglob("*"), partial):
            sync(path)
        shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(partial, folder / name)
        sync(folder)


def read(state: Path, restore: Callable[[Path, Mapping[str, object]], None]) -> None:
    """Call `restore` with a state's folder and facts."""
    restore(state, json.loads((state / FACTS).read_text(encoding="utf-8")))


def prune(folder: Path, *, keep: int) -> None:
    """Remove all states but the last `keep`, by name."""
    for old in sorted(_whole(folder))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def _whole(folder: Path) -> list[Path]:
    return [facts.parent for facts in folder.glob(f"*/{FACTS}") if facts.parent.suffix != PARTIAL]
