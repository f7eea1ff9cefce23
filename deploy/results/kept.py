"""A finished run as a few small text files, for a repository, and what it cost.

A kept run is a run's folder with less in it: `experiment.toml` has only the keys that differ from the defaults,
`rounds.csv` the global rounds, `events.jsonl` the run's begin and end, `manifest.json` what was run where, with the
digest of the model. So `sweep`, `report` and `compare` read it as any other run. The digest of its experiment is
computed anew when it is read: a key that gets another name, or another default, is changed in the file by whoever
changes it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cloud.results import RunFolder

CPU_S: Final = "cpu_s"  # in manifest.json
COMMIT: Final = "commit"  # in manifest.json
SOURCE: Final = Path(__file__).parents[2]


@contextmanager
def cost_noted(folder: RunFolder, used_s: Callable[[], float] = lambda: sum(os.times()[:4])) -> Iterator[None]:
    """Note the CPU seconds of the `with` block in a run's manifest, over restarts, and the commit of the source.

    The seconds are those of this process and of its children that ended; what a killed process used is missing.
    """
    begin = used_s()
    try:
        yield
    finally:
        if folder.path.exists():
            earlier = json.loads((folder.path / "manifest.json").read_text(encoding="utf-8")).get(CPU_S, 0.0)
            folder.note(**{CPU_S: round(earlier + used_s() - begin, 2), COMMIT: source_commit()})


def source_commit(source: Path = SOURCE) -> str | None:
    """Return the git commit of the source that runs, with `-dirty` if it was changed; None for an installed release."""
    if not (source / ".git").exists():
        return None
    words = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return None
    return found.stdout.strip() or None
