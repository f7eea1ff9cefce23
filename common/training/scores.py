"""Sums over test samples: what a device counts of a model, what travels, and how sums become scores
and a loss.

The cloud adds the sums of devices, so those over all devices are the sums over all their samples.
With o the outputs, t the targets and n the samples, those of a score are

    accuracy               the number of samples with argmax(o) = y
    mean_squared_error     the sum of each sample's mean of (o - t)^2; alike mean_absolute_error and
    binary_accuracy
    r2                     sum (o - t)^2, sum t and sum t^2 of each of T targets; the score is the
    mean over them of
                           1 - sum (o - t)^2 / (sum t^2 - (sum t)^2 / n)
    a user's own           n times the score of a device's samples: over devices it is the mean
    weighted by samples
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import reduce
from itertools import zip_longest
from math import ceil, inf, isfinite, sqrt
from operator import add
from types import MappingProxyType
from typing import Any, Final, Self, TypeVar

R2: Final = "r2"
CONSTANT: Final = 1e-12  # of the sum of squares: a smaller deviation of the targets is rounding
WORST: Final = 0.1  # of the devices
CLASSES_MOST: Final = 1000  # of counts of single classes
TARGETS_MOST: Final = 100  # of r2 on devices
COUNT_BYTES: Final = 4
COUNT_MOST: Final = 2**32 - 1
SUM_BYTES: Final = 8
R2_SUMS: Final = 3  # of each target
SUM_MOST: Final = 1e150  # its square is finite
ROUNDING: Final = 1e-9  # of sums
# The least and the most of a score; of one's own nothing is known.
BOUNDS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "accuracy": (0.0, 1.0),
        "binary_accuracy": (0.0, 1.0),
        "mean_squared_error": (0.0, inf),
        "mean_absolute_error": (0.0, inf),
    }
)

_Sums = TypeVar("_Sums", "ScoreSums", "ScoredModels")


@dataclass(frozen=True, slots=True)
class ScoreSums:
    """Sums over the test samples of a device, or of several.

    `loss`: see above; `scores`: little-endian float64, the sums of each score of the experiment,
    one after another. `seconds`: of the scoring; of several nodes the longest. `classes`:
    little-endian uint32 [classes, 2], the samples of each class and the right ones among them;
    empty unless they are asked for.
    """

    samples: int
    loss: float
    scores: bytes
    seconds: float = 0.0
    classes: bytes = b""

    def __add__(self, other: ScoreSums) -> ScoreSums:
        """Return the sums over the samples of both."""
        return ScoreSums(
            self.samples + other.samples,
            self.loss + other.loss,
            packed_sums(
                [
                    a + b
                    for a, b in zip_longest(
                        sums_in(self.scores), sums_in(other.scores), fillvalue=0.0
                    )
                ]
            ),
            max(self.seconds, other.seconds),
            packed(
                [
                    a + b
                    for a, b in zip_longest(
                        unpacked(self.classes), unpacked(other.classes), fillvalue=0
                    )
                ]
            ),
        )

    @property
    def mean_loss(self) -> float:
        """The mean loss of a sample."""
        return self.loss / self.samples

    def counts_classes(self) -> bool:
        """Return whether the counts of classes, if there are any, can be those of its samples."""
        if len(self.classes) % (2 * COUNT_BYTES):
            return False
        counts = unpacked(self.classes)
        pairs = list(zip(counts[::2], counts[1::2], strict=True))
        return sum(of for of, _ in pairs) <= self.samples and all(
            right <= of for of, right in pairs
        )

    def impossible(self, names: Sequence[str]) -> str:
        """Return why these cannot be the sums of scores of these names, "" if they can."""
        if not sums_fit(names, self.scores):
            return "its sums are not those of this run's scores"
        sums = list(sums_in(self.scores))
        targets = (len(sums) - len(names) + 1) // R2_SUMS
        for name in names:
            count = R2_SUMS * targets if name == R2 else 1
            each = sums[:count]
            sums = sums[count:]
            if name == R2:
                parts = [each[place :: count // R2_SUMS] for place in range(count // R2_SUMS)]
            else:
                parts = [each]
            if any(_impossible(name, part, self.samples) for part in parts):
                return f"its {name} is {self.by(names)[list(names).index(name)]}"
        return ""

    def by(self, names: Sequence[str]) -> list[float]:
        """Return the scores of these names, those of the experiment in their order."""
        sums = list(sums_in(self.scores))
        found = []
        targets = (len(sums) - len(names) + 1) // R2_SUMS  # of r2
        for name in names:
            if name == R2:
                each = sums[: R2_SUMS * targets]
                sums = sums[R2_SUMS * targets :]
                apart = zip(
                    each[:targets], each[targets : 2 * targets], each[2 * targets :], strict=True
                )
                found.append(sum(_r2(*three, samples=self.samples) for three in apart) / targets)
            else:
                found.append(sums.pop(0) / self.samples)
        return found


def _impossible(name: str, sums: Sequence[float], samples: int) -> bool:
    """Return whether these cannot be the sums of a score, of r2 those of one target; NaN cannot."""
    if not all(abs(each) <= SUM_MOST for each in sums):
        return True
    if name == R2:
        rest, total, squares = sums
        return rest < 0 or squares < 0 or total * total > samples * squares * (1 + ROUNDING)
    least, most = BOUNDS.get(name, (-inf, inf))
    return not least <= sums[0] / samples <= most * (1 + ROUNDING)


def _r2(rest: float, total: float, squares: float, *, samples: int) -> float:
    """Return the score of one target, by its sums of squared errors, of targets, and of squared
    targets.
    """
    deviation = squares - total * total / samples
    if deviation > CONSTANT * squares:
        return 1 - rest / deviation
    if rest:
        return 0.0
    return 1.0


def packed_sums(sums: Sequence[float]) -> bytes:
    """Return sums as bytes."""
    return struct.pack(f"<{len(sums)}d", *sums)


def sums_in(scores: bytes) -> tuple[float, ...]:
    """Return the sums of `packed_sums`."""
    return struct.unpack(f"<{len(scores) // SUM_BYTES}d", scores)


def sums_fit(names: Sequence[str], scores: bytes) -> bool:
    """Return whether these can be the sums of the scores of these names."""
    count, rest = divmod(len(scores), SUM_BYTES)
    count -= len(names)
    if R2 not in names:
        return not rest and not count
    return not rest and (count + 1) % R2_SUMS == 0 and 1 <= (count + 1) // R2_SUMS <= TARGETS_MOST


def bytes_most(names: Sequence[str]) -> int:
    """Return the most bytes of the sums of the scores of these names."""
    return SUM_BYTES * (len(names) + (R2_SUMS * TARGETS_MOST if R2 in names else 0))


def packed(counts: Sequence[int]) -> bytes:
    """Return counts as bytes."""
    return b"".join(min(count, COUNT_MOST).to_bytes(COUNT_BYTES, "little") for count in counts)


def unpacked(counts: bytes) -> list[int]:
    """Return the counts of `packed`."""
    places = range(0, len(counts), COUNT_BYTES)
    return [int.from_bytes(counts[place : place + COUNT_BYTES], "little") for place in places]


@dataclass(frozen=True, slots=True)
class ScoredModels:
    """Sums of the models of a task: `received`, the one that came with it, and `trained`, what
    training made of it.
    """

    received: ScoreSums | None = None
    trained: ScoreSums | None = None

    def __add__(self, other: ScoredModels) -> ScoredModels:
        """Return the sums over the samples of both, of each model."""
        return ScoredModels(
            summed((self.received, other.received)), summed((self.trained, other.trained))
        )

    @property
    def each(self) -> tuple[ScoreSums, ...]:
        """The sums that are not None."""
        return tuple(sums for sums in (self.received, self.trained) if sums is not None)

    @property
    def seconds(self) -> float:
        """The seconds of the scoring."""
        return sum(sums.seconds for sums in self.each)

    def lasting(self, seconds: float) -> ScoredModels:
        """Return the same sums, whose scoring takes these seconds, as many for each model."""
        each = seconds / max(1, len(self.each))
        received = self.received and replace(self.received, seconds=each)
        trained = self.trained and replace(self.trained, seconds=each)
        return ScoredModels(received, trained)

    def to_json(self) -> list[Any]:
        """Return what JSON can hold, which has no bytes."""

        def plain(sums: ScoreSums | None) -> list[Any] | None:
            if sums is None:
                return None
            samples, loss, scores, seconds, classes = astuple(sums)
            return [samples, loss, scores.hex(), seconds, classes.hex()]

        return [plain(self.received), plain(self.trained)]

    @classmethod
    def from_json(cls, found: Sequence[Any]) -> Self:
        """Return the models of `to_json`."""

        def sums(plain: Sequence[Any] | None) -> ScoreSums | None:
            if plain is None:
                return None
            samples, loss, scores, seconds, classes = plain
            return ScoreSums(samples, loss, bytes.fromhex(scores), seconds, bytes.fromhex(classes))

        return cls(*map(sums, found))


def summed(sums: Iterable[_Sums | None]) -> _Sums | None:
    """Return the sums over all devices that have some, None if none has."""
    found = [each for each in sums if each is not None]
    if found:
        return reduce(add, found)
    return None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Scores of devices, each counted once: their mean, that of the worst tenth (rounded up), and
    their deviation.

    The worst tenth is that of q-FFL (Li et al. 2020, table 1); `spread` is the standard deviation,
    of all of them.
    """

    mean: float
    worst: float
    spread: float


def distribution(scores: Sequence[float], *, higher: bool) -> Distribution | None:
    """Return the distribution of the finite scores, None if there are none; `higher`: whether
    higher ones are better.

    Any numbers may come from the network, so nothing here raises OverflowError.
    """
    ordered = sorted((each for each in scores if isfinite(each)), reverse=not higher)
    if not (count := len(ordered)):
        return None
    mean = sum(ordered) / count
    worst = ordered[: ceil(WORST * count)]
    squares = sum((each - mean) * (each - mean) for each in ordered)
    return Distribution(mean, sum(worst) / len(worst), sqrt(squares / count))
