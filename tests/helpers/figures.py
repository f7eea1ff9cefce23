"""What a figure draws: the artists of matplotlib, with their numbers, and the texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.text import Text

from fedstrata.deploy.results.figures import Canvas, Figure, style


def drawn(figure: Figure) -> Canvas:
    """Draw a figure."""
    with style():
        canvas = figure.draw()
        canvas.sheet.draw_without_rendering()
    return canvas


def texts(figure: Figure) -> list[str]:
    """Return the texts of a figure."""
    found = drawn(figure).sheet.findobj(Text)
    return [text.get_text() for text in found if text.get_visible() and text.get_text()]


def tooltips(canvas: Canvas) -> list[str]:
    """Return the tooltips of a figure."""
    return [text for own in canvas.tooltips.values() for text in own]


def curves_of(canvas: Canvas) -> dict[str, Line2D]:
    """Return the lines with markers by the name in their tooltips."""
    found = {}
    for line in canvas.sheet.findobj(Line2D):
        if texts := canvas.tooltips.get(line.get_gid() or ""):
            found[texts[0].partition(":")[0]] = line
    return found


def boxes_of(canvas: Canvas) -> Sequence[tuple[float, ...]]:
    """Return the rectangles of a figure: left, bottom, width, height."""
    found = []
    for each in canvas.sheet.findobj(PolyCollection):
        if each.get_gid():
            for path in each.get_paths():
                corners: Any = np.asarray(path.vertices)[:4]
                low, high = corners.min(axis=0), corners.max(axis=0)
                found.append((*low.tolist(), *(high - low).tolist()))
    return found
