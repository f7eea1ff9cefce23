"""The memory of processes, of which what they share counts in parts."""

from __future__ import annotations

import re
from pathlib import Path


def pss(pid: int) -> float:
    """Return the PSS of a process, bytes. Raises OSError if it has ended."""
    found = re.search(r"^Pss: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return float(found[1]) * 1024 if found else 0.0
