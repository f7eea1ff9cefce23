"""Figures for papers, drawn by matplotlib: PDF, PNG and SVG on white.

The marks of a figure are drawn at their places, in the size that gives its text FONT_PT. Settings and fonts are those
that come with matplotlib, not the machine's, so one version of it gives the same bytes for the same figure. This module
alone imports matplotlib, and no pyplot.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any, Final

import matplotlib
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure as Canvas
from matplotlib.markers import MarkerStyle
from matplotlib.patches import Patch, PathPatch, Polygon, Rectangle
from matplotlib.transforms import Affine2D

from deploy.console.tabular import clean
from deploy.results.figures import CLASSES, COLOURS, HEAD, Dot, Figure, Line, Rect, Text

COLUMN_IN: Final = 3.5  # the width of a column in the styles of IEEE and ACM
PAGE_IN: Final = 7.16  # the width of their two columns
FONT_PT: Final = 8.0
PIXEL_PT: Final = FONT_PT / 12  # of a drawing, whose text has 12 pixels
PIXEL_IN: Final = PIXEL_PT / 72
DPI: Final = 300
PIXELS_MOST: Final = 60_000  # of a PNG's side; matplotlib has a limit of 65,535
MARKERS: Final = "os^Dvp*"  # by series
MARKER: Final = 6.75  # pixels: size of a marker
SETTINGS: Final[Mapping[Any, Any]] = {
    "font.size": FONT_PT,
    "text.parse_math": False,  # names may have dollar signs
    "pdf.fonttype": 42,  # TrueType; many journals refuse Type 3
    "svg.hashsalt": "fedstrata",
    "lines.scale_dashes": False,
}
_NO_DATE: Final = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
_SIDES: Final = {"start": "left", "middle": "center", "end": "right"}


def render(figure: Figure, formats: Iterable[str]) -> dict[str, bytes]:
    """Return the files of a figure by format: pdf, png or svg."""
    files = {}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        canvas = _canvas(figure)
        dpi = min(DPI, PIXELS_MOST / max(canvas.get_size_inches()))
        for kind in formats:
            file = io.BytesIO()
            canvas.savefig(file, format=kind, dpi=dpi, metadata=_NO_DATE.get(kind))
            files[kind] = file.getvalue()
    return files


def _canvas(figure: Figure) -> Canvas:
    """Draw a figure without its title, as wide as a column or as a page, or wider if its marks are."""
    drawing = figure.draw(True)
    (width, height), top = drawing.size, 0.0 if drawing.headed else HEAD
    whole = next((wide / PIXEL_IN for wide in (COLUMN_IN, PAGE_IN) if width * PIXEL_IN <= wide), width)
    left = (width - whole) / 2
    canvas = Canvas(figsize=(whole * PIXEL_IN, (height - top) * PIXEL_IN))
    axes = canvas.add_axes((0, 0, 1, 1), xlim=(left, left + whole), ylim=(height, top))
    axes.set_axis_off()
    patches = []
    for mark in drawing.marks:
        if isinstance(mark, Text):
            axes.text(mark.x, mark.y, clean(mark.content), color=COLOURS[mark.kind][0], ha=_SIDES[mark.anchor])
        else:
            patches.append(_patch(mark))
    axes.add_collection(PatchCollection(patches, match_original=True, joinstyle="round"), autolim=False)
    return canvas


def _patch(mark: Rect | Line | Dot) -> Patch:
    """Return a mark as matplotlib's, with the CSS properties of its classes."""
    css = {name: value for kind in mark.kind.split() for name, value in CLASSES.get(kind, {}).items()}
    fill, edge = css.get("fill", "none"), css.get("stroke", "none")
    looks: dict[str, Any] = {
        "facecolor": _ink(fill, float(css.get("fill-opacity", "1"))),
        "edgecolor": _ink(edge, float(css.get("stroke-opacity", "1"))),
        "linewidth": PIXEL_PT * float(css.get("stroke-width", "1")) * (edge != "none"),
    }
    if dashes := css.get("stroke-dasharray"):
        looks["linestyle"] = (0, [PIXEL_PT * float(length) for length in dashes.split()])
    match mark:
        case Line(points):
            return Polygon(points, closed=False, **looks)
        case Rect(x, y, width, height):
            looks["facecolor"] = _ink(fill, mark.opacity)
            return Rectangle((x, y), width, height, **looks)
        case Dot(x, y):
            marker = MarkerStyle(MARKERS[int(fill.removeprefix("s"))])
            place = marker.get_transform() + Affine2D().scale(MARKER, -MARKER).translate(x, y)  # y goes down
            return PathPatch(place.transform_path(marker.get_path()), **looks)


def _ink(colour: str, opacity: float) -> Any:
    return to_rgba(COLOURS[colour][0], opacity) if colour != "none" else "none"
