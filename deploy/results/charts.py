"""Line charts, and bars of stacked parts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fedstrata.deploy.console.tabular import Cell, Column, Spread, Table, clean, show
from fedstrata.deploy.results.figures import (
    COLOURS,
    COLUMN,
    LETTER,
    LINE,
    MARKERS,
    SERIES,
    Box,
    Canvas,
    Figure,
    Point,
    legend_height,
    line_style,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

MARKERS_MOST: Final = 15  # of a curve
HEIGHT: Final = 130.0  # points, of the axes of a chart
BELOW: Final = 32.0  # of the numbers and the head of an x axis
THICK: Final = 12.0  # of a horizontal bar
SAME: Final = " = "  # between the labels of equal curves
SEEN_LEAST: Final = 0.002  # of the longest bar: what is shorter is not drawn


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its quantity, its unit, and the factor from the unit of the points to that unit."""

    name: str
    unit: str = ""
    factor: float = 1.0
    # of the quantity, in the unit of the points: bands are drawn within
    bounds: Point = (-math.inf, math.inf)
    whole: bool = False  # whether it counts

    @property
    def head(self) -> str:
        """The name with its unit."""
        if self.unit:
            return f"{self.name}, {self.unit}"
        return self.name


@dataclass(frozen=True, slots=True)
class Curve:
    """A line; `deviations`: of each point, half the height of a band; `rest`: thin lines of the
    same colour.

    `style`: the numbers of its colour and of its dash pattern, by default those of its place among
    the lines.
    """

    points: Sequence[Point]
    deviations: Sequence[float] = ()
    rest: Sequence[Sequence[Point]] = ()
    style: tuple[int, int] | None = None

    @property
    def drawn(self) -> object:
        """What is seen of it but its style."""
        return self.points, self.deviations, self.rest

    def band(self, axis: Axis) -> list[tuple[float, float, float]]:
        """Return x, lower and upper end of the band at each point, within the axis's bounds."""
        low, high = axis.bounds
        spans = zip(self.points, self.deviations, strict=False)
        return [
            (x, max(y - deviation, low), min(y + deviation, high)) for (x, y), deviation in spans
        ]


def curves(
    name: str,
    title: str,
    lines: Mapping[str, Curve],
    *,
    x: Axis,
    y: Axis,
    target: float | None = None,
) -> Figure:
    """Draw each curve with its band, equal ones once, and `target` as a horizontal line."""
    shown = distinct(lines)

    def draw() -> Canvas:
        labels = list(shown) if len(lines) > 1 else []
        canvas, axes = chart(y.head, labels)
        handles = [_curve(canvas, axes, label, line, x, y) for label, line in shown.items()]
        if target is not None:
            _draw_target(axes, y.factor * target)
        most = axes.dataLim.xmax
        if not 0 < most < math.inf:  # infinite without a known value
            most = 1.0
        axes.set_xlim(0, most)
        axes.locator_params(axis="y", integer=y.whole)
        levels(axes)
        return finished(canvas, axes, x, dict(zip(labels, handles, strict=False)))

    return Figure(name, title, _last_points(lines, x, y), draw, _numbers(name, title, lines, x, y))


def _draw_target(axes: Axes, level: float) -> None:
    look: dict[str, Any] = {"color": COLOURS["soft"]}
    axes.axhline(level, linewidth=0.8, linestyle=(0, (1.3, 2)), **look)
    axes.annotate("target", (0, level), (3, 2), textcoords="offset points", **look)


def distinct(lines: Mapping[str, Curve]) -> dict[str, Curve]:
    """Return the different ones of some curves, each with a style, by the labels that it has."""
    found: list[tuple[list[str], Curve]] = []
    for i, (label, line) in enumerate(lines.items()):
        for names, other in found:
            if line.points and line.drawn == other.drawn:
                names.append(label)
                break
        else:
            found.append(([label], replace(line, style=line.style or (i, i))))
    return {SAME.join(names): line for names, line in found}


def bars(
    name: str,
    title: str,
    parts: Sequence[tuple[str, str]],
    rows: Mapping[str, Sequence[float]],
    *,
    axis: Axis,
) -> Figure:
    """Draw a horizontal stacked bar for each label, of parts (colour, label); its label and its sum
    are above it.
    """
    own = {}
    heads = []
    for label, values in rows.items():
        own[label] = [axis.factor * value for value in values]
        heads.append(f"{label}: {show(math.fsum(own[label]), 2)} {axis.unit}")
    pieces = _stacked(parts, own, axis.unit)
    longest = max(map(math.fsum, own.values()), default=0.0)

    def draw() -> Canvas:
        from matplotlib.patches import Patch

        tops = list[float]()
        height = 0.0
        above = [wrapped(head, COLUMN - 12) for head in heads]
        for lines in above:
            tops.append(height + LINE * len(lines) + 3)
            height = tops[-1] + THICK + 5
        canvas, axes = chart("", {piece.part for piece in pieces}, height=height)
        axes.set(xlim=(0, longest or 1), ylim=(height, 0), yticks=[])
        for lines, top in zip(above, tops, strict=True):
            axes.annotate("\n".join(lines), (0, top), (1, 3), textcoords="offset points")
        boxes = [Box(p.start, tops[p.bar], p.size, THICK, p.colour, p.tooltip) for p in pieces]
        canvas.boxes(axes, boxes)
        legend = {piece.part: Patch(color=COLOURS[piece.colour]) for piece in pieces}
        return finished(canvas, axes, axis, legend)

    columns = [Column("bar", text=True)]
    columns += [Column(part, axis.unit, 3) for _, part in parts]
    cells: list[Sequence[Cell]] = [(label, *values) for label, values in own.items()]
    return Figure(name, title, "; ".join(heads), draw, Table(name, title, columns, cells))


class BarPiece(NamedTuple):
    """A part of a stacked bar, which has this number."""

    colour: str
    part: str
    bar: int
    start: float
    size: float
    tooltip: str


def _stacked(
    parts: Sequence[tuple[str, str]], bars: Mapping[str, Sequence[float]], unit: str
) -> list[BarPiece]:
    """Return the pieces of stacked bars, part by part, without those that are too short to be
    seen.
    """
    least = SEEN_LEAST * max(map(math.fsum, bars.values()), default=0.0)
    starts = [0.0] * len(bars)
    found = []
    for place, (colour, part) in enumerate(parts):
        for i, (label, values) in enumerate(bars.items()):
            size = values[place]
            if size > least:
                tooltip = f"{label}, {part}: {show(size, 3)} {unit}"
                found.append(BarPiece(colour, part, i, starts[i], size, tooltip))
            starts[i] += size
    return found


def chart(head: str, labels: Collection[str], *, height: float = HEIGHT) -> tuple[Canvas, Axes]:
    """Return a canvas with axes of a height, and room for what stands above and below them."""
    top = 2 * LINE if head else LINE / 2
    canvas = Canvas(COLUMN, top + height + BELOW + legend_height(labels, COLUMN))
    axes = canvas.axes()
    canvas.place(axes, left=8, top=top, right=12, bottom=canvas.size[1] - top - height)
    canvas.sheet.text(0.005, 1 - 2 / canvas.size[1], clean(head), va="top", color=COLOURS["soft"])
    axes.locator_params(nbins=6, steps=[1, 2, 5, 10])
    return canvas, axes


def levels(axes: Axes) -> None:
    """Number the y axis from a round number below all data to one above, and draw a line for
    each.
    """
    low, high = axes.dataLim.intervaly
    if not math.isfinite(high - low):  # without data, or of unknown values alone
        low = 0.0
        high = 1.0
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        high = low + (abs(low) or 1.0)
    found = axes.yaxis.get_major_locator().tick_values(low, high)
    axes.set_yticks(found, [number(tick) for tick in found])
    axes.set_ylim(found[0], found[-1])
    axes.grid(visible=True, axis="y")


def finished(canvas: Canvas, axes: Axes, x: Axis, handles: Mapping[str, Artist]) -> Canvas:
    """Add the numbers and the head of the x axis, room for the numbers of the y axis, and a legend
    by label.
    """
    axes.set_xlabel(clean(x.head))
    axes.locator_params(axis="x", integer=x.whole)
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    place = axes.get_position()
    left = 8 + LETTER * max((len(label.get_text()) for label in axes.get_yticklabels()), default=0)
    right = max(12.0, LETTER / 2 * len(number(axes.get_xlim()[1])) + 2)
    axes.set_position((left / COLUMN, place.y0, 1 - (left + right) / COLUMN, place.height))
    if handles:
        canvas.legend(handles)
    return canvas


def number(value: float) -> str:
    """Return a number of an axis."""
    if abs(value) < 1e4:
        return f"{value:.4g}"
    return show(round(value))


def _curve(canvas: Canvas, axes: Axes, label: str, line: Curve, x: Axis, y: Axis) -> Artist:
    """Draw a curve: its band, its thin lines, and the line itself with its markers."""
    colour, dash = line.style or (0, 0)
    look = line_style(colour, dash)
    if len(line.deviations) > 1:
        across, low, high = (np.array(each) for each in zip(*line.band(y), strict=True))
        look_of_band = {"color": look["color"], "alpha": 0.16, "linewidth": 0}
        axes.fill_between(x.factor * across, y.factor * low, y.factor * high, **look_of_band)
    for rest in line.rest:
        axes.plot(*scaled(rest, x, y), linewidth=0.7, alpha=0.7, **look)
    every = max(1, -(-len(line.points) // MARKERS_MOST))
    (drawn,) = axes.plot(
        *scaled(line.points, x, y),
        marker=MARKERS[colour % SERIES],
        markeredgewidth=0,
        markevery=every,
        clip_on=False,
        **look,
    )
    texts = []
    for place, level in line.points[::every]:
        where = f"{number(x.factor * place)} {x.unit or x.name}, {y.factor * level:.4g} {y.unit}"
        texts.append(f"{label}: {where}")
    canvas.describe(drawn, texts)
    return drawn


def scaled(points: Sequence[Point], x: Axis, y: Axis) -> tuple[list[float], list[float]]:
    """Return the numbers of points on two axes."""
    return [x.factor * at for at, _ in points], [y.factor * level for _, level in points]


def _last_points(lines: Mapping[str, Curve], x: Axis, y: Axis) -> str:
    texts = []
    for label, line in lines.items():
        for at, level in line.points[-1:]:
            where = f"{number(x.factor * at)} {x.unit or x.name}"
            texts.append(f"{label}: {y.factor * level:.4g} {y.unit} at {where}")
    return "; ".join(texts)


def _numbers(name: str, title: str, lines: Mapping[str, Curve], x: Axis, y: Axis) -> Table:
    """Return the points of curves, with their deviations if there are bands."""
    banded = any(line.deviations for line in lines.values())
    columns = [Column("series", text=True), Column(x.name, x.unit, 4), Column(y.name, y.unit, 4)]
    rows: list[Sequence[Cell]] = []
    for label, line in lines.items():
        for i, (at, level) in enumerate(line.points):
            cell: Cell = y.factor * level
            if banded:
                deviation = y.factor * line.deviations[i] if line.deviations else None
                cell = Spread(y.factor * level, deviation)
            rows.append((label, x.factor * at, cell))
    return Table(name, title, columns, rows)
