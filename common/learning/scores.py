"""The scores of a test set: one number of all outputs [N, K] and all targets, [N] classes or [N, T] numbers. numpy.

accuracy               share of samples with argmax(o) = y
r2                     1 - sum (o - t)^2 / sum (t - mean t)^2, the mean over the T targets; a constant target adds 1
                       if it is met, else 0
mean_squared_error     mean of (o - t)^2
mean_absolute_error    mean of |o - t|
binary_accuracy        share of targets with (o > 0) = (t > 1/2)
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from common.experiment import own
from common.experiment.own import is_own

Numbers: TypeAlias = npt.NDArray[np.float64]
ScoreFunction: TypeAlias = Callable[[npt.NDArray[Any], npt.NDArray[Any]], float]
KEY: Final = "score.name"


def accuracy(outputs: npt.NDArray[Any], targets: npt.NDArray[Any]) -> float:
    """Return the share of samples whose largest output is their class."""
    return float(np.mean(outputs.argmax(1) == targets))


def r2(outputs: Numbers, targets: Numbers) -> float:
    """Return the coefficient of determination, of several targets the mean."""
    rest = np.square(outputs - targets).sum(0)
    whole = np.square(targets - targets.mean(0)).sum(0)
    constant = np.where(rest == 0, 1.0, 0.0)
    return float(np.mean(np.where(whole > 0, 1 - rest / np.where(whole > 0, whole, 1), constant)))


def mean_squared_error(outputs: Numbers, targets: Numbers) -> float:
    """Return the mean of the squared errors."""
    return float(np.square(outputs - targets).mean())


def mean_absolute_error(outputs: Numbers, targets: Numbers) -> float:
    """Return the mean of the errors' sizes."""
    return float(np.abs(outputs - targets).mean())


def binary_accuracy(outputs: Numbers, targets: Numbers) -> float:
    """Return the share of the targets, 0 or 1, on the side of the outputs' sign."""
    return float(np.mean((outputs > 0) == (targets > 0.5)))


_SCORES: Final = MappingProxyType(
    {each.__name__: each for each in (accuracy, r2, mean_squared_error, mean_absolute_error, binary_accuracy)}
)


def score_of(name: str) -> ScoreFunction:
    """Return the score of this name, or the user's own function as one. Raises InvalidExperiment."""
    if not is_own(name):
        return _SCORES[name]
    found = own.load(KEY, name)

    def score(outputs: npt.NDArray[Any], targets: npt.NDArray[Any]) -> float:
        with own.guarded({KEY: name}):
            return float(found(outputs, targets))

    return score
