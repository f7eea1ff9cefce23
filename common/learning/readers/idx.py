"""MNIST's file format, and data sets that use it: `<root>/<name>/raw/train-images-idx3-ubyte` etc., or .gz."""

from __future__ import annotations

import gzip
import zlib
from math import prod
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from common.learning.readers.parts import Parts, damaged, find, torchvision_fetches

MAX_BYTES = 1 << 30


def read_mnist_like(root: Path, folder: str) -> Parts:
    """Read the four files. Raises InvalidExperiment."""
    paths = find_mnist_like(root, folder)
    train, labels, test, test_labels = (_idx_array(path, 3 if "images" in path.name else 1) for path in paths)
    return Parts(train[:, None], labels.astype(np.int64), test[:, None], test_labels.astype(np.int64), classes=10)


def find_mnist_like(root: Path, folder: str) -> list[Path]:
    """Return the four files. Raises InvalidExperiment."""
    raw = root / folder / "raw"
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return find(root, [(raw / name, raw / f"{name}.gz") for name in names], fetch=torchvision_fetches(root, folder))


def _idx_array(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, plain or .gz, with this number of dimensions.

    Format: two zero bytes, 0x08 for uint8, the number of dimensions; each dimension as a big-endian uint32; the bytes
    in row-major order. Raises InvalidExperiment.
    """
    try:
        with _open(path) as file:
            magic = file.read(4)
            if magic != bytes((0, 0, 8, dimensions)):
                raise damaged(path, f"begins with {magic.hex() or 'nothing'}, not 0000080{dimensions}")
            header = file.read(4 * dimensions)
            if len(header) < 4 * dimensions:
                raise damaged(path, "ends inside its header")
            shape = tuple(int(size) for size in np.frombuffer(header, ">u4"))
            size = prod(shape)
            if size > MAX_BYTES:
                raise damaged(path, f"claims {size} bytes of data")
            body = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, f"cannot be read ({error})") from None
    if len(body) != size:
        raise damaged(path, f"holds {'more' if len(body) > size else len(body)} than the {size} bytes it announces")
    return np.frombuffer(body, np.uint8).reshape(shape).copy()


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")
