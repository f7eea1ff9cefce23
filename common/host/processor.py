"""The processor of this host: which of its instructions decide the last bits of what PyTorch
computes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

# The first of these whose flags a processor has: kernels of PyTorch and oneDNN are chosen by them.
KINDS: Final = (
    ("AVX-512", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})),
    ("AVX2", frozenset({"avx2", "fma"})),
    ("SVE", frozenset({"sve"})),
    ("NEON", frozenset({"asimd"})),
)
# PyTorch and oneDNN use no newer ones than these variables permit; MKL has its own, which only
# Intel's processors heed.
LIMITS: Final = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


def instructions(
    proc: Path = Path("/proc"), environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return the vector instructions that trainings use on this host, None if they are not known.

    They are the processor's; AVX2 where `LIMITS` hold AVX-512 back. The same training with two
    kinds differs in the last bits, which further training enlarges.
    """
    found = _of_processor(proc)
    limited = all(
        environment.get(name, "").lower() == value.lower() for name, value in LIMITS.items()
    )
    if limited and found == "AVX-512":
        return "AVX2"
    return found


def _of_processor(proc: Path) -> str | None:
    try:
        lines = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            flags = set(value.split())
            return next((name for name, needed in KINDS if needed <= flags), None)
    return None
