"""Small SVG files: matrices as shaded cells, and curves, readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np
import numpy.typing as npt

CELL: Final = (54, 24)  # pixels
GAP: Final = 28
HEAD: Final = 40  # above the cells
LETTER: Final = 7  # pixels of a letter, about
# A picture in a page is told what the reader prefers, not what the page looks like: it brings its own ground.
STYLE: Final = """text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: #1f2328 }
.ground { fill: #ffffff } .weight { fill: #0969da } .line { fill: none; stroke: #8c959f }
.curve { fill: none; stroke: #0969da; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .ground { fill: #0d1117 } .weight { fill: #1f6feb } .line { stroke: #6e7681 }
.curve { stroke: #4493f8 } }"""


@dataclass(frozen=True, slots=True)
class Panel:
    """A matrix [rows, columns] with its labels: 0 is an empty cell, NaN is no cell."""

    title: str
    weights: npt.NDArray[np.float64]
    rows: Sequence[str]
    columns: Sequence[str]

    @property
    def width(self) -> int:
        """Return pixels."""
        return max(self._margin + CELL[0] * len(self.columns), LETTER * len(self.title))

    @property
    def height(self) -> int:
        """Return pixels."""
        return HEAD + CELL[1] * len(self.rows)

    @property
    def _margin(self) -> int:
        return 8 + LETTER * max(map(len, self.rows))

    def draw(self, x: int, y: int) -> Iterator[str]:
        """Return the elements, the upper left corner at x, y."""
        left, top, (width, height) = x + self._margin, y + HEAD, CELL
        yield _text(x, y + 12, self.title)
        for j, label in enumerate(self.columns):
            yield _text(left + j * width + width // 2, top - 8, label, anchor="middle")
        for i, label in enumerate(self.rows):
            yield _text(left - 6, top + i * height + 16, label, anchor="end")
        for (i, j), weight in np.ndenumerate(self.weights):
            if np.isnan(weight):
                continue
            at_x, at_y = left + j * width, top + i * height
            place = f'x="{at_x}" y="{at_y}" width="{width}" height="{height}"'
            if weight:
                yield f'<rect class="weight" {place} fill-opacity="{0.1 + 0.6 * float(weight):.2f}"/>'
                yield _text(at_x + width // 2, at_y + 16, f"{weight:.3f}".rstrip("0").rstrip("."), anchor="middle")
            yield f'<rect class="line" {place}/>'


def matrices(title: str, rows: Sequence[Sequence[Panel]]) -> str:
    """Draw matrices in rows."""
    heights = [GAP + max(panel.height for panel in row) for row in rows]
    elements: list[str] = []
    for i, row in enumerate(rows):
        x, y = GAP // 2, GAP // 2 + sum(heights[:i])
        for panel in row:
            elements += panel.draw(x, y)
            x += panel.width + GAP
    return _file(title, max(sum(GAP + panel.width for panel in row) for row in rows), sum(heights), elements)


def curve(
    title: str,
    points: Sequence[tuple[float, float]],
    *,
    x_ticks: Mapping[str, float],
    y_ticks: Mapping[str, float],
    axis: str,
) -> str:
    """Draw y over x, between the outer ticks of both; `axis` names x."""
    (left, top), (width, height) = (48, HEAD), (420, 180)
    (x_low, x_high), (y_low, y_high) = ((min(ticks.values()), max(ticks.values())) for ticks in (x_ticks, y_ticks))

    def at_x(x: float) -> float:
        return left + width * (x - x_low) / (x_high - x_low)

    def at_y(y: float) -> float:
        return top + height * (y_high - y) / (y_high - y_low)

    elements = [_text(left, 22, title)]
    for label, x in x_ticks.items():
        elements.append(f'<path class="line" d="M{at_x(x):.0f} {top}v{height}"/>')
        elements.append(_text(round(at_x(x)), top + height + 18, label, anchor="middle"))
    for label, y in y_ticks.items():
        elements.append(f'<path class="line" d="M{left} {at_y(y):.0f}h{width}"/>')
        elements.append(_text(left - 8, round(at_y(y)) + 4, label, anchor="end"))
    path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points)
    elements.append(f'<path class="curve" d="M{path}"/>')
    elements.append(_text(left + width // 2, top + height + 38, axis, anchor="middle"))
    return _file(title, left + width + GAP, top + height + 52, elements)


def _text(x: int, y: int, words: str, *, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def _file(title: str, width: int, height: int, elements: Sequence[str]) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        '<rect class="ground" width="100%" height="100%"/>',
        *elements,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
