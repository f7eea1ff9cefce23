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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from cloud.results import RunFolder

CPU_S: Final = "cpu_s"  # in manifest.json


@contextmanager
def cpu_counted(folder: RunFolder, used_s: Callable[[], float] = lambda: sum(os.times()[:4])) -> Iterator[None]:
    """Add the CPU seconds of the `with` block to those in a run's manifest, over restarts.

    They are those of this process and of its children that ended; what a killed process used is missing.
    """
    begin = used_s()
    try:
        yield
    finally:
        if folder.path.exists():
            earlier = json.loads((folder.path / "manifest.json").read_text(encoding="utf-8")).get(CPU_S, 0.0)
            folder.note(**{CPU_S: round(earlier + used_s() - begin, 2)})
