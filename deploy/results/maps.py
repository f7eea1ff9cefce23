"""Pictures of a lab: epochs of the cloud's children, topology with link rates, split of the samples, changes over time.

Of thousands of devices there are evenly spaced ones, or quantiles.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

from common.experiment.links import LinkTrace, RateTrace
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD, Tree
from deploy.console.tabular import Cell, Column, Table, show
from deploy.results.charts import Plot, ticks
from deploy.results.figures import LETTER, Drawing, Figure, Line, Mark, Point, Rect, Text, inks, legend
from deploy.results.run import Run, seconds_of

ROW = 22.0  # pixels
EDGE_LEAST = 60.0
TURN = 14.0  # from a box to the bend of its lines
CELL, TOP, GAP = 14, 52.0, 6  # pixels of a split
NODES_MOST: Final = 300  # devices of a run up to which a report has a row for each
QUANTILES: Final = {"least": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "most": 1.0}

_T = TypeVar("_T")


def spaced(items: Sequence[_T], most: int = NODES_MOST) -> Sequence[_T]:
    """Return all items, or evenly spaced ones beginning with the first if there are more than `most`."""
    return items[:: -(-len(items) // most)] if len(items) > most else items


def quantiles(rows: Sequence[Sequence[float]]) -> list[list[Any]]:
    """Return the quantiles of each column, a row for each of QUANTILES with its name first."""
    values = np.quantile(np.asarray(rows, dtype=np.float64), list(QUANTILES.values()), axis=0)
    return [[name, *row] for name, row in zip(QUANTILES, values.tolist(), strict=True)]


def epochs(key: str, rows: Mapping[str, Sequence[int | None]]) -> Figure:
    """Draw the epochs (tau_c) of the cloud's children in each global round, None without a part; darker is more."""
    count = max(map(len, rows.values()), default=0)
    most = max((cell for cells in rows.values() for cell in cells if cell is not None), default=1)
    left, top = 12 + LETTER * max(map(len, rows), default=0), 52.0
    wide = min(30.0, 640.0 / max(count, 1))
    title = "Epochs of each child of the cloud"
    marks: list[Mark] = []
    for i in range(0, count, math.ceil(30 / wide)):
        marks.append(Text(left + wide * (i + 0.5), top - 8, str(i + 1), "middle", "soft"))
    for line, (name, cells) in enumerate(rows.items()):
        y = top + ROW * line
        marks.append(Text(left - 8, y + 15, name, "end"))
        for start, end, cell in _stretches(cells):
            if cell is None:
                continue
            description = f"{name}, global round {start + 1}{f' to {end}' if end > start + 1 else ''}: {cell} epochs"
            place = (left + wide * start, y + 1, max(wide * (end - start) - (1 if wide > 6 else 0), 0.3), ROW - 2)
            marks.append(Rect(*place, "weight", description, 0.12 + 0.6 * cell / most))
            if wide >= 16:
                marks += [Text(left + wide * (i + 0.5), y + 15, str(cell), "middle") for i in range(start, end)]
    columns = (Column("global round"), *(Column(name) for name in rows))
    table = Table(key, title, columns, [(i + 1, *(cells[i] for cells in rows.values())) for i in range(count)])
    drawing = Drawing((left + wide * count + 12, top + ROW * len(rows) + 8), marks)
    return Figure(
        key, title, "Rows are the children of the cloud, columns global rounds.", lambda paper: drawing, table
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """A link's rates (down, up) in Mbit/s: declared, None = unlimited, and measured, None = not measured."""

    declared: tuple[float | None, float | None]
    delay_ms: float
    measured: tuple[float | None, float | None]


def topology(key: str, tree: Tree, rates: Mapping[str, Rates]) -> Figure:
    """Draw all nodes, a column for each layer; devices of a parent with equal links share a box."""
    layout = _TopologyLayout(tree, rates)
    height, _ = layout.add(CLOUD, 40.0)
    sizes = [f"{len(names)} in layer {depth}" for depth, names in enumerate(tree.layers[1:], 1)]
    last = len(tree.layers) - 1
    title = "Links: declared and measured, down / up"
    drawing = Drawing((layout.x(last) + layout.wide[last] + 4, height + 4), layout.marks)
    return Figure(key, title, f"A cloud and its nodes: {', '.join(sizes)}.", lambda paper: drawing)


def partition(facts: Mapping[str, Any], *, name: str = "partition") -> Figure:
    """Return the picture of a split, given the content of partition.json.

    The area of a square is proportional to its samples; its title has the number. Of many devices evenly spaced ones
    are shown.
    """
    devices = facts["devices"]
    data = facts.get("data", {})
    split = f"{data.get('dataset', '')}, {data.get('partition', '')}"
    homes: dict[str, list[str]] = {}
    for device, held in devices.items():
        homes.setdefault(str(held["parent"]), []).append(device)
    kind = "bin" if any("by_bin" in held for held in devices.values()) else "class"
    counts = {device: [int(count) for count in held[f"by_{kind}"]] for device, held in devices.items()}
    classes = max(map(len, counts.values()), default=0)
    most = max((count for held in counts.values() for count in held), default=0) or 1
    rows = spaced([(home, device) for home, members in homes.items() for device in members])
    if len(rows) < len(devices):
        split += f", {len(rows)} of {len(devices)} devices, evenly spaced (partition.json has all)"
    left = 12 + LETTER * max((len(f"{home} / {device}") for home, device in rows), default=0)
    title = f"Samples of {split}, seed {facts.get('seed', '')}: {facts.get('digest', '')}"
    marks: list[Mark] = []
    for label in range(0, classes, max(1, -(-classes // 20))):
        marks.append(Text(left + CELL * (label + 0.5), TOP - 6, str(label), "middle", "soft"))
    y, before = TOP, rows[0][0] if rows else ""
    for home, device in rows:
        y, before = y + GAP * (home != before), home
        named = f"{home} / {device}"
        marks.append(Text(left - 8, y + 11, named, "end"))
        for label, count in enumerate(counts[device]):
            if count:
                side = max(1.0, (CELL - 2) * (count / most) ** 0.5)
                corner = (left + CELL * label + (CELL - side) / 2, y + (CELL - side) / 2)
                marks.append(Rect(*corner, side, side, "weight", f"{named}, {kind} {label}: {count}"))
        marks.append(Text(left + CELL * classes + 8, y + 11, str(sum(counts[device]))))
        y += CELL
    marks.append(Rect(left, TOP, CELL * classes, y - TOP, "grid"))
    columns = [Column("parent", text=True), Column("device", text=True), *(Column(str(c)) for c in range(classes))]
    cells: list[Sequence[Cell]] = [(*row, *counts[row[1]], *[0] * (classes - len(counts[row[1]]))) for row in rows]
    drawing = Drawing((left + CELL * classes + 50, y + 10), marks)
    table = Table(name, f"Samples by device and {kind}", columns, cells)
    return Figure(name, title, split, lambda paper: drawing, table)


class _TopologyLayout:
    """The marks of a topology's picture; `wide`: pixels of a box, by layer."""

    def __init__(self, tree: Tree, rates: Mapping[str, Rates]) -> None:
        self._tree, self._rates = tree, rates
        self._groups = {name: _alike(tree.children[name], rates) for name in tree.layers[-2]}
        single = [group[0] for groups in self._groups.values() for group in groups if len(group) == 1]
        names = [*tree.layers[:-1], ["99 devices", *single]]
        self.wide = [14 + LETTER * max(map(len, layer)) for layer in names]
        self.marks: list[Mark] = []
        groups = [[[name] for name in layer] for layer in tree.layers[1:-1]]
        groups.append([group for found in self._groups.values() for group in found])
        self._edges = [max(map(self._edge_wide, layer)) for layer in groups]

    def x(self, depth: int) -> float:
        """Return the left edge of a layer's boxes."""
        return 4.0 + sum(self.wide[:depth]) + sum(self._edges[:depth])

    def add(self, node: str, top: float) -> tuple[float, float]:
        """Add a node and those below it from `top` on; return where they end, and the middle of the node's box."""
        depth = self._tree.depth(node)
        ends: list[tuple[float, list[str]]] = []  # the middle of each child's box, and the nodes in it
        y = top
        for group in self._groups.get(node, ()):
            ends.append((y + 23, group))
            label = group[0] if len(group) == 1 else f"{len(group)} devices"
            self.marks += _node(self.x(depth + 1), y + 23, self.wide[depth + 1], label)
            y += 46
        for child in () if node in self._groups else self._tree.children[node]:
            y, middle = self.add(child, y)
            ends.append((middle, [child]))
        centre = sum(at for at, _ in ends) / len(ends) if ends else y
        for at, group in ends:
            labels = _labels(self._known(group))
            self.marks += _edge(self.x(depth) + self.wide[depth], centre, self.x(depth + 1), at, labels)
        self.marks += _node(self.x(depth), centre, self.wide[depth], node)
        return y + 6, centre

    def _known(self, group: Sequence[str]) -> list[Rates]:
        return [self._rates[name] for name in group if name in self._rates]

    def _edge_wide(self, group: Sequence[str]) -> float:
        longest = max(map(len, _labels(self._known(group))), default=0)
        return max(EDGE_LEAST, TURN + 16 + LETTER * longest)


def _stretches(cells: Sequence[int | None]) -> list[tuple[int, int, int | None]]:
    """Return runs of equal neighbours as (start, end, cell)."""
    found: list[tuple[int, int, int | None]] = []
    for i, cell in enumerate(cells):
        if found and found[-1][2] == cell:
            found[-1] = (found[-1][0], i + 1, cell)
        else:
            found.append((i, i + 1, cell))
    return found


def _alike(devices: Sequence[str], rates: Mapping[str, Rates]) -> list[list[str]]:
    groups: dict[object, list[str]] = {}
    for device in devices:
        link = rates.get(device)
        groups.setdefault((link.declared, link.delay_ms) if link else None, []).append(device)
    return list(groups.values())


def _node(x: float, y: float, wide: float, label: str) -> list[Mark]:
    return [Rect(x, y - 13, wide, 26, "node", label), Text(x + wide / 2, y + 4, label, "middle")]


def _edge(x: float, y: float, to_x: float, to_y: float, labels: Sequence[str]) -> list[Mark]:
    """Return a line that bends near its start, with labels above and below its horizontal end."""
    turn = x + TURN
    points = [(x, y), (turn, y), (turn, to_y), (to_x, to_y)] if y != to_y else [(x, y), (to_x, to_y)]
    places = zip(labels, ((-5, "ink"), (14, "soft")), strict=False)
    return [Line(points, "line"), *(Text(turn + 8, to_y + dy, label, kind=kind) for label, (dy, kind) in places)]


def _labels(rates: Sequence[Rates]) -> list[str]:
    """Return the labels of links that are declared equal: the declared rates, and those measured, if any."""
    if not rates:
        return []
    late = f", {rates[0].delay_ms:g} ms" if rates[0].delay_ms else ""
    labels = [f"{_declared(rates[0].declared)}{late}"]
    down, up = ([link.measured[index] for link in rates] for index in (0, 1))
    if any(rate is not None for rate in (*down, *up)):
        labels.append(f"measured {_range(down)} / {_range(up)}")
    return labels


def _declared(rates: tuple[float | None, float | None]) -> str:
    if rates == (None, None):
        return "unlimited"
    return f"{' / '.join('-' if rate is None else f'{rate:.4g}' for rate in rates)} Mbit/s"


def _range(rates: Sequence[float | None]) -> str:
    known = [rate for rate in rates if rate is not None]
    least, most = (f"{end:.3g}" for end in (min(known, default=0.0), max(known, default=0.0)))
    return "-" if not known else least if least == most else f"{least}-{most}"


CHANGES: Final = (
    "The traces of the experiment on the clock of the global rounds: how many devices were available, and the rates of "
    "links with a trace. Links with the same trace share a chart. Where nodes may be absent, enter or move, there are "
    "the devices that worked below each of their parents."
)
WIDTH: Final = 640.0
HEIGHT: Final = 78.0  # of a chart
LEFT: Final = 46.0
TIMES_MOST: Final = 2000  # of changes that are drawn one by one; more are sampled
SAMPLES: Final = 640
TRACES_MOST: Final = 5  # charts of links
PARENTS_MOST: Final = 5  # lines of devices that worked

Steps = Sequence[tuple[float, float]]  # from each time on, a value


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of step lines by label; `high`: the least end of its axis."""

    title: str
    lines: dict[str, Steps]
    high: float = 0.0


def changes(run: Run) -> Figure | None:
    """Return the figure of a run that replayed traces, or whose nodes may be absent, enter or move, else None."""
    experiment = run.experiment
    if run.direct or not run.rounds:
        return None
    panels = [*_available(experiment, run.seconds), *_at_work(run), *_links(experiment, run.seconds)]
    if not panels:
        return None
    title, end = f"Changes over time, {run.ending}", run.seconds
    across = ticks(0.0, end)
    clock = Plot(LEFT, 66.0, WIDTH, HEIGHT, across, across[-1])
    marks: list[Mark] = [Text(2, 40, "rounds", kind="soft")]
    begin = 0.0
    for row in run.rounds:
        tooltip = f"global round {row.global_round}: {show(begin, 1)} to {show(row.elapsed_s, 1)} s"
        kind = "fill-line" if row.global_round % 2 else "fill-grid"
        wide = max(clock.x(row.elapsed_s) - clock.x(begin) - 0.5, 0.5)
        marks.append(Rect(clock.x(begin), 30, wide, 12, kind, tooltip))
        begin = row.elapsed_s
    for i, panel in enumerate(panels):
        marks += _drawn(panel, replace(clock, top=76.0 + i * (HEIGHT + 30)), end=end)
    bottom = 66.0 + len(panels) * (HEIGHT + 30)
    marks += clock.numbers(bottom - 6, f"time, {seconds_of([run])}")
    drawn = "; ".join(panel.title for panel in panels)
    drawing, table = Drawing((LEFT + WIDTH + 24, bottom + 20), marks), _numbers(run, panels)
    return Figure(table.name, title, drawn, lambda paper: drawing, table)


def _drawn(panel: Panel, clock: Plot, *, end: float) -> list[Mark]:
    """Draw a chart below its title."""
    most = max(panel.high, *(value for line in panel.lines.values() for _, value in line))
    plot = replace(clock, y_ticks=ticks(0.0, most, wanted=3))
    marks = [Text(LEFT, plot.top - 10, panel.title), *plot.levels(), *plot.base()]
    for i, steps in enumerate(panel.lines.values()):
        points: list[Point] = []
        for (t, value), after in zip(steps, [*(t for t, _ in steps[1:]), end], strict=True):
            points += [(plot.x(t), plot.y(value)), (plot.x(after), plot.y(value))]
        marks.append(Line(points, inks(i, i)[0]))
    if len(panel.lines) > 1:
        names = [(inks(i, i)[0], label) for i, label in enumerate(panel.lines)]
        marks += legend(LEFT + LETTER * (len(panel.title) + 3), plot.top - 10, names, width=WIDTH)[0]
    return marks


def _available(experiment: Experiment, end: float) -> list[Panel]:
    """Return the chart of the number of available devices, if it changes."""
    devices = [experiment.online(device) for device in experiment.tree.devices]
    traced = [times for times in devices if times is not None]
    if not traced:
        return []
    times = _times((each.next_change for each in traced), end)
    always = len(devices) - len(traced)
    steps = [(t, float(always + sum(each.online(t) for each in traced))) for t in times]
    return [Panel("available devices", {"devices": steps}, high=float(len(devices)))]


def _at_work(run: Run) -> list[Panel]:
    """Return the chart of the devices that each parent used in each global round, if they may be absent."""
    if all(tier.min_available is None for tier in run.experiment.tiers):
        return []
    begins = [0.0, *(row.elapsed_s for row in run.rounds)]
    parents = run.experiment.tree.parents
    used = Counter((row.global_round, row.node.split("/")[-2]) for row in run.devices if row.local_rounds)
    lines: dict[str, Steps] = {
        parent: [(begins[k], float(used[row.global_round, parent])) for k, row in enumerate(run.rounds)]
        for parent in parents[:PARENTS_MOST]
    }
    rest = parents[PARENTS_MOST:]
    if rest:
        more = [sum(used[row.global_round, parent] for parent in rest) for row in run.rounds]
        lines[f"{len(rest)} more"] = [(begins[k], float(count)) for k, count in enumerate(more)]
    return [Panel("devices that worked", lines)]


def _links(experiment: Experiment, end: float) -> list[Panel]:
    """Return a chart for each trace of links, those of most links first."""
    of: dict[str, list[str]] = {}
    found: dict[str, LinkTrace] = {}
    for node in experiment.tree.nodes:
        if (trace := experiment.link(node).trace) is not None:
            digest = str(trace.recorded()["digest"])
            found[digest] = trace
            of.setdefault(digest, []).append(node)
    panels = []
    for digest, nodes in sorted(of.items(), key=lambda each: -len(each[1]))[:TRACES_MOST]:
        trace, first = found[digest], nodes[0]
        what = f"link of {first}" if len(nodes) == 1 else f"links of {first} and {len(nodes) - 1} more"
        lines = {
            "up": _rates(trace.direction(trace.up_mbit), end),
            "down": _rates(trace.direction(trace.down_mbit), end),
        }
        panels.append(Panel(f"{what}, Mbit/s", lines))
    return panels


def _rates(trace: RateTrace, end: float) -> Steps:
    return [(t, trace.rate_at(t) * 8e-6) for t in _times([trace.next_change], end)]


def _times(nexts: Iterable[Callable[[float], float]], end: float) -> list[float]:
    """Return the times of all changes up to the end, from 0 on; evenly spaced ones if there are too many."""
    found = {0.0}
    for next_change in nexts:
        t = next_change(0.0)
        while t < end:
            found.add(t)
            if len(found) > TIMES_MOST:
                return [end * i / SAMPLES for i in range(SAMPLES)]
            t = next_change(t)
    return sorted(found)


def _numbers(run: Run, panels: Sequence[Panel]) -> Table:
    columns = (
        Column("chart", text=True),
        Column("line", text=True),
        Column("time", seconds_of([run]), 3),
        Column("value", digits=3),
    )
    rows: list[Sequence[Cell]] = [
        (panel.title, label, t, value) for panel in panels for label, steps in panel.lines.items() for t, value in steps
    ]
    return Table(run.file_name("changes"), "Changes over time", columns, rows)
