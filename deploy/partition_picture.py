"""A picture of a split: a row for each device, a column for each class, darker where a device has more samples."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

CELL, LEFT, TOP, GAP = 14, 190, 46, 6  # pixels
INK = "#1f5a99"


def draw(counts: npt.NDArray[np.int64], *, rows: Sequence[tuple[str, str]], title: str) -> str:
    """Return an SVG of samples per device and class, int64 [devices, classes].

    `rows` are (institution, device) in the order of `counts`, an institution's devices together. The area of a cell
    is its share of the fullest one; its title tells the number.
    """
    classes = counts.shape[1]
    most = max(int(counts.max(initial=0)), 1)
    step = max(1, -(-classes // 20))
    shapes = [f'<text x="8" y="18" font-size="13">{escape(title)}</text>']
    shapes += [
        f'<text x="{LEFT + CELL * label + CELL / 2:.0f}" y="{TOP - 6}" text-anchor="middle">{label}</text>'
        for label in range(0, classes, step)
    ]
    y, home = float(TOP), rows[0][0] if rows else ""
    for (institution, device), held in zip(rows, counts, strict=True):
        if institution != home:
            y, home = y + GAP, institution
        name = escape(f"{institution} / {device}")
        shapes.append(f'<text x="{LEFT - 8}" y="{y + 11:.0f}" text-anchor="end">{name}</text>')
        for label in np.flatnonzero(held):
            side = max(1.0, (CELL - 2) * float(np.sqrt(held[label] / most)))
            x_cell, y_cell = LEFT + CELL * label + (CELL - side) / 2, y + (CELL - side) / 2
            shapes.append(
                f'<rect x="{x_cell:.1f}" y="{y_cell:.1f}" width="{side:.1f}" height="{side:.1f}" fill="{INK}">'
                f"<title>{name}, class {label}: {held[label]}</title></rect>"
            )
        shapes.append(f'<text x="{LEFT + CELL * classes + 8}" y="{y + 11:.0f}">{held.sum()}</text>')
        y += CELL
    width, height = max(LEFT + CELL * classes + 70, 16 + 8 * len(title)), y + 10
    frame = f'<rect x="{LEFT}" y="{TOP}" width="{CELL * classes}" height="{y - TOP:.0f}" fill="none" stroke="#999"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" font-family="sans-serif" '
        f'font-size="10"><rect width="100%" height="100%" fill="white"/>\n' + "\n".join([*shapes, frame]) + "\n</svg>\n"
    )
