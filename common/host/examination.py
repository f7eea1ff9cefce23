"""What a machine lacks: its clock, memory, power, disks and packages, examined without disturbing
it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from fedstrata.common.errors import installing
from fedstrata.common.host.board import board_problems
from fedstrata.common.text import ShortText

MEMORY_LEAST: Final = 256_000_000
DISK_LEAST: Final = 1_000_000_000
GB: Final = 1e9
TORCH: Final = "PyTorch"
_UNSYNCHRONISED: Final = 0x40  # STA_UNSYNC of timex.h


class _Timex(ctypes.Structure):
    """The beginning of struct timex, `man adjtimex`, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 64),
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """One examined item: whether it is needed, whether it is there, and a fact or what follows."""

    item: ShortText
    needed: bool
    there: bool
    note: ShortText


def examine_host(
    folders: Mapping[str, Path],
    *,
    learns: bool,
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
) -> list[Finding]:
    """Return findings of this machine: `folders` are those written to, by use; `learns`: PyTorch is
    needed.
    """
    found = [*_clock(), *_memory(proc)]
    found += [
        Finding(item, False, not problem, problem) for item, problem in board_problems(proc, sys)
    ]
    found += [_disk(use, folder) for use, folder in folders.items()]
    return [*found, _torch(needed=learns)]


def _clock() -> list[Finding]:
    """Ask the kernel whether something keeps the clock; nothing where it cannot tell."""
    try:
        ask = ctypes.CDLL(None).adjtimex
    except (OSError, AttributeError):
        return []
    record = _Timex(modes=0)  # reads only
    if ask(ctypes.byref(record)) < 0:
        return []
    kept = not record.status & _UNSYNCHRONISED
    note = ""
    if not kept:
        note = "nothing synchronises it: certificates are refused by a wrong clock; install chrony"
    return [Finding("clock is synchronised", False, kept, note)]


def _memory(proc: Path) -> list[Finding]:
    try:
        lines = (proc / "meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    amounts = {}
    for line in lines:
        name, _, rest = line.partition(":")
        amounts[name] = 1024 * int(rest.split()[0])
    free = amounts.get("MemAvailable", 0)
    total = amounts.get("MemTotal", 0)
    note = f"{free / GB:.1f} of {total / GB:.1f} GB available"
    return [Finding("memory", True, free >= MEMORY_LEAST, note)]


def _disk(use: str, folder: Path) -> Finding:
    item = f"disk of {use}"
    there = Path("/")
    for each in (folder, *folder.absolute().parents):
        if each.exists():
            there = each
            break
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        return Finding(item, True, False, f"{there}: {error.strerror}")
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        return Finding(item, True, False, f"{there} is not writable for this user")
    note = f"{free / GB:.1f} GB free at {there}"
    if free < DISK_LEAST:
        return Finding(item, True, False, f"{note}: make room")
    return Finding(item, True, True, note)


def _torch(*, needed: bool) -> Finding:
    try:
        return Finding(TORCH, needed, True, version("torch"))
    except PackageNotFoundError:
        note = installing("learning") if needed else "not installed"
        return Finding(TORCH, needed, False, note)
