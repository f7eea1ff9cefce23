"""Data sets that need no download: the digits that come with fedstrata, and synthetic images of any size."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.errors import InvalidExperiment
from common.experiment.data import Data
from common.learning.readers.parts import MOST_BYTES, Labels, Parts
from common.randomness import Purpose, generator

DIGITS = Path(__file__).with_name("digits.csv.gz")
DIGITS_TEST = 359


def read_digits() -> Parts:
    """Split the digits by class, always in the same way: the test set must not depend on the run's seed.

    The file is scikit-learn's copy of the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
    C. Kaynak, UCI Machine Learning Repository, 1998, CC BY 4.0): 1,797 rows of 64 pixels in 0 to 16 and the class.
    """
    rows = np.loadtxt(DIGITS, np.uint8, delimiter=",")
    images = rows[:, :64].reshape(-1, 1, 8, 8)
    labels = rows[:, 64].astype(np.int64)
    order = generator(0, Purpose.PARTITION, "digits").permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    # Sorted by class, the i-th of n samples is for testing where i * DIGITS_TEST / n passes an integer.
    passed = np.arange(len(order) + 1) * DIGITS_TEST // len(order)
    is_test = np.diff(passed) > 0
    train, test = np.sort(order[~is_test]), np.sort(order[is_test])
    return Parts(images[train], labels[train], images[test], labels[test], classes=10)


def make_synthetic(data: Data, *, classes: int) -> Parts:
    """Generate images for benchmarks: a pattern per class plus noise, the classes in turn.

    They are the same for every seed of an experiment, and a prefix of a larger set. Raises InvalidExperiment.
    """
    shape = tuple(data.image_shape)
    images = data.samples + data.test_samples + classes
    if (size := images * prod(shape)) > MOST_BYTES:
        problem = f"{images} images and patterns of {list(shape)} take {size / 1e9:.0f} GB"
        raise InvalidExperiment("data.samples", data.samples, problem, "Use fewer or smaller images.")
    patterns = generator(0, Purpose.PARTITION, "synthetic").integers(0, 128, (classes, *shape), np.uint8)

    def part(name: str, samples: int) -> tuple[npt.NDArray[np.uint8], Labels]:
        labels = np.arange(samples, dtype=np.int64) % classes
        images = generator(0, Purpose.PARTITION, name).integers(0, 128, (samples, *shape), np.uint8)
        for start in range(0, samples, 4096):  # all patterns at once would double the memory
            images[start : start + 4096] += patterns[labels[start : start + 4096]]
        return images, labels

    return Parts(*part("synthetic train", data.samples), *part("synthetic test", data.test_samples), classes=classes)
