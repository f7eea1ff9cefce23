"""The data sets, held once per process: uint8, or float32 where noise was added.

Nothing is downloaded: the files are looked for where torchvision would have put them below `data.root`.
They come from elsewhere: sizes are checked before anything is allocated, and a CIFAR batch, which is a
pickle, may build arrays and nothing else.
"""

from __future__ import annotations

import gzip
import pickle
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.data import Data
from common.errors import InvalidExperiment
from common.learning.inputs import Inputs
from common.randomness import Purpose, generator

_Images = npt.NDArray[np.uint8]
_Labels = npt.NDArray[np.int64]
_Parts = tuple[_Images, _Labels, _Images, _Labels]

CLASSES = 10
DIGITS_TEST = 359
MAX_IDX_BYTES = 1 << 30
CIFAR_SHAPE = (3, 32, 32)


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Turns raw images on one device into what the models take: pixel * factor + offset, per channel."""

    factor: Tensor
    offset: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        """Return uint8 or float32 [B, C, H, W] as normalised float32 of the same shape, on the same device."""
        return images.mul(self.factor).add_(self.offset)


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Images uint8 or float32 [N, C, H, W], labels int64 [N], all on the CPU and shared: never write into them.

    `scale` brings a pixel into [0, 1]; `mean` and `std` are per channel, after scaling.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def inputs(self) -> Inputs:
        """Return what a model is given and asked for."""
        return Inputs(tuple(self.train_images.shape[1:]), self.classes)

    def normaliser(self, device: torch.device | str = "cpu") -> Normaliser:
        """Return (pixel * scale - mean) / std as a function for images on the device."""
        mean, std = torch.tensor(self.mean, dtype=torch.float64), torch.tensor(self.std, dtype=torch.float64)
        factor, offset = self.scale / std, -mean / std
        shape = (len(self.mean), 1, 1)
        return Normaliser(
            factor.to(device, torch.float32).reshape(shape), offset.to(device, torch.float32).reshape(shape)
        )


def load(data: Data) -> Dataset:
    """Return the data set; every caller in this process gets the same one.

    Raises InvalidExperiment naming the files that are missing or damaged, and the command that fetches them.
    """
    with _LOADING:
        return _load(data.dataset, data.root, data.noise)


_LOADING = threading.Lock()  # lru_cache alone would let several devices load the same files at once


@lru_cache(maxsize=2)
def _load(name: str, root: str, noise: float) -> Dataset:
    source = _SOURCES[name]
    train_images, train_labels, test_images, test_labels = source.read(Path(root))
    for images, labels in ((train_images, train_labels), (test_images, test_labels)):
        if not 0 < len(images) == len(labels) or labels.min() < 0 or labels.max() >= CLASSES:
            raise InvalidExperiment(
                "data.root",
                root,
                f"{name} has {len(images)} images, and {len(labels)} labels that should be 0 to {CLASSES - 1}",
                "Fetch the files again.",
            )
    return Dataset(
        _noisy(train_images, noise / source.scale, f"{name}/train"),
        torch.from_numpy(train_labels),
        _noisy(test_images, noise / source.scale, f"{name}/test"),
        torch.from_numpy(test_labels),
        CLASSES,
        source.scale,
        source.mean,
        source.std,
    )


def _noisy(images: _Images, deviation: float, name: str) -> Tensor:
    """Return the images, with Gaussian noise that is always the same: it belongs to the data, not to a run's seed.

    Nothing is clipped, so a pixel may leave its range.
    """
    if not deviation:
        return torch.from_numpy(images)
    noise = generator(0, Purpose.NOISE, name).standard_normal(images.shape, np.float32)
    noise *= np.float32(deviation)
    noise += images
    return torch.from_numpy(noise)


def _digits(_: Path) -> _Parts:
    """Split scikit-learn's digits by class, always alike: the test set must not depend on the run's seed."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # a second that only digits needs

    raw = load_digits()
    images = raw.images.astype(np.uint8)[:, None]
    labels = raw.target.astype(np.int64)
    order = generator(0, Purpose.PARTITION, "digits").permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    # The i-th of n, class by class, is for testing where i * DIGITS_TEST / n passes a whole number.
    passed = np.arange(len(order) + 1) * DIGITS_TEST // len(order)
    is_test = np.diff(passed) > 0
    train, test = np.sort(order[~is_test]), np.sort(order[is_test])
    return images[train], labels[train], images[test], labels[test]


def _mnist_like(folder: str) -> Callable[[Path], _Parts]:
    def read(root: Path) -> _Parts:
        raw = root / folder / "raw"
        names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
        paths = _find(root, [(raw / name, raw / f"{name}.gz") for name in names], dataset=folder)
        arrays = [_idx_array(path, 3 if "images" in path.name else 1) for path in paths]
        images, labels, test_images, test_labels = arrays
        return images[:, None], labels.astype(np.int64), test_images[:, None], test_labels.astype(np.int64)

    return read


def _cifar10(root: Path) -> _Parts:
    folder = root / "cifar-10-batches-py"
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    *train, test = (_cifar_batch(path) for path in _find(root, [(folder / name,) for name in names], dataset="CIFAR10"))
    images, labels = (np.concatenate([batch[i] for batch in train]) for i in (0, 1))
    return images, labels, test[0], test[1]


def _find(root: Path, candidates: Sequence[Sequence[Path]], *, dataset: str) -> list[Path]:
    """Return the first existing path of each group. Raises InvalidExperiment naming all that lack.

    `dataset` is the class of `torchvision.datasets` that would fetch them.
    """
    found = [next((path for path in group if path.is_file()), None) for group in candidates]
    lacking = [group for group, path in zip(candidates, found, strict=True) if path is None]
    if lacking:
        fetch = f"torchvision.datasets.{dataset}({str(root)!r}, download=True)"
        raise InvalidExperiment(
            "data.root",
            str(root),
            f"not found: {', '.join(' or '.join(str(path.absolute()) for path in group) for group in lacking)}",
            f'To fetch them: python -c "import torchvision; {fetch}"',
        )
    return [path for path in found if path is not None]


def _idx_array(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, plain or .gz, with that many dimensions.

    Format: two zero bytes, 0x08 for uint8, the number of dimensions; each dimension as a big-endian
    uint32; the bytes in row-major order. Raises InvalidExperiment.
    """
    try:
        with _open(path) as file:
            magic = file.read(4)
            if magic != bytes((0, 0, 8, dimensions)):
                raise _damaged(path, f"begins with {magic.hex() or 'nothing'}, not 0000080{dimensions}")
            header = file.read(4 * dimensions)
            if len(header) < 4 * dimensions:
                raise _damaged(path, "ends inside its header")
            shape = tuple(int(size) for size in np.frombuffer(header, ">u4"))
            size = prod(shape)
            if size > MAX_IDX_BYTES:
                raise _damaged(path, f"claims {size} bytes of data")
            body = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, f"cannot be read ({error})") from None
    if len(body) != size:
        raise _damaged(path, f"holds {'more' if len(body) > size else len(body)} than the {size} bytes it announces")
    return np.frombuffer(body, np.uint8).reshape(shape).copy()


def _cifar_batch(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Read one batch of the CIFAR-10 Python version: images uint8 [N, 3, 32, 32], labels int64 [N].

    Raises InvalidExperiment, also where the pickle asks for anything but an array.
    """
    try:
        with path.open("rb") as file:
            # Written by Python 2, whose strings (the pixels, too) are bytes: latin1 is what numpy expects.
            batch = _ArraysOnly(file, encoding="latin1").load()
        images, labels = np.asarray(batch["data"]), np.asarray(batch["labels"])
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise _damaged(path, f"is no CIFAR batch ({error})") from None
    if images.dtype != np.uint8 or images.shape != (len(labels), prod(CIFAR_SHAPE)) or labels.dtype.kind != "i":
        raise _damaged(path, f"holds data {images.dtype} {images.shape} and labels {labels.dtype} {labels.shape}")
    return images.reshape(-1, *CIFAR_SHAPE), labels.astype(np.int64)


class _ArraysOnly(pickle.Unpickler):
    """Builds numpy arrays and Python's basic containers; refuses every other class or function."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name in ("numpy.core.multiarray", "numpy._core.multiarray") and global_name == "_reconstruct":
            return np.ndarray(0).__reduce__()[0]  # where it lives differs between numpy's versions
        if module_name == "numpy" and global_name in ("ndarray", "dtype"):
            return getattr(np, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed")


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _damaged(path: Path, problem: str) -> InvalidExperiment:
    return InvalidExperiment("data.root", str(path), f"this file {problem}", "Delete it and fetch it again.")


@dataclass(frozen=True, slots=True)
class _Source:
    read: Callable[[Path], _Parts]
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


_SOURCES = MappingProxyType(
    {
        "digits": _Source(_digits, 1 / 16, (0.305,), (0.376,)),
        "mnist": _Source(_mnist_like("MNIST"), 1 / 255, (0.1307,), (0.3081,)),
        "fashionmnist": _Source(_mnist_like("FashionMNIST"), 1 / 255, (0.1307,), (0.3081,)),
        "cifar10": _Source(_cifar10, 1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    }
)
