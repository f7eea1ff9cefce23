"""Small data sets in MNIST's format."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def idx(array: Bytes) -> bytes:
    """Return an array of bytes in IDX format."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(
    root: Path,
    labels: Sequence[int] = [*range(5)] * 4,
    tests: Sequence[int] = range(5),
    *,
    name: str = "MNIST",
    seed: int = 1,
    zipped: bool = False,
) -> dict[str, Bytes]:
    """Write the four files, with drawn images and these labels; return their arrays by the files'
    names.
    """
    raw, draw, arrays = root / name / "raw", np.random.default_rng(seed), dict[str, Bytes]()
    raw.mkdir(parents=True, exist_ok=True)
    for part, found in (("train", labels), ("t10k", tests)):
        arrays[f"{part}-images-idx3-ubyte"] = draw.integers(0, 256, (len(found), 28, 28), np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = np.array(found, np.uint8)
    for file, array in arrays.items():
        content = gzip.compress(idx(array)) if zipped else idx(array)
        (raw / (f"{file}.gz" if zipped else file)).write_bytes(content)
    return arrays
