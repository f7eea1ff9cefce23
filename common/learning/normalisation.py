"""The constants of a data set's normalisation: mean and deviation of each channel, or feature, after scaling.

Normalised pixels are (pixel * scale - mean) / deviation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

import torch
from torch import Tensor

from common.errors import InvalidExperiment
from common.experiment.data import NONE, OWN, PUBLISHED, Data

Constants: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]

BLOCK_SAMPLES: Final = 1_000  # converted to float64 at once
DIGITS: Final = 4  # significant ones, as published constants have: sums differ in the last bits between machines


def constants_of(data: Data, samples: Tensor, *, scale: float, published: Constants) -> Constants:
    """Return mean and deviation by `data.normalise`; `samples` [N, C, ...] are those for training, if there are any.

    Raises InvalidExperiment.
    """
    if data.normalise == PUBLISHED:
        return published
    if data.normalise == NONE:
        return (0.0,), (1.0,)
    if data.normalise == OWN:
        return own_constants(samples, scale=scale)
    mean, deviation = (tuple(map(float, each)) for each in data.normalise)
    channels = samples.shape[1]
    if len(mean) not in (1, channels):
        problem = f"the samples have {channels} channels or features"
        raise InvalidExperiment("data.normalise", data.normalise, problem, f"List one number, or {channels}.")
    return mean, deviation


def own_constants(train: Tensor, *, scale: float) -> Constants:
    """Return mean and deviation over all samples and places, of each channel [C], to DIGITS digits.

    A channel that never changes has the deviation 1.
    """
    count = train[:, 0].numel()
    total, square = torch.zeros(2, train.shape[1], dtype=torch.float64)
    for block in _blocks(train):
        total += block.sum((0, 2))
    mean = total / count
    for block in _blocks(train):
        square += block.sub_(mean[:, None]).square_().sum((0, 2))
    deviation = (square / count).sqrt()
    deviation[deviation == 0] = 1 / scale
    rounded = [tuple(float(f"{value * scale:.{DIGITS}g}") for value in each.tolist()) for each in (mean, deviation)]
    return rounded[0], rounded[1]


def _blocks(train: Tensor) -> Iterator[Tensor]:
    """Yield blocks of the samples, float64 [n, C, places]."""
    return (block.double().reshape(len(block), block.shape[1], -1) for block in torch.split(train, BLOCK_SAMPLES))
