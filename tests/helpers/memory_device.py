"""A device of PyTorch in place of a GPU, whose memory is the CPU's: `memory_device.cpp`, compiled
once.

An operation whose operands are not all on it fails, and so does an allocation beyond a limit.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Final

import torch

SOURCE: Final = Path(__file__).with_suffix(".cpp")
NAME: Final = "memory"
DEVICE: Final = torch.device("privateuseone", 0)
UNLIMITED: Final = (1 << 63) - 1
COMPILER: Final = shutil.which("c++")


def why_not() -> str:
    """Return why there is no such device here, "" if there is."""
    header = Path(torch.__file__).parent / "include" / "torch" / "library.h"
    if COMPILER is None:
        return "no C++ compiler"
    if not header.exists():
        return "this PyTorch has no headers"
    return ""


@cache
def memory_device() -> ctypes.CDLL:
    """Compile and load the device, once in a process."""
    library = ctypes.CDLL(str(_compiled()), mode=ctypes.RTLD_GLOBAL)
    library.memory_device_held.restype = ctypes.c_int64
    library.memory_device_limit.argtypes = [ctypes.c_int64]
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    library.memory_device_begin()
    return library


def held_bytes() -> int:
    """Return the bytes of all tensors on the device that something still refers to."""
    gc.collect()  # the gradients of single samples are in cycles
    return int(memory_device().memory_device_held())


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Let allocations fail meanwhile beyond so many bytes of tensors."""
    memory_device().memory_device_limit(nbytes)
    try:
        yield
    finally:
        memory_device().memory_device_limit(UNLIMITED)


def _module() -> ModuleType:
    """Return what torch expects of a device's module."""
    found = ModuleType(f"torch.{NAME}")
    found.__dict__.update(
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        manual_seed_all=lambda _: None,
        _is_in_bad_fork=lambda: False,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
    )
    return found


def _compiled() -> Path:
    """Return the library, from an earlier run if the source and PyTorch are the same."""
    assert COMPILER is not None
    source = SOURCE.read_bytes() + torch.__version__.encode()
    digest = blake2b(source, digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"fedstrata-tests-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"memory_device-{digest}.so"
    if library.exists():
        return library
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    partial = library.with_suffix(f".{os.getpid()}")
    words = [COMPILER, "-std=c++20", "-O0", "-fPIC", "-shared", str(SOURCE), "-o", str(partial)]
    words += [f"-isystem{folder}" for folder in includes]
    words += [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
    subprocess.run(words, check=True, capture_output=True, text=True)
    partial.replace(library)
    return library
