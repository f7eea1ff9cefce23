"""The cells of a sweep in the order of its axes, with a baseline and a colour for each.

A sweep leaves them in its folder and in its folder of kept runs, in `sweep.json`. So a comparison
of its runs does not depend on the order of their folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Self

BETWEEN = ", "  # values in the name of a cell
ALIKE = " = "  # names of cells that have the same experiments


@dataclass(frozen=True, slots=True)
class CellPlace:
    """The place of a cell in its sweep.

    number: in the order of the axes    rank: of its value of the ranked axis    rest: of its other
    values baseline: whether the others are compared with it
    """

    number: int
    rank: int
    rest: int
    baseline: bool


@dataclass(frozen=True, slots=True)
class CellOrder:
    """The axes of a sweep with all their values, the ranked one, and its value that is the
    baseline, or "".
    """

    axes: Mapping[str, Sequence[str]]
    ranked: str
    baseline: str

    @classmethod
    def read(cls, tree: Mapping[str, Any]) -> Self | None:
        """Return the order in a `sweep.json`, None without. Raises KeyError, TypeError,
        ValueError.
        """
        if "order" not in tree:
            return None
        order = tree["order"]
        axes = {str(axis): list(map(str, values)) for axis, values in dict(order["axes"]).items()}
        if order["ranked"] not in axes:
            raise ValueError(f"ranked = {order['ranked']!r}: no axis")
        return cls(axes, order["ranked"], str(order["baseline"]))

    def written(self) -> dict[str, Any]:
        """Return what `read` reads."""
        return {"order": asdict(self)}

    def places(self) -> dict[str, CellPlace]:
        """Return the place of each cell by its name, in the order of the axes."""
        found: dict[str, CellPlace] = {}
        rests: dict[tuple[str, ...], int] = {}
        ranks = list(self.axes[self.ranked])
        for number, values in enumerate(product(*self.axes.values())):
            at = dict(zip(self.axes, values, strict=True))
            value = at.pop(self.ranked)
            rest = rests.setdefault(tuple(at.values()), len(rests))
            found[BETWEEN.join(values)] = CellPlace(
                number, ranks.index(value), rest, value == self.baseline
            )
        return found

    def place(self, name: str) -> CellPlace | None:
        """Return the place of a cell, of one with several names that of the first; None if the
        sweep has none.
        """
        places = self.places()
        if name in places:
            return places[name]
        for known, place in places.items():
            if name.startswith(known + ALIKE):
                return place
        return None
