"""Line charts and stacked bar charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from deploy.console.tabular import Cell, Column, Spread, Table, show
from deploy.results.figures import LETTER, Dot, Drawing, Figure, Line, Mark, Point, Rect, Text, inks, legend, wrapped

DOTS_MOST = 60  # points of a curve up to which each has a dot on a page
MARKERS = 10  # dots of a curve on a paper, about
WIDTHS = (404.0, 376.0)  # pixels of a chart on a page, and on a paper: a column
RIGHT = 18.0  # pixels right of the axes, at least
COLUMN = 150.0  # pixels: height of a chart of columns
SEEN_LEAST = 3.0  # pixels of a part of a bar whose colour can be seen
SAME = " = "  # between the labels of equal curves
COLUMNS_MOST = 60  # bars up to which each is drawn on a page; more are averaged


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its quantity, its unit, and the factor from the unit of the points to that unit."""

    name: str
    unit: str = ""
    factor: float = 1.0
    bounds: Point = (-math.inf, math.inf)  # of the quantity, in the unit of the points: bands are drawn within
    whole: bool = False  # whether it counts

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


@dataclass(frozen=True, slots=True)
class Plot:
    """The area between axes, in pixels, and the numbers at them.

    The x axis goes from its first number to its end, the y axis from its first to its last number.
    """

    left: float
    top: float
    width: float
    height: float
    x_ticks: Sequence[float]
    x_end: float
    y_ticks: Sequence[float] = ()

    def x(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.left + self.width * (value - self.x_ticks[0]) / (self.x_end - self.x_ticks[0])

    def y(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return self.top + self.height * (1 - (value - low) / (high - low))

    def across(self, y: float, kind: str) -> Line:
        """Draw a line from side to side."""
        return Line([(self.left, y), (self.left + self.width, y)], kind)

    def levels(self) -> list[Mark]:
        """Draw the lines and the numbers of the y axis."""
        numbers = [Text(self.left - 6, self.y(tick) + 4, number(tick), "end") for tick in self.y_ticks]
        return [*(self.across(self.y(tick), "grid") for tick in self.y_ticks), *numbers]

    def base(self) -> list[Mark]:
        """Draw the x axis, without its numbers."""
        end = self.top + self.height
        small = (Line([(at, end), (at, end + 4)], "line") for at in map(self.x, self.x_ticks))
        return [*small, self.across(end, "line")]

    def numbers(self, y: float, head: str) -> list[Mark]:
        """Draw the numbers of the x axis, and below them its head."""
        numbers = (Text(self.x(tick), y, number(tick), "middle") for tick in self.x_ticks)
        return [*numbers, Text(self.left + self.width / 2, y + 18, head, "middle", "soft")]


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
    points = [point for line in lines.values() for point in line.every_point(y)]
    most = x.factor * max((at for at, _ in points), default=1.0)
    goals = [] if target is None else [y.factor * target]
    levels = [*(y.factor * level for _, level in points), *goals]
    y_ticks, shown = ticks(min(levels, default=0.0), max(levels, default=1.0)), distinct(lines)

    def draw(paper: bool) -> Drawing:
        plot = _plot(34.0, 200.0, *_across(most, paper, whole=x.whole), y_ticks, paper)

        def place(points: Sequence[Point]) -> list[Point]:
            return [(plot.x(x.factor * at), plot.y(y.factor * level)) for at, level in points]

        end = plot.top + plot.height
        marks = [*[Text(2, 16, y.head)] * paper, *plot.levels(), *plot.base(), *plot.numbers(end + 18, x.head)]
        for at in map(plot.y, goals):
            marks += [plot.across(at, "target"), Text(plot.left + 4, at - 4, "target", kind="soft")]
        for (stroke, fill), _, line in shown:
            band = line.band(y)
            around = [(at, high) for at, _, high in band] + [(at, low) for at, low, _ in reversed(band)]
            if len(band) > 1:
                marks.append(Line(place(around), f"band {fill}"))
            marks += [Line(place(rest), f"{stroke} thin") for rest in line.rest]
        for (stroke, fill), names, line in shown:
            count = len(line.points)
            if count > 1:
                marks.append(Line(place(line.points), stroke))
            dotted = line.points[:: max(1, count // MARKERS)] if paper else line.points[: count * (count <= DOTS_MOST)]
            for (at, level), pixel in zip(dotted, place(dotted), strict=True):
                where = f"{number(x.factor * at)} {x.unit or x.name}, {y.factor * level:.4g} {y.unit}"
                marks.append(Dot(*pixel, fill, f"{SAME.join(names)}: {where}"))
        end += 56
        if len(lines) > 1:
            of = {} if paper else short or {}
            entries = [(kinds[0], SAME.join(of.get(name, name) for name in names)) for kinds, names, _ in shown]
            dots = [fill for (_, fill), *_ in shown] * paper
            left = 2.0 if paper else plot.left
            found, tall = legend(left, end, entries, width=plot.left + plot.width - left, dots=dots)
            marks, end = marks + found, end + tall
        return Drawing((WIDTHS[paper], end - 8), marks, headed=paper)

    return Figure(name, title, _last_points(lines, x, y), draw, _numbers(name, title, lines, x, y))


def distinct(lines: Mapping[str, Curve]) -> list[tuple[tuple[str, str], list[str], Curve]]:
    """Return the different ones of some curves: the classes of lines and areas, the labels, and the curve."""
    found: list[tuple[tuple[str, str], list[str], Curve]] = []
    for i, (label, line) in enumerate(lines.items()):
        whole = (line.points, line.deviations, line.rest)
        same = (names for _, names, one in found if line.points and whole == (one.points, one.deviations, one.rest))
        if (names := next(same, None)) is not None:
            names.append(label)
        else:
            found.append((inks(*(line.style or (i, i))), [label], line))
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
    """Draw a horizontal stacked bar for each label, of parts (class, label); its label and its sum are above it.

    `short`: names for the bars of a page, by label.
    """

    def heads(of: Mapping[str, str]) -> list[str]:
        sums = {label: show(axis.factor * math.fsum(values), 2) for label, values in rows.items()}
        return [f"{of.get(label, label)}: {total} {axis.unit}" for label, total in sums.items()]

    def draw(paper: bool) -> Drawing:
        left, top = 8.0, 36.0
        x_ticks, end = _across(axis.factor * max(map(math.fsum, rows.values()), default=0.0), paper)
        width = WIDTHS[paper] - left - max(RIGHT if paper else 56.0, LETTER / 2 * len(number(x_ticks[-1])))
        above = [wrapped(head, width) for head in heads({} if paper else short or {})]
        height = sum(28 + 16 * len(lines) for lines in above)
        marks, tall = _parts_legend(parts, [*rows.values()], width, top + 4, width=left + width)
        top += tall
        plot = Plot(left, top, width, height, x_ticks, end)
        marks += [Line([(at, top), (at, top + height)], "grid") for at in map(plot.x, plot.x_ticks)]
        marks += plot.numbers(top + height + 16, axis.head)
        y = top
        for (label, values), lines in zip(rows.items(), above, strict=True):
            marks += [Text(left + 2, y + 15 + 16 * i, line) for i, line in enumerate(lines)]
            y, at = y + 4 + 16 * len(lines), left
            for (kind, part), value in zip(parts, values, strict=True):
                wide = plot.x(axis.factor * value) - left
                if wide > 0:
                    description = f"{label}, {part}: {show(axis.factor * value, 3)} {axis.unit}"
                    marks.append(Rect(at, y, max(wide - 1, 0.4), 18, kind, description))
                at += wide
            y += 24
        return Drawing((WIDTHS[paper], top + height + 44), marks)

    columns = (Column("bar", text=True), *(Column(part, axis.unit, 3) for _, part in parts))
    table = Table(name, title, columns, [(label, *(axis.factor * v for v in values)) for label, values in rows.items()])
    return Figure(name, title, "; ".join(heads(short or {})), draw, table)


def columns(
    name: str, title: str, parts: Sequence[tuple[str, str]], values: Sequence[Sequence[float]], *, x: Axis, axis: Axis
) -> Figure:
    """Draw a vertical stacked bar for each of `values` [bars][parts].

    Above COLUMNS_MOST, neighbours are averaged on a page.
    """
    count = len(values)
    many = max(1, math.ceil(count / COLUMNS_MOST))

    def draw(paper: bool) -> Drawing:
        joined = 1 if paper else many
        groups = [values[start : start + joined] for start in range(0, count, joined)]
        means = [[math.fsum(part) / len(group) for part in zip(*group, strict=True)] for group in groups]
        plot = _plot(40.0, COLUMN, (), 0.0, ticks(0.0, axis.factor * max(map(math.fsum, means), default=0.0)), paper)
        marks, tall = _parts_legend(parts, means, COLUMN, plot.top, width=plot.left + plot.width)
        plot = replace(plot, top=plot.top + tall)
        bottom, wide = plot.top + plot.height, plot.width / max(len(means), 1)
        marks += [*[Text(2, 16, axis.head)] * paper, *plot.levels()]
        gap = min(wide * 0.25, 4.0) if wide > 4 else 0.0
        thick = min(wide - gap, 40) if gap else wide + 0.4  # without gaps they overlap, so that none can be seen
        for i, bar in enumerate(means):
            first, at = 1 + i * joined, bottom
            label = f"{first}" if joined == 1 else f"{first} to {min(first + joined - 1, count)}"
            for (kind, part), value in zip(parts, bar, strict=True):
                tall = bottom - plot.y(axis.factor * value)
                at -= tall
                if tall > 0:
                    description = f"{x.name} {label}, {part}: {show(axis.factor * value, 3)} {axis.unit}"
                    marks.append(Rect(plot.left + wide * i + gap / 2, at, thick, tall, kind, description))
        for tick in ticks(0.0, count, wanted=8, whole=True):
            if 1 <= tick <= count:
                middle = plot.left + wide * ((int(tick) - 1) // joined) + (gap + thick) / 2
                marks.append(Text(middle, bottom + 16, number(tick), "middle"))
        marks.append(Text(plot.left + plot.width / 2, bottom + 34, x.head, "middle", "soft"))
        return Drawing((WIDTHS[paper], bottom + 44), marks, headed=paper)

    heads = (Column(x.name), *(Column(part, axis.unit, 3) for _, part in parts))
    table = Table(name, title, heads, [(i, *(axis.factor * v for v in bar)) for i, bar in enumerate(values, 1)])
    return Figure(
        name, title, f"{count} bars" if many == 1 else f"Each bar is the mean of {many} global rounds", draw, table
    )


def ticks(low: float, high: float, *, wanted: int = 5, whole: bool = False) -> list[float]:
    """Return evenly spaced round numbers, integers if `whole`, from at most `low` to at least `high`."""
    span = high - low
    if not span > 1e-9 * max(abs(low), abs(high), 1e-9):  # all values are equal
        span = abs(low) if abs(low) > 1e-9 else 1.0
        high = low + span
    rough = max(span / wanted, float(whole))
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * next(factor for factor in (1, 2, 5, 10) if factor * size >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{step * i:.12g}") for i in range(first, last + 1)]


def number(value: float) -> str:
    """Return a number of an axis."""
    return f"{value:.4g}" if abs(value) < 1e4 else show(round(value))


def _across(most: float, paper: bool, *, whole: bool = False) -> tuple[list[float], float]:
    """Return the numbers of an x axis from 0 on, and its end: a number, on papers what is shown."""
    found = ticks(0.0, most, whole=whole)
    return ([tick for tick in found if tick <= most], most) if paper and most > 0 else (found, found[-1])


def _plot(
    top: float, height: float, x_ticks: Sequence[float], x_end: float, y_ticks: Sequence[float], paper: bool
) -> Plot:
    """Return the plot of a chart, with room for its numbers."""
    left = max(46.0, 8 + LETTER * max(len(number(tick)) for tick in y_ticks))
    right = max([RIGHT, *(LETTER / 2 * len(number(tick)) for tick in x_ticks[-1:])])
    return Plot(left, top, WIDTHS[paper] - left - right, height, x_ticks, x_end, y_ticks)


def _parts_legend(
    parts: Sequence[tuple[str, str]], bars: Sequence[Sequence[float]], length: float, top: float, *, width: float
) -> tuple[list[Mark], float]:
    """Return a legend of the parts that can be seen, with the names of shorter ones below it, and its height.

    Those with SEEN_LEAST pixels in a bar can be seen. `length`: pixels of the longest bar.
    """
    least = max(map(math.fsum, bars), default=0.0) * SEEN_LEAST / length
    highest = [max(values) for values in zip(*bars, strict=True)]
    visible = [high >= least > 0 for high in highest]
    marks, tall = legend(2, top, list(compress(parts, visible)), width=width)
    short = [label for (_, label), high in zip(parts, highest, strict=False) if 0 < high < least]
    for line in wrapped(f"too short to be seen: {', '.join(short)}", width) if short else ():
        marks.append(Text(2, top + tall, line, kind="soft"))
        tall += 18
    return marks, tall


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
