"""Whether a data set is the original: by the digest of its samples and labels, or by the means of
its images.

The digests of MNIST and Fashion-MNIST are those of the files of their authors. Copies of CIFAR have
the images in other orders, so theirs are the means over all pixels of each channel, 0 to 255: what
is published of the originals, exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64

from fedstrata.common.learning.datasets import Dataset

DIGESTS: Final = MappingProxyType({"mnist": "acc5d27c9c183701", "fashionmnist": "0fc5046d0c5afbb8"})
MEANS: Final = MappingProxyType(  # for training, for testing
    {
        "cifar10": (
            (125.306918046875, 122.950394140625, 113.86538318359375),
            (126.02464140625, 123.70850419921875, 114.85431865234375),
        ),
        "cifar100": (
            (129.30416560546874, 124.0699626953125, 112.43405005859375),
            (129.74308525390626, 124.285218359375, 112.6952638671875),
        ),
    }
)


class Original(StrEnum):
    """What is known of a data set. IN_SOME_ORDER: another order than in the original gives other
    splits.
    """

    YES = "yes"
    IN_SOME_ORDER = "yes, in some order"
    NO = "no"
    UNKNOWN = "unknown"


def original(name: str, dataset: Dataset) -> Original:
    """Return whether the data set of this name is the original one."""
    if name in DIGESTS:
        if digest_of(dataset) == DIGESTS[name]:
            return Original.YES
        return Original.NO
    if name in MEANS:
        found = tuple(map(_means, (dataset.train_images, dataset.test_images)))
        counts = (torch.bincount(each) for each in (dataset.train_labels, dataset.test_labels))
        even = all(bool((each == each[0]).all()) for each in counts)
        if even and found == MEANS[name]:
            return Original.IN_SOME_ORDER
        return Original.NO
    return Original.UNKNOWN


def digest_of(dataset: Dataset) -> str:
    """Return a digest of the samples and labels, 16 hexadecimal digits, to compare the files of two
    machines.
    """
    total = xxh3_64()
    for tensor in _tensors(dataset):
        if tensor.numel():  # of private data a node has only one part
            total.update(tensor.numpy().reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def _tensors(dataset: Dataset) -> Iterator[Tensor]:
    yield from (
        dataset.train_images,
        dataset.train_labels,
        dataset.test_images,
        dataset.test_labels,
    )


def _means(images: Tensor) -> tuple[float, ...]:
    """Return the mean of each channel of images, uint8 [N, C, H, W]: a quotient of two whole
    numbers.
    """
    count = images[:, 0].numel()
    return tuple(
        int(channel.sum(dtype=torch.int64)) / max(1, count) for channel in images.unbind(1)
    )
