"""Keeping large buffers in the heap.

glibc gives every large buffer back to the kernel when it is freed, so each new one is faulted in again page by page:
the largest single cost of moving models. Price: resident memory stays at its peak.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

# From glibc's malloc.h.
_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_MAX: Final = -4


def keep_large_buffers() -> bool:
    """Tell glibc's malloc to reuse large buffers; return whether it was told.

    Call it once, at a process's start. FEDSTRATA_MALLOC=system leaves malloc as it is, as does another C library.
    """
    if os.environ.get("FEDSTRATA_MALLOC") == "system" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(*option) for option in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 1 << 30), (_TOP_PAD, 16 << 20)))
