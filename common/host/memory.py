"""Reuse of large buffers in the heap, and imports without garbage collection.

glibc returns every large buffer to the kernel when it is freed, so each new one causes page faults for all its pages.
These are the largest single cost of transferring models. Drawback: resident memory stays at its peak.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# From glibc's malloc.h.
_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_MAX: Final = -4


def keep_large_buffers() -> bool:
    """Make glibc's malloc reuse large buffers; return whether it accepted all options.

    Call it once at the start of a process. FEDSTRATA_MALLOC=system leaves malloc unchanged, as do other C libraries.
    """
    if os.environ.get("FEDSTRATA_MALLOC") == "system" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(*option) for option in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 1 << 30), (_TOP_PAD, 16 << 20)))


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Import large libraries with garbage collection off; later collections skip all objects that then exist.

    For the start of a process. Collections take a tenth of the time of importing torch and find no garbage.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries may report frozen objects as leaks
