"""Reuse of large buffers in the heap, and imports without garbage collection.

glibc returns every large buffer to the kernel when it is freed, so each new one causes page faults
for all its pages. These are the largest single cost of transferring models. Drawback: resident
memory stays at its peak.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# From glibc's malloc.h.
_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_MAX: Final = -4
PEAK: Final = re.compile(rb"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def keep_large_buffers() -> bool:
    """Make glibc's malloc reuse large buffers; return whether it accepted all options.

    Call it once at the start of a process. FEDSTRATA_MALLOC=system leaves malloc unchanged, as do
    other C libraries.
    """
    if os.environ.get("FEDSTRATA_MALLOC") == "system" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(
        mallopt(*option)
        for option in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 1 << 30), (_TOP_PAD, 16 << 20))
    )


def release_freed() -> None:
    """Return freed memory to the kernel, of what is not needed again."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def peak_bytes(proc: Path | str = "/proc") -> int | None:
    """Return the most memory that was resident in this process since it began, None where it is not
    known.

    `getrusage` would also count what the parent had when it started this process.
    """
    try:
        # after each training: no path is composed, no text decoded
        with open(f"{proc}/self/status", "rb", buffering=0) as file:
            found = PEAK.search(file.read())
    except OSError:
        return None
    if found is None:
        return None
    return 1024 * int(found[1])


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Import large libraries with garbage collection off; later collections skip all objects that
    then exist.

    For the start of a process. Collections take a tenth of the time of importing torch and find no
    garbage.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries may report frozen objects as leaks
