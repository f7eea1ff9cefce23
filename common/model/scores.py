"""Sums over test samples: what a node counts of a model, what travels, and how sums become a score and a loss.

Sums of nodes are added, so those over all devices are the sums over all their samples. With o the outputs, t the
targets and n the samples, `score` is

    accuracy               the number of samples with argmax(o) = y
    mean_squared_error     the sum of each sample's mean of (o - t)^2; alike mean_absolute_error and binary_accuracy
    r2                     sum (o - t)^2, of one target; the score is 1 - score / (squares - targets^2 / n)
    a user's own           n times the score of a node's samples: over nodes it is the mean weighted by samples
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from math import ceil, isfinite, sqrt
from operator import add
from typing import Final

R2: Final = "r2"
CONSTANT: Final = 1e-12  # of the sum of squares: a smaller deviation of the targets is rounding
WORST: Final = 0.1  # of the devices
CLASSES_MOST: Final = 1000  # of counts of single classes
COUNT_BYTES: Final = 4
COUNT_MOST: Final = 2**32 - 1


@dataclass(frozen=True, slots=True)
class ScoreSums:
    """Sums over the test samples of a node, or of the nodes below it.

    `loss`, `score`: see above; `targets`, `squares`: of r2, of the targets and their squares. `seconds`: of the
    scoring; of several nodes the longest. `classes`: little-endian uint32 [classes, 2], the samples of each class and
    the right ones among them; empty unless they are asked for.
    """

    samples: int
    loss: float
    score: float
    targets: float = 0.0
    squares: float = 0.0
    seconds: float = 0.0
    classes: bytes = b""

    def __add__(self, other: ScoreSums) -> ScoreSums:
        """Return the sums over the samples of both."""
        return ScoreSums(
            self.samples + other.samples,
            self.loss + other.loss,
            self.score + other.score,
            self.targets + other.targets,
            self.squares + other.squares,
            max(self.seconds, other.seconds),
            packed([a + b for a, b in zip_longest(unpacked(self.classes), unpacked(other.classes), fillvalue=0)]),
        )

    @property
    def mean_loss(self) -> float:
        """The mean loss of a sample."""
        return self.loss / self.samples

    def score_by(self, name: str) -> float:
        """Return the score of this name."""
        if name != R2:
            return self.score / self.samples
        deviation = self.squares - self.targets * self.targets / self.samples
        if deviation > CONSTANT * self.squares:
            return 1 - self.score / deviation
        return 0.0 if self.score else 1.0


def packed(counts: Sequence[int]) -> bytes:
    """Return counts as bytes."""
    return b"".join(min(count, COUNT_MOST).to_bytes(COUNT_BYTES, "little") for count in counts)


def unpacked(counts: bytes) -> list[int]:
    """Return the counts of `packed`."""
    places = range(0, len(counts), COUNT_BYTES)
    return [int.from_bytes(counts[place : place + COUNT_BYTES], "little") for place in places]


def summed(sums: Iterable[ScoreSums | None]) -> ScoreSums | None:
    """Return the sums over all nodes that have some, None if none has."""
    found = [each for each in sums if each is not None]
    return reduce(add, found) if found else None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Scores of devices, each counted once: their mean, that of the worst tenth (rounded up), and their deviation.

    The worst tenth is that of q-FFL (Li et al. 2020, table 1); `spread` is the standard deviation, of all of them.
    """

    mean: float
    worst: float
    spread: float


def distribution(scores: Sequence[float], *, higher: bool) -> Distribution | None:
    """Return the distribution of the finite scores, None if there are none; `higher`: whether higher ones are better.

    Any numbers may come from the network, so nothing here raises OverflowError.
    """
    ordered = sorted((each for each in scores if isfinite(each)), reverse=not higher)
    if not (count := len(ordered)):
        return None
    mean, worst = sum(ordered) / count, ordered[: ceil(WORST * count)]
    squares = sum((each - mean) * (each - mean) for each in ordered)
    return Distribution(mean, sum(worst) / len(worst), sqrt(squares / count))
