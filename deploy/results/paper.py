"""Figures for papers, drawn by matplotlib: PDF, PNG and SVG on white, charts in the width of a column.

Charts are drawn from their numbers, drawings from the elements of their SVG. Settings and fonts are those that come
with matplotlib, not the machine's, so one version of it gives the same bytes for the same figure. This module alone
imports matplotlib, and no pyplot.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from textwrap import fill
from typing import Any, Final
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from deploy.console.tabular import clean, show
from deploy.results.charts import COLUMN, PLOT, SAME, BarsFigure, ColumnsFigure, CurvesFigure, distinct, seen
from deploy.results.figures import COLOURS, DASHES, HEAD, Figure

COLUMN_IN: Final = 3.5  # the width of a column in the styles of IEEE and ACM
PAGE_IN: Final = 7.16  # the width of their two columns
FONT_PT: Final = 8.0
PIXEL_IN: Final = FONT_PT / 72 / 12  # inches per pixel of a drawing, whose text has 12 pixels
LETTERS: Final = 52  # that fit into a column
DPI: Final = 300
PIXELS_MOST: Final = 60_000  # of a PNG's side; matplotlib has a limit of 65,535
MARKERS: Final = "os^Dvp*"
SETTINGS: Final[Mapping[Any, Any]] = {
    "font.size": FONT_PT,
    "text.parse_math": False,  # names may have dollar signs
    "pdf.fonttype": 42,  # TrueType; many journals refuse Type 3
    "svg.hashsalt": "fedstrata",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": COLOURS["grid"][0],
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
}
_NO_DATE: Final = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
# (fill, edge) by the CSS class of a drawing's element; "" is none.
_PAINT: Final = {"weight": ("s0", ""), "node": ("ground", "line"), "grid": ("", "grid"), "line": ("", "line")}
_SIDES: Final = {"start": "left", "middle": "center", "end": "right"}


def render(figure: Figure, formats: Iterable[str]) -> dict[str, bytes]:
    """Return the files of a figure by format: pdf, png or svg."""
    files = {}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        canvas = _chart(figure) if isinstance(figure, CurvesFigure | BarsFigure | ColumnsFigure) else _drawing(figure)
        dpi = min(DPI, PIXELS_MOST / max(canvas.get_size_inches()))
        for kind in formats:
            file = io.BytesIO()
            canvas.savefig(file, format=kind, dpi=dpi, metadata=_NO_DATE.get(kind))
            files[kind] = file.getvalue()
    return files


def _chart(figure: CurvesFigure | BarsFigure | ColumnsFigure) -> Canvas:
    """Draw a chart in the width of a column, with its legend below."""
    canvas = Canvas(layout="constrained")
    axes = canvas.add_subplot()
    match figure:
        case CurvesFigure():
            height = _curves(axes, figure)
        case BarsFigure():
            height = _bars(axes, figure)
        case ColumnsFigure():
            height = _columns(axes, figure)
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        across = max(1, LETTERS // (8 + max(map(len, labels))))
        lines = math.ceil(len(labels) / across) * max(label.count("\n") + 1 for label in labels)
        canvas.legend(handles, labels, loc="outside lower center", ncols=across)
        height += 0.18 * lines
    canvas.set_size_inches(COLUMN_IN, height)
    return canvas


def _curves(axes: Axes, figure: CurvesFigure) -> float:
    """Draw lines, each with its own colour, dash pattern and marker; return the height in inches without a legend."""
    x, y = figure.x, figure.y
    for style, names, line in distinct(figure.lines):
        dashes = [float(length) / 2 for length in DASHES[style[1]].split()]  # for a line of 2 pixels
        colour, points = _colour(f"s{style[0]}"), line.points
        if band := line.band(y):
            at, low, high = (list(numbers) for numbers in zip(*band, strict=True))
            lower, upper = ([y.factor * level for level in side] for side in (low, high))
            axes.fill_between([x.factor * place for place in at], lower, upper, color=colour, alpha=0.16, linewidth=0)
        for rest in line.rest:
            places, levels = [x.factor * at for at, _ in rest], [y.factor * level for _, level in rest]
            axes.plot(places, levels, color=colour, linewidth=0.6, alpha=0.7)
        axes.plot(
            [x.factor * at for at, _ in points], [y.factor * level for _, level in points],
            color=colour, linestyle=(0, dashes) if dashes else "-", label=_wrapped(SAME.join(names)),
            marker=MARKERS[style[0]], markevery=max(1, len(points) // 10),
        )  # fmt: skip
    if figure.target is not None:
        axes.axhline(y.factor * figure.target, color=_colour("soft"), linestyle=":", label="target")
    axes.set(xlabel=x.head, ylabel=y.head, xlim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=not x.unit))  # without a unit: global rounds
    axes.grid()
    return 2.1


def _bars(axes: Axes, figure: BarsFigure) -> float:
    """Draw horizontal stacked bars below their labels; return the height in inches without a legend."""
    y, places, factor = 0.0, [], figure.axis.factor  # y in lines of text, downward
    for label, values in figure.rows.items():
        above = _wrapped(f"{label}: {show(factor * math.fsum(values), 2)} {figure.axis.unit}")
        y += 1 + above.count("\n")
        axes.text(0, y, above, va="bottom")
        places.append(y + 0.7)
        y += 2
    ends = [0.0] * len(places)
    visible = seen([*figure.rows.values()], PLOT)
    for i, ((kind, part), there) in enumerate(zip(figure.parts, visible, strict=False)):
        widths = [factor * values[i] for values in figure.rows.values()]
        axes.barh(places, widths, 1.3, ends, color=_colour(kind), label=part if there else "")
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.set(xlabel=figure.axis.head, ylim=(y, -0.4), yticks=[])
    axes.spines.left.set_visible(False)
    axes.grid(axis="x")
    return 0.4 + 0.15 * y


def _columns(axes: Axes, figure: ColumnsFigure) -> float:
    """Draw vertical stacked bars without gaps; return the height in inches without a legend."""
    bars = figure.values or [[0.0] * len(figure.parts)]
    edges, tops = [0.5 + i for i in range(len(bars) + 1)], [0.0] * len(bars)
    for i, ((kind, part), there) in enumerate(zip(figure.parts, seen(bars, COLUMN), strict=True)):
        floors, tops = tops, [top + figure.axis.factor * bar[i] for top, bar in zip(tops, bars, strict=True)]
        axes.stairs(tops, edges, baseline=floors, fill=True, color=_colour(kind), label=part if there else "")
    axes.set(xlabel=figure.x.head, ylabel=figure.axis.head, xlim=(0.5, len(tops) + 0.5), ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.grid(axis="y")
    return 1.8


def _drawing(figure: Figure) -> Canvas:
    """Draw the elements of a figure at their places, in the size that gives its text FONT_PT, without its title.

    It is as wide as a column or as a page, or wider if its elements are.
    """
    (width, height), top = figure.size, HEAD if figure.headed else 0.0
    whole = next((wide / PIXEL_IN for wide in (COLUMN_IN, PAGE_IN) if width * PIXEL_IN <= wide), width)
    canvas = Canvas(figsize=(whole * PIXEL_IN, (height - top) * PIXEL_IN))
    left = (width - whole) / 2
    axes = canvas.add_axes((0, 0, 1, 1), xlim=(left, left + whole), ylim=(height, top))
    axes.set_axis_off()
    boxes = []
    for element in ElementTree.fromstring(f"<g>{''.join(figure.elements)}</g>"):
        kind = element.get("class", "ink")
        x, y, wide, high = (float(element.get(key, "0")) for key in ("x", "y", "width", "height"))
        match element.tag:
            case "text":
                side = _SIDES[element.get("text-anchor", "start")]
                axes.text(x, y, element.text or "", color=_colour(kind), ha=side)
            case "path":
                points = [point.split() for point in element.get("d", "").removeprefix("M").split("L")]
                columns = ([float(number) for number in numbers] for numbers in zip(*points, strict=True))
                axes.plot(*columns, color=_colour(_paint(kind)[1]), linewidth=0.7)
            case "rect":
                inside, edge = _paint(kind)
                ink = to_rgba(_colour(inside), float(element.get("fill-opacity", "1"))) if inside else "none"
                outline = _colour(edge) if edge else "none"
                boxes.append(Rectangle((x, y), wide, high, facecolor=ink, edgecolor=outline, linewidth=0.7))
    axes.add_collection(PatchCollection(boxes, match_original=True), autolim=False)
    return canvas


def _paint(kind: str) -> tuple[str, str]:
    """Return the colours of a shape's inside and edge by its CSS classes, "" for none."""
    if kind.startswith("fill-"):
        return kind.removeprefix("fill-"), ""
    return _PAINT.get(kind) or ("", kind.split(maxsplit=1)[0].removeprefix("stroke-"))


def _wrapped(label: str) -> str:
    return fill(clean(label), LETTERS)


def _colour(kind: str) -> str:
    return COLOURS[kind.removeprefix("fill-")][0]
