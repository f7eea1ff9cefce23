"""The constants of a data set's normalisation: mean and deviation of each channel, or feature, after scaling.

Normalised pixels are (pixel * scale - mean) / deviation. A channel, or feature, that never changes has the deviation 1:
that of its rounding errors would make any other value enormous.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, TypeAlias

import torch
from torch import Tensor

from common.errors import InvalidExperiment
from common.experiment.data import NONE, OWN, PUBLISHED, Data

Constants: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]

BLOCK_SAMPLES: Final = 1_000  # converted to float64 at once
DIGITS: Final = 4  # significant ones, as published constants have: sums differ in the last bits between machines
ROUNDING: Final = 2.0**-23  # the deviation, as a part of the mean, up to which it is float32's rounding alone


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

    A mean that is large beside its deviation has as many more digits as it needs.
    """
    count = train[:, 0].numel()
    total, square = torch.zeros(2, train.shape[1], dtype=torch.float64)
    for block in _blocks(train):
        total += block.sum((0, 2))
    mean = total / count
    for block in _blocks(train):
        square += block.sub_(mean[:, None]).square_().sum((0, 2))
    deviation = (square / count).sqrt()
    deviation[deviation <= ROUNDING * mean.abs()] = 1 / scale
    pairs = zip((mean * scale).tolist(), (deviation * scale).tolist(), strict=True)
    means, deviations = zip(*(_rounded(*pair) for pair in pairs), strict=True)
    return means, deviations


def _rounded(mean: float, deviation: float) -> tuple[float, float]:
    more = max(0, math.floor(math.log10(abs(mean) / deviation))) if mean else 0
    return float(f"{mean:.{DIGITS + more}g}"), float(f"{deviation:.{DIGITS}g}")


def _blocks(train: Tensor) -> Iterator[Tensor]:
    """Yield blocks of the samples, float64 [n, C, places]."""
    return (block.double().reshape(len(block), block.shape[1], -1) for block in torch.split(train, BLOCK_SAMPLES))
