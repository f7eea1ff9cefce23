"""Line charts and stacked bar charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from deploy.console.tabular import Cell, Column, Spread, Table, show
from deploy.results.figures import DASHES, SERIES, Figure, dot, legend, path, rect, text, wrapped

Point = tuple[float, float]
DOTS_MOST = 60  # points of a curve up to which each has a marker
PLOT = 340.0  # pixels: width of a chart between its axes
COLUMN = 150.0  # pixels: height of a chart of columns
SEEN_LEAST = 3.0  # pixels of a part of a bar whose colour can be seen
SAME = " = "  # between the labels of equal curves
COLUMNS_MOST = 60  # bars up to which each is drawn; more are averaged


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its quantity, its unit, and the factor from the unit of the points to that unit."""

    name: str
    unit: str = ""
    factor: float = 1.0
    bounds: Point = (-math.inf, math.inf)  # of the quantity, in the unit of the points: bands are drawn within

    @property
    def head(self) -> str:
        """The name with its unit."""
        return f"{self.name}, {self.unit}" if self.unit else self.name


@dataclass(frozen=True, slots=True)
class Curve:
    """A line; `deviations`: of each point, half the height of a band; `rest`: thin lines of the same colour.

    `style`: the numbers of its colour and of its dash pattern, by default those of its place among the lines.
    """

    points: Sequence[Point]
    deviations: Sequence[float] = ()
    rest: Sequence[Sequence[Point]] = ()
    style: tuple[int, int] | None = None

    def band(self, axis: Axis) -> list[tuple[float, float, float]]:
        """Return x, lower and upper end of the band at each point, within the axis's bounds."""
        low, high = axis.bounds
        spans = zip(self.points, self.deviations, strict=False)
        return [(x, max(y - deviation, low), min(y + deviation, high)) for (x, y), deviation in spans]

    def every_point(self, axis: Axis) -> list[Point]:
        """Return the points of all lines, and the corners of the band."""
        corners = [(x, y) for x, *ends in self.band(axis) for y in ends]
        return [*self.points, *corners, *(point for line in self.rest for point in line)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvesFigure(Figure):
    """A chart of curves by label, and of a horizontal line at `target`; points are not yet in the axes' units."""

    lines: Mapping[str, Curve]
    x: Axis
    y: Axis
    target: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BarsFigure(Figure):
    """A chart of horizontal stacked bars by label, of parts (CSS class, label)."""

    parts: Sequence[tuple[str, str]]
    rows: Mapping[str, Sequence[float]]
    axis: Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnsFigure(Figure):
    """A chart of vertical stacked bars [bars][parts], of parts (CSS class, label)."""

    parts: Sequence[tuple[str, str]]
    values: Sequence[Sequence[float]]
    x: Axis
    axis: Axis


def curves(
    name: str,
    title: str,
    lines: Mapping[str, Curve],
    *,
    x: Axis,
    y: Axis,
    target: float | None = None,
    short: Mapping[str, str] | None = None,
) -> CurvesFigure:
    """Draw each curve with its band, equal ones once, and `target` as a horizontal line.

    `short`: names for the legend by label.
    """
    (left, top), (width, height) = (46.0, 34.0), (PLOT, 200.0)
    points = [point for line in lines.values() for point in line.every_point(y)]
    x_ticks = ticks(0.0, x.factor * max((at for at, _ in points), default=1.0))
    levels = [y.factor * level for _, level in points] + ([] if target is None else [y.factor * target])
    y_ticks = ticks(min(levels, default=0.0), max(levels, default=1.0))

    def place(point: Point) -> Point:
        across = (x.factor * point[0] - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y.factor * point[1] - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return left + width * across, top + height * (1 - up)

    elements = list[str]()
    for tick in y_ticks:
        _, at = place((0.0, tick / y.factor))
        elements += [path([(left, at), (left + width, at)], "grid"), text(left - 6, at + 4, _tick(tick), anchor="end")]
    for tick in x_ticks:
        at, _ = place((tick / x.factor, 0.0))
        elements += [
            path([(at, top + height), (at, top + height + 4)], "line"),
            text(at, top + height + 18, _tick(tick), anchor="middle"),
        ]
    elements.append(path([(left, top + height), (left + width, top + height)], "line"))
    elements.append(text(left + width / 2, top + height + 36, x.head, anchor="middle", kind="soft"))
    if target is not None:
        _, at = place((0.0, target))
        elements.append(path([(left, at), (left + width, at)], "target"))
        elements.append(text(left + 4, at - 4, "target", kind="soft"))
    shown = distinct(lines)
    for (colour, dash), _, line in shown:
        band = line.band(y)
        around = [(at, high) for at, _, high in band] + [(at, low) for at, low, _ in reversed(band)]
        if len(band) > 1:
            elements.append(path([place(point) for point in around], f"band fill-s{colour}"))
        elements += [path([place(point) for point in rest], f"{stroke(colour, dash)} thin") for rest in line.rest]
    for (colour, dash), names, line in shown:
        if len(line.points) > 1:
            elements.append(path([place(point) for point in line.points], stroke(colour, dash)))
        for point in line.points if len(line.points) <= DOTS_MOST else ():
            level = f"{y.factor * point[1]:.4g} {y.unit}"
            description = f"{SAME.join(names)}: {_tick(x.factor * point[0])} {x.unit or x.name}, {level}"
            elements.append(dot(*place(point), f"fill-s{colour}", title=description))
    bottom = top + height + 56
    entries = [
        (stroke(*style), SAME.join((short or {}).get(name, name) for name in names)) for style, names, _ in shown
    ]
    if len(lines) > 1:
        found, tall = legend(left, bottom, entries, width=width)
        elements, bottom = elements + found, bottom + tall
    size, description = (left + width + 18, bottom - 8), _last_points(lines, x, y)
    table = _numbers(name, title, lines, x, y)
    return CurvesFigure(name, title, description, size, elements, table, lines=lines, x=x, y=y, target=target)


def distinct(lines: Mapping[str, Curve]) -> list[tuple[tuple[int, int], list[str], Curve]]:
    """Return the different ones of some curves: the colour and the dash pattern, the labels, and the curve."""
    found: list[tuple[tuple[int, int], list[str], Curve]] = []
    for i, (label, line) in enumerate(lines.items()):
        whole = (line.points, line.deviations, line.rest)
        same = (names for _, names, one in found if line.points and whole == (one.points, one.deviations, one.rest))
        if (names := next(same, None)) is not None:
            names.append(label)
        else:
            colour, dash = line.style or (i, i)
            found.append(((colour % SERIES, dash % len(DASHES)), [label], line))
    return found


def stroke(colour: int, dash: int) -> str:
    """Return the CSS classes of a line."""
    return f"stroke-s{colour % SERIES} dash-{dash % len(DASHES)}"


def seen(bars: Sequence[Sequence[float]], length: float) -> list[bool]:
    """Return of each part of stacked bars whether it has SEEN_LEAST pixels in any; `length`: of the longest bar."""
    least = max(map(math.fsum, bars), default=0.0) * SEEN_LEAST / length
    return [max(values) >= least > 0 for values in zip(*bars, strict=True)]


def bars(
    name: str,
    title: str,
    parts: Sequence[tuple[str, str]],
    rows: Mapping[str, Sequence[float]],
    *,
    axis: Axis,
    short: Mapping[str, str] | None = None,
) -> BarsFigure:
    """Draw a horizontal stacked bar for each label, of parts (class, label); its sum and short name are above it."""
    (left, top), width = (8.0, 36.0), PLOT
    sums = {
        label: f"{(short or {}).get(label, label)}: {show(axis.factor * math.fsum(values), 2)} {axis.unit}"
        for label, values in rows.items()
    }
    heads = {label: wrapped(whole, width) for label, whole in sums.items()}
    height = sum(28 + 16 * len(lines) for lines in heads.values())
    most = axis.factor * max((math.fsum(values) for values in rows.values()), default=0.0)
    marks = ticks(0.0, most)
    elements, tall = _parts_legend(parts, [*rows.values()], width, top + 4, width=left + width)
    top += tall
    for tick in marks:
        at = left + width * tick / marks[-1]
        elements.append(path([(at, top), (at, top + height)], "grid"))
        elements.append(text(at, top + height + 16, _tick(tick), anchor="middle"))
    y = top
    for label, values in rows.items():
        elements += [text(left + 2, y + 15 + 16 * i, line) for i, line in enumerate(heads[label])]
        y, at = y + 4 + 16 * len(heads[label]), left
        for (kind, part), value in zip(parts, values, strict=True):
            wide = width * axis.factor * value / marks[-1]
            if wide > 0:
                description = f"{label}, {part}: {show(axis.factor * value, 3)} {axis.unit}"
                elements.append(rect(at, y, max(wide - 1, 0.4), 18, kind, title=description))
            at += wide
        y += 24
    bottom = top + height + 34
    elements.append(text(left + width / 2, bottom, axis.head, anchor="middle", kind="soft"))
    columns = (Column("bar", text=True), *(Column(part, axis.unit, 3) for _, part in parts))
    table = Table(name, title, columns, [(label, *(axis.factor * v for v in values)) for label, values in rows.items()])
    size = (left + width + 56, bottom + 10)
    return BarsFigure(name, title, "; ".join(sums.values()), size, elements, table, parts=parts, rows=rows, axis=axis)


def columns(
    name: str,
    title: str,
    parts: Sequence[tuple[str, str]],
    values: Sequence[Sequence[float]],
    *,
    x: Axis,
    axis: Axis,
) -> ColumnsFigure:
    """Draw a vertical stacked bar for each of `values` [bars][parts]; above COLUMNS_MOST, neighbours are averaged."""
    joined = math.ceil(len(values) / COLUMNS_MOST)
    groups = [values[start : start + joined] for start in range(0, len(values), max(joined, 1))]
    means = [[math.fsum(part) / len(group) for part in zip(*group, strict=True)] for group in groups]
    (left, top), (width, height) = (46.0, 36.0), (PLOT, COLUMN)
    marks = ticks(0.0, axis.factor * max((math.fsum(bar) for bar in means), default=0.0))
    elements, tall = _parts_legend(parts, means, height, top + 4, width=left + width)
    top += tall + 4
    for tick in marks:
        at = top + height * (1 - tick / marks[-1])
        elements += [path([(left, at), (left + width, at)], "grid"), text(left - 6, at + 4, _tick(tick), anchor="end")]
    wide = width / max(len(means), 1)
    gap = min(wide * 0.25, 4.0)
    for i, bar in enumerate(means):
        first, at = 1 + i * joined, top + height
        label = f"{first}" if joined == 1 else f"{first} to {min(first + joined - 1, len(values))}"
        for (kind, part), value in zip(parts, bar, strict=True):
            tall = height * axis.factor * value / marks[-1]
            at -= tall
            if tall > 0:
                description = f"{x.name} {label}, {part}: {show(axis.factor * value, 3)} {axis.unit}"
                elements.append(rect(left + wide * i + gap / 2, at, min(wide - gap, 40), tall, kind, title=description))
        if i % math.ceil(len(means) / 9) == 0:
            middle = left + wide * i + gap / 2 + min(wide - gap, 40) / 2
            elements.append(text(middle, top + height + 16, str(first), anchor="middle"))
    elements.append(text(left + width / 2, top + height + 34, x.head, anchor="middle", kind="soft"))
    heads = (Column(x.name), *(Column(part, axis.unit, 3) for _, part in parts))
    rows = [(i + 1, *(axis.factor * value for value in bar)) for i, bar in enumerate(values)]
    description = f"{len(values)} bars" if joined <= 1 else f"Each bar is the mean of {joined} global rounds"
    table = Table(name, title, heads, rows)
    size = (left + width + 18, top + height + 44)
    return ColumnsFigure(name, title, description, size, elements, table, parts=parts, values=values, x=x, axis=axis)


def ticks(low: float, high: float, *, wanted: int = 5) -> list[float]:
    """Return evenly spaced round numbers, from at most `low` to at least `high`."""
    span = high - low
    if not span > 1e-9 * max(abs(low), abs(high), 1e-9):  # all values are equal
        span = abs(low) if abs(low) > 1e-9 else 1.0
        high = low + span
    rough = span / wanted
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * next(factor for factor in (1, 2, 5, 10) if factor * size >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{step * i:.12g}") for i in range(first, last + 1)]


def _parts_legend(
    parts: Sequence[tuple[str, str]], bars: Sequence[Sequence[float]], length: float, top: float, *, width: float
) -> tuple[list[str], float]:
    """Return a legend of the parts that can be seen, with the names of shorter ones below it, and its height."""
    visible = seen(bars, length)
    elements, tall = legend(2, top, list(compress(parts, visible)), width=width)
    some = [max(values) > 0 for values in zip(*bars, strict=True)]
    short = [label for (_, label), there, any_ in zip(parts, visible, some, strict=False) if any_ and not there]
    if short:
        for line in wrapped(f"too short to be seen: {', '.join(short)}", width):
            elements.append(text(2, top + tall, line, kind="soft"))
            tall += 18
    return elements, tall


def _tick(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else show(round(value))


def _last_points(lines: Mapping[str, Curve], x: Axis, y: Axis) -> str:
    ends = {label: line.points[-1] for label, line in lines.items() if line.points}
    return "; ".join(
        f"{label}: {y.factor * level:.4g} {y.unit} at {_tick(x.factor * at)} {x.unit or x.name}"
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
