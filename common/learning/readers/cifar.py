"""CIFAR's Python version, pickles: `<root>/cifar-10-batches-py/data_batch_1` ..., `<root>/cifar-100-python/train`."""

from __future__ import annotations

import pickle
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from common.learning.readers.parts import Labels, Parts, damaged, find, torchvision_fetches

SHAPE = (3, 32, 32)
GROUPS = {"fine": 100, "coarse": 20}


def find_cifar10(root: Path) -> list[Path]:
    """Return the files of the training batches and of the test batch. Raises InvalidExperiment."""
    folder = root / "cifar-10-batches-py"
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return find(root, [(folder / name,) for name in names], fetch=torchvision_fetches(root, "CIFAR10"))


def find_cifar100(root: Path) -> list[Path]:
    """Return the files of the training and the test samples. Raises InvalidExperiment."""
    folder = root / "cifar-100-python"
    return find(root, [(folder / name,) for name in ("train", "test")], fetch=torchvision_fetches(root, "CIFAR100"))


FINDERS: Final = MappingProxyType({"cifar10": find_cifar10, "cifar100": find_cifar100})


def read_cifar10(root: Path) -> Parts:
    """Read the five training batches and the test batch. Raises InvalidExperiment."""
    *train, (test, test_labels) = (_batch(path, "labels") for path in find_cifar10(root))
    images, labels = np.concatenate([batch[0] for batch in train]), np.concatenate([batch[1] for batch in train])
    return Parts(images, labels, test, test_labels, classes=10)


def read_cifar100(root: Path, *, labels: str) -> Parts:
    """Read with the `fine` labels, 100 classes, or the `coarse` ones, their 20 groups. Raises InvalidExperiment."""
    (train, train_labels), (test, test_labels) = (_batch(path, f"{labels}_labels") for path in find_cifar100(root))
    return Parts(train, train_labels, test, test_labels, classes=GROUPS[labels])


def _batch(path: Path, key: str) -> tuple[npt.NDArray[np.uint8], Labels]:
    """Read one batch: images uint8 [N, 3, 32, 32] and the labels under the key, int64 [N].

    Raises InvalidExperiment, also if the pickle refers to anything but arrays.
    """
    try:
        with path.open("rb") as file:
            # Written by Python 2, whose strings, including the pixels, are bytes: numpy expects latin1.
            batch = _ArraysOnly(file, encoding="latin1").load()
        images, labels = np.asarray(batch["data"]), np.asarray(batch[key])
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise damaged(path, f"is not a CIFAR batch ({type(error).__name__}: {error})") from None
    if images.dtype != np.uint8 or images.shape != (len(labels), prod(SHAPE)) or labels.dtype.kind != "i":
        raise damaged(path, f"holds data {images.dtype} {images.shape} and {key} {labels.dtype} {labels.shape}")
    return images.reshape(-1, *SHAPE), labels.astype(np.int64)


class _ArraysOnly(pickle.Unpickler):
    """Unpickler for numpy arrays and Python's basic containers that rejects every other class or function."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name in ("numpy.core.multiarray", "numpy._core.multiarray") and global_name == "_reconstruct":
            return np.ndarray(0).__reduce__()[0]  # its module differs between versions of numpy
        if module_name == "numpy" and global_name in ("ndarray", "dtype"):
            return getattr(np, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed")
