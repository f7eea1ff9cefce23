"""Uploads as integers whose sum is exact: the ring of a tier with secure sums.

    L = 2^(bits-1) - 1
    q_k = floor(clip_c(v_k - z) f_k L / c + u),  u uniform in [0, 1)                  at child k
    mean = z + c / L (sum of q_k) / (sum of f_k)                                      at the parent

z is the model that all children received, v_k what child k made of it, c the clip, and f_k = n_k /
max n the weight of its samples, or 1. Words wrap modulo 2^32 or 2^64, as their sum of the present
children does not. Behind the values of a model stand three numbers of the child: its training loss
and whether it has one, and the share of values that were clipped.

    words = [ trainable columns | float32 buffers | loss, has a loss, share clipped ]

Buffers have a clip of their own. Counters stay as received.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

from fedstrata.common.lazy import np, npt
from fedstrata.common.model.layout import Entry, ModelLayout, Row, Section
from fedstrata.common.settings.secure import SecureSettings

Words: TypeAlias = "npt.NDArray[np.uint32] | npt.NDArray[np.uint64]"
Floats: TypeAlias = "npt.NDArray[np.float32]"

BUFFER_CLIP: Final = 1024.0  # of a buffer's change, such as a mean of a normalisation layer
LOSS_CLIP: Final = 256.0
TAIL_CLIPS: Final = (LOSS_CLIP, 1.0, 1.0)
PIECE: Final = 1 << 16  # columns at a time


class RingLayout(ModelLayout):
    """The layout of a row of words, which are no floats."""

    def check_finite(self, row: Row) -> None:
        """Do nothing: all words are numbers."""


@dataclass(frozen=True, slots=True)
class Sum:
    """What the parent learns: the mean of the present children's models, uint8 [row_bytes], and of
    their losses, None if none has one, and the mean share of values that were clipped.
    """

    row: Row
    loss: float | None
    clipped: float


def weight_of(samples: int, *, most: int) -> float:
    """Return a child's weight f, of at most 1; `most`: the samples of the largest one as its parent
    knew them, 0 if all weigh the same.

    An institution below which devices have come since then may have more: it weighs as the largest.
    """
    if not most:
        return 1.0
    return min(1.0, samples / most)


@dataclass(frozen=True)
class Ring:
    """The words of a tier's uploads; `model`: the layout of what they are made of."""

    settings: SecureSettings
    model: ModelLayout
    word_bits: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The type of a word."""
        return np.dtype(f"u{self.word_bits // 8}")

    @property
    def size(self) -> int:
        """The number of words."""
        return self.model.columns + len(TAIL_CLIPS)

    @property
    def level(self) -> int:
        """L: the largest integer of a child."""
        return (1 << (self.settings.bits - 1)) - 1

    @cached_property
    def layout(self) -> RingLayout:
        """The layout of the words, as a link carries them."""
        columns = self.size * self.word_bits // 32
        name = f"words of {self.word_bits}, {self.settings.bits} within {self.settings.clip:g}"
        return RingLayout((Entry(name, (columns,), Section.PARAMETER, 0, columns),))

    def words(self, row: Row) -> Words:
        """Return a row as words [size], a view."""
        return row[: self.layout.row_bytes].view(self.dtype)

    def quantised(
        self,
        row: Row,
        received: Row,
        *,
        weight: float,
        loss: float | None,
        chance: np.random.Generator,
    ) -> Words:
        """Return the words of a child's model, of its weight f, 0 to 1."""
        words = np.empty(self.size, self.dtype)
        model = self.model.floats(row)
        before = self.model.floats(received)
        clipped = 0
        for columns, clip in self._pieces():
            change = model[columns].astype(np.float64)
            change -= before[columns]
            clipped += int(np.count_nonzero(np.abs(change) > clip))
            words[columns] = self._integers(change, clip, weight, chance)
        known = loss is not None
        tail = (loss or 0.0, float(known), clipped / self.model.columns)
        for place, (value, clip) in enumerate(zip(tail, TAIL_CLIPS, strict=True)):
            number = np.array([value])
            at = self.model.columns + place
            words[at : at + 1] = self._integers(number, clip, weight, chance)
        return words

    def mean(self, total: Words, received: Row, *, weights: Iterable[float]) -> Sum:
        """Return what the sum of the words of children with these weights is."""
        row = received.copy()
        model = self.model.floats(row)
        weight = sum(weights)
        signed = total.view(np.dtype(f"i{self.word_bits // 8}"))
        for columns, clip in self._pieces():
            change = signed[columns].astype(np.float64)
            change *= clip / self.level / weight
            change += model[columns]
            model[columns] = change
        loss, known, clipped = (
            float(signed[self.model.columns + place]) * clip / self.level / weight
            for place, clip in enumerate(TAIL_CLIPS)
        )
        mean_loss = loss / known if known > 0 else None
        return Sum(row, mean_loss, max(0.0, clipped))

    def _pieces(self) -> Iterable[tuple[slice, float]]:
        """Yield columns, with their clip."""
        sections = (
            (0, self.model.parameters, self.settings.clip),
            (self.model.parameters, self.model.columns, BUFFER_CLIP),
        )
        for start, stop, clip in sections:
            for at in range(start, stop, PIECE):
                yield slice(at, min(at + PIECE, stop)), clip

    def _integers(
        self,
        values: npt.NDArray[np.float64],
        clip: float,
        weight: float,
        chance: np.random.Generator,
    ) -> Words:
        """Return values as words, which are overwritten."""
        np.clip(values, -clip, clip, out=values)
        values *= weight * self.level / clip
        values += chance.random(values.size)
        np.floor(values, out=values)
        signed: Words = values.astype(np.int64).astype(self.dtype)
        return signed
