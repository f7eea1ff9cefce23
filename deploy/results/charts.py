"""Line charts and stacked bar charts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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

MARKERS_MOST: Final = (30, 10)  # markers of a curve on a page, and on a paper, about
HEIGHT: Final = 130.0  # points, of the axes of a chart
BELOW: Final = 32.0  # of the numbers and the head of an x axis
THICK: Final = 12.0  # of a horizontal bar
GAP: Final = 0.2  # between vertical bars, a part of one
SAME: Final = " = "  # between the labels of equal curves
SEEN_LEAST: Final = 0.002  # of the longest bar: what is shorter is not drawn
COLUMNS_MOST: Final = 30  # bars up to which each is drawn; more are averaged


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
    short: Mapping[str, str] | None = None,
) -> Figure:
    """Draw each curve with its band, equal ones once, and `target` as a horizontal line.

    `short`: names for the legend of a page, by label.
    """
    shown = distinct(lines)

    def draw(paper: bool) -> Canvas:
        of = {} if paper else short or {}
        if len(lines) > 1:
            labels = [SAME.join(of.get(label, label) for label in names) for names, _ in shown]
        else:
            labels = []
        canvas, axes = chart(y.head, labels)
        handles: list[Artist] = []
        for names, line in shown:
            look = line_style(*(line.style or (0, 0)))
            if len(line.deviations) > 1:
                band = [
                    (x.factor * at, y.factor * least, y.factor * most)
                    for at, least, most in line.band(y)
                ]
                across, low, high = zip(*band, strict=True)
                axes.fill_between(across, low, high, color=look["color"], alpha=0.16, linewidth=0)
            for rest in line.rest:
                axes.plot(*scaled(rest, x, y), linewidth=0.7, alpha=0.7, **look)
            handles.append(_curve(canvas, axes, names, line, x, y, MARKERS_MOST[paper], look))
        if target is not None:
            axes.axhline(
                y.factor * target, color=COLOURS["soft"], linewidth=0.8, linestyle=(0, (1.3, 2))
            )
            axes.annotate(
                "target",
                (0, y.factor * target),
                (3, 2),
                textcoords="offset points",
                color=COLOURS["soft"],
            )
        most = axes.dataLim.xmax  # infinite without a known value
        axes.set_xlim(0, most if 0 < most < math.inf else 1)
        axes.locator_params(axis="y", integer=y.whole)
        levels(axes)
        return finished(canvas, axes, x, dict(zip(labels, handles, strict=False)))

    return Figure(name, title, _last_points(lines, x, y), draw, _numbers(name, title, lines, x, y))


def distinct(lines: Mapping[str, Curve]) -> list[tuple[list[str], Curve]]:
    """Return the different ones of some curves, each with its labels and a style."""
    found: list[tuple[list[str], Curve]] = []
    for i, (label, line) in enumerate(lines.items()):
        drawn = (line.points, line.deviations, line.rest)
        for names, other in found:
            if line.points and drawn == (other.points, other.deviations, other.rest):
                names.append(label)
                break
        else:
            found.append(([label], Curve(*drawn, line.style or (i, i))))
    return found


def bars(
    name: str,
    title: str,
    parts: Sequence[tuple[str, str]],
    rows: Mapping[str, Sequence[float]],
    *,
    axis: Axis,
    short: Mapping[str, str] | None = None,
) -> Figure:
    """Draw a horizontal stacked bar for each label, of parts (colour, label); its label and its sum
    are above it.

    `short`: names for the bars of a page, by label.
    """
    own = [[axis.factor * value for value in values] for values in rows.values()]
    sums = [math.fsum(values) for values in own]
    pieces = _stacked(parts, own, list(rows), axis.unit)

    def heads(of: Mapping[str, str]) -> list[str]:
        return [
            f"{of.get(label, label)}: {show(total, 2)} {axis.unit}"
            for label, total in zip(rows, sums, strict=True)
        ]

    def draw(paper: bool) -> Canvas:
        tops = list[float]()
        height = 0.0
        above = [wrapped(head, COLUMN - 12) for head in heads({} if paper else short or {})]
        for lines in above:
            tops.append(height + LINE * len(lines) + 3)
            height = tops[-1] + THICK + 5
        canvas, axes = chart("", {piece.part for piece in pieces}, height=height)
        axes.set(xlim=(0, max(sums, default=0.0) or 1), ylim=(height, 0), yticks=[])
        for lines, top in zip(above, tops, strict=True):
            axes.annotate("\n".join(lines), (0, top), (1, 3), textcoords="offset points")
        canvas.boxes(
            axes, [Box(p.start, tops[p.bar], p.size, THICK, p.colour, p.tooltip) for p in pieces]
        )
        return finished(canvas, axes, axis, swatches(pieces))

    columns = (Column("bar", text=True), *(Column(part, axis.unit, 3) for _, part in parts))
    table = Table(
        name, title, columns, [(label, *values) for label, values in zip(rows, own, strict=True)]
    )
    return Figure(name, title, "; ".join(heads(short or {})), draw, table)


def columns(
    name: str,
    title: str,
    parts: Sequence[tuple[str, str]],
    values: Sequence[Sequence[float]],
    *,
    x: Axis,
    axis: Axis,
) -> Figure:
    """Draw a vertical stacked bar for each of `values` [bars][parts]. Above COLUMNS_MOST,
    neighbours are averaged.
    """
    own = np.asarray(values, dtype=float).reshape(-1, len(parts)) * axis.factor
    joined = max(1, math.ceil(len(own) / COLUMNS_MOST))
    starts = range(0, len(own), joined)
    means = [own[start : start + joined].mean(axis=0).tolist() for start in starts]
    ends = [min(start + joined, len(own)) for start in starts]
    labels = [
        f"{x.name} {i + 1}" if joined == 1 else f"{x.name} {i + 1} to {j}"
        for i, j in zip(starts, ends, strict=True)
    ]
    pieces = _stacked(parts, means, labels, axis.unit)

    def draw(paper: bool) -> Canvas:
        canvas, axes = chart(axis.head, {piece.part for piece in pieces})
        wide = joined * (1 - GAP)
        canvas.boxes(
            axes,
            [
                Box(
                    starts[p.bar] + (1 + joined - wide) / 2,
                    p.start,
                    wide,
                    p.size,
                    p.colour,
                    p.tooltip,
                )
                for p in pieces
            ],
        )
        axes.update_datalim([(1, 0), (1, max(map(math.fsum, means), default=0.0))])
        axes.set_xlim(0.5, max(len(own), 1) + 0.5)
        levels(axes)
        return finished(canvas, axes, x, swatches(pieces))

    heads = (Column(x.name), *(Column(part, axis.unit, 3) for _, part in parts))
    table = Table(name, title, heads, [(i, *bar) for i, bar in enumerate(own.tolist(), 1)])
    text = f"{len(own)} bars" if joined == 1 else f"Each bar is the mean of {joined} global rounds"
    return Figure(name, title, text, draw, table)


class BarPiece(NamedTuple):
    """A part of a stacked bar, which has this number."""

    colour: str
    part: str
    bar: int
    start: float
    size: float
    tooltip: str


def _stacked(
    parts: Sequence[tuple[str, str]],
    bars: Sequence[Sequence[float]],
    labels: Sequence[str],
    unit: str,
) -> list[BarPiece]:
    """Return the pieces of stacked bars, part by part, without those that are too short to be
    seen.
    """
    least = SEEN_LEAST * max(map(math.fsum, bars), default=0.0)
    starts = [0.0] * len(bars)
    found = []
    for place, (colour, part) in enumerate(parts):
        for i, values in enumerate(bars):
            size = values[place]
            if size > least:
                tooltip = f"{labels[i]}, {part}: {show(size, 3)} {unit}"
                found.append(BarPiece(colour, part, i, starts[i], size, tooltip))
            starts[i] += size
    return found


def swatches(pieces: Sequence[BarPiece]) -> dict[str, Artist]:
    """Return what a legend of the parts has."""
    from matplotlib.patches import Patch

    return {piece.part: Patch(color=COLOURS[piece.colour]) for piece in pieces}


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


def _curve(
    canvas: Canvas,
    axes: Axes,
    names: Sequence[str],
    line: Curve,
    x: Axis,
    y: Axis,
    markers: int,
    look: dict[str, Any],
) -> Artist:
    """Draw the line of a curve with its markers."""
    every = max(1, -(-len(line.points) // markers))
    marker = MARKERS[(line.style or (0, 0))[0] % SERIES]
    (drawn,) = axes.plot(
        *scaled(line.points, x, y),
        marker=marker,
        markeredgewidth=0,
        markevery=every,
        clip_on=False,
        **look,
    )
    texts = []
    for at, level in line.points[::every]:
        where = f"{number(x.factor * at)} {x.unit or x.name}, {y.factor * level:.4g} {y.unit}"
        texts.append(f"{SAME.join(names)}: {where}")
    canvas.describe(drawn, texts)
    return drawn


def scaled(points: Sequence[Point], x: Axis, y: Axis) -> tuple[list[float], list[float]]:
    """Return the numbers of points on two axes."""
    return [x.factor * at for at, _ in points], [y.factor * level for _, level in points]


def _last_points(lines: Mapping[str, Curve], x: Axis, y: Axis) -> str:
    ends = {label: line.points[-1] for label, line in lines.items() if line.points}
    return "; ".join(
        f"{label}: {y.factor * level:.4g} {y.unit} at {number(x.factor * at)} {x.unit or x.name}"
        for label, (at, level) in ends.items()
    )


def _numbers(name: str, title: str, lines: Mapping[str, Curve], x: Axis, y: Axis) -> Table:
    """Return the points of curves, with their deviations if there are bands."""
    banded = any(line.deviations for line in lines.values())
    columns = [Column("series", text=True), Column(x.name, x.unit, 4), Column(y.name, y.unit, 4)]
    rows: list[Sequence[Cell]] = []
    for label, line in lines.items():
        for i, (at, level) in enumerate(line.points):
            deviation = y.factor * line.deviations[i] if line.deviations else None
            cell = Spread(y.factor * level, deviation) if banded else y.factor * level
            rows.append((label, x.factor * at, cell))
    return Table(name, title, columns, rows)
