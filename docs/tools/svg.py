"""Matrices as shaded cells in an SVG file that is readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from deploy.results.figures import Drawing, Mark, Rect, Text, svg

CELL: Final = (54, 24)  # pixels
GAP: Final = 28
HEAD: Final = 40  # above the cells
LETTER: Final = 7  # pixels: approximate width of a letter


@dataclass(frozen=True, slots=True)
class SvgPanel:
    """A matrix [rows, columns] with labels. 0 is drawn as an empty cell, NaN is not drawn."""

    title: str
    weights: npt.NDArray[np.float64]
    rows: Sequence[str]
    columns: Sequence[str]

    @property
    def width(self) -> int:
        """The width in pixels."""
        return max(self._margin + CELL[0] * len(self.columns), LETTER * len(self.title))

    @property
    def height(self) -> int:
        """The height in pixels."""
        return HEAD + CELL[1] * len(self.rows)

    @property
    def _margin(self) -> int:
        return 8 + LETTER * max(map(len, self.rows))

    def draw(self, x: int, y: int) -> Iterator[Mark]:
        """Yield the marks, with the upper left corner at x, y."""
        left, top, (width, height) = x + self._margin, y + HEAD, CELL
        yield Text(x, y + 12, self.title)
        for j, label in enumerate(self.columns):
            yield Text(left + j * width + width // 2, top - 8, label, "middle")
        for i, label in enumerate(self.rows):
            yield Text(left - 6, top + i * height + 16, label, "end")
        for (i, j), weight in np.ndenumerate(self.weights):
            if np.isnan(weight):
                continue
            at_x, at_y = left + j * width, top + i * height
            if weight:
                yield Rect(at_x, at_y, width, height, "weight", opacity=0.1 + 0.6 * float(weight))
                yield Text(at_x + width // 2, at_y + 16, f"{weight:.3f}".rstrip("0").rstrip("."), "middle")
            yield Rect(at_x, at_y, width, height, "line")


def matrices(title: str, rows: Sequence[Sequence[SvgPanel]]) -> str:
    """Draw rows of matrices."""
    heights = [GAP + max(panel.height for panel in row) for row in rows]
    marks: list[Mark] = []
    for i, row in enumerate(rows):
        x, y = GAP // 2, GAP // 2 + sum(heights[:i])
        for panel in row:
            marks += panel.draw(x, y)
            x += panel.width + GAP
    width = max(sum(GAP + panel.width for panel in row) for row in rows)
    return svg(Drawing((width, sum(heights)), marks), title, "W: rows are the next models.")
