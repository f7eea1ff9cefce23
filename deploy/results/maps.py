"""Pictures of a lab: topology with link rates, split of the samples, devices over time.

Of thousands of devices there are evenly spaced ones, or quantiles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, Final, TypeVar

import numpy as np

from fedstrata.common.settings.devices import OnlineTimes
from fedstrata.common.settings.topology import CLOUD, Tree
from fedstrata.deploy.console.tabular import Cell, Column, Table, clean
from fedstrata.deploy.results import charts
from fedstrata.deploy.results.charts import BELOW, Axis, Curve
from fedstrata.deploy.results.figures import COLOURS, COLUMN, LETTER, Box, Canvas, Figure
from fedstrata.deploy.results.run import Run, seconds_of

ROW: Final = 14.0  # points: of a node
CELL_LEAST: Final = 8.0  # of a class
TALL: Final = 30.0  # of a box of a topology, with the texts at its link
TURN: Final = 9.0  # from a box to the bend of its lines
NODES_MOST: Final = 300  # devices of a run up to which a report has a row for each
QUANTILES: Final = {"least": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "most": 1.0}

_T = TypeVar("_T")


def spaced(items: Sequence[_T], most: int = NODES_MOST) -> Sequence[_T]:
    """Return all items, or evenly spaced ones beginning with the first if there are more than
    `most`.
    """
    if len(items) > most:
        return items[:: -(-len(items) // most)]
    return items


def quantiles(rows: Sequence[Sequence[float]]) -> list[list[Any]]:
    """Return the quantiles of each column, a row for each of QUANTILES with its name first."""
    values = np.quantile(np.asarray(rows, dtype=np.float64), list(QUANTILES.values()), axis=0)
    return [[name, *row] for name, row in zip(QUANTILES, values.tolist(), strict=True)]


@dataclass(frozen=True, slots=True)
class Rates:
    """A link's rates (down, up) in Mbit/s: declared, None = unlimited, and measured, None = not
    measured.
    """

    declared: tuple[float | None, float | None]
    delay_ms: float
    measured: tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class TopologyBox:
    """Nodes of like links in one box: its label, its layer, its middle from above, and the texts at
    its link.
    """

    label: str
    depth: int
    middle: float
    texts: Sequence[str]
    below: Sequence[TopologyBox]


def topology(key: str, tree: Tree, rates: Mapping[str, Rates]) -> Figure:
    """Draw all nodes, a column for each layer; devices of a parent with equal links share a box."""
    found: list[TopologyBox] = []
    leaves = 0

    def place(nodes: Sequence[str], depth: int) -> TopologyBox:
        nonlocal leaves
        children = tree.children.get(nodes[0], ())
        groups: Sequence[Sequence[str]] = [[child] for child in children]
        if depth == len(tree.layers) - 2:
            groups = _alike(children, rates)
        below = [place(group, depth + 1) for group in groups]
        leaves += not below
        middle = TALL * (leaves - 0.5)
        if below:
            middle = sum(box.middle for box in below) / len(below)
        label = nodes[0] if len(nodes) == 1 else f"{len(nodes)} devices"
        texts = _labels([rates[node] for node in nodes if node in rates])
        box = TopologyBox(label, depth, middle, texts, below)
        found.append(box)
        return box

    place([CLOUD], 0)
    lefts = []
    wide = []
    left = 1.0
    for depth in range(len(tree.layers)):
        layer = [box for box in found if box.depth == depth]
        if depth:
            longest = max((len(text) for box in layer for text in box.texts), default=6)
            left += 20 + LETTER * longest
        lefts.append(left)
        wide.append(10 + LETTER * max(len(box.label) for box in layer))
        left += wide[-1]

    def draw() -> Canvas:
        canvas = Canvas(max(COLUMN, lefts[-1] + wide[-1] + 1), TALL * leaves + 4)
        axes = canvas.ground()
        look: dict[str, Any] = {"color": COLOURS["line"], "linewidth": 0.8}
        for box in found:
            left = lefts[box.depth]
            right = lefts[box.depth] + wide[box.depth]
            for end in box.below:
                turn = [right, right + TURN, right + TURN, lefts[end.depth]]
                levels = [box.middle, box.middle, end.middle, end.middle]
                axes.plot(turn, levels, **look)
                for text, y, colour in zip(end.texts, (-3, 10), ("ink", "soft"), strict=False):
                    axes.text(right + TURN + 6, end.middle + y, text, color=COLOURS[colour])
            around = [box.middle + y for y in (-9, -9, 9, 9, -9)]
            axes.plot([left, right, right, left, left], around, **look)
            axes.text((left + right) / 2, box.middle, clean(box.label), ha="center", va="center")
        return canvas

    sizes = [f"{len(names)} in layer {depth}" for depth, names in enumerate(tree.layers[1:], 1)]
    text = f"A cloud and its nodes: {', '.join(sizes)}."
    return Figure(key, "Links: declared and measured, down / up", text, draw)


def partition(facts: Mapping[str, Any], *, name: str = "partition") -> Figure:
    """Return the picture of a split, given the content of partition.json.

    The area of a square is proportional to its samples. Of many devices evenly spaced ones are
    shown.
    """
    devices = facts["devices"]
    data = facts.get("data", {})
    split = f"{data.get('dataset', '')}, {data.get('partition', '')}"
    kind = "bin" if any("by_bin" in held for held in devices.values()) else "class"
    homes: dict[str, list[str]] = {}
    counts = {}
    for device, held in devices.items():
        homes.setdefault(str(held["parent"]), []).append(device)
        counts[device] = [int(count) for count in held[f"by_{kind}"]]
    classes = max(map(len, counts.values()), default=0)
    most = max((max(held, default=0) for held in counts.values()), default=0) or 1
    every = [(home, device) for home, members in homes.items() for device in members]
    rows = spaced(every)
    if len(rows) < len(every):
        split += f", {len(rows)} of {len(every)} devices, evenly spaced (partition.json has all)"
    named = [f"{home} / {device}" for home, device in rows]
    title = f"Samples of {split}, seed {facts.get('seed', '')}: {facts.get('digest', '')}"

    def draw() -> Canvas:
        left = 6 + LETTER * max(map(len, named), default=0)
        right = 6 + LETTER * len(str(max(map(sum, counts.values()), default=0)))
        cell = max(CELL_LEAST, min(ROW, (COLUMN - left - right) / max(classes, 1)))
        canvas = Canvas(max(COLUMN, left + right + cell * classes), cell * len(rows) + BELOW)
        axes = canvas.axes()
        canvas.place(
            axes, left=left, top=0, right=canvas.size[0] - left - cell * classes, bottom=BELOW
        )
        axes.set(xlim=(-0.5, classes - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel=kind)
        axes.set_yticks(range(len(rows)), [*map(clean, named)])
        axes.locator_params(axis="x", integer=True, nbins=10)
        boxes = []
        for y, (_, device) in enumerate(rows):
            for label, count in enumerate(counts[device]):
                if count:
                    side = max(0.08, 0.86 * (count / most) ** 0.5)
                    text = f"{named[y]}, {kind} {label}: {count}"
                    boxes.append(Box(label - side / 2, y - side / 2, side, side, "s0", text))
            axes.text(classes - 0.2, y, str(sum(counts[device])), va="center")
        canvas.boxes(axes, boxes)
        return canvas

    columns = [Column("parent", text=True), Column("device", text=True)]
    columns += [Column(str(c)) for c in range(classes)]
    cells: list[Sequence[Cell]] = []
    for home, device in rows:
        own = counts[device]
        cells.append((home, device, *own, *[0] * (classes - len(own))))
    table = Table(name, f"Samples by device and {kind}", columns, cells)
    return Figure(name, title, split, draw, table)


def _alike(devices: Sequence[str], rates: Mapping[str, Rates]) -> list[list[str]]:
    groups: dict[object, list[str]] = {}
    for device in devices:
        link = rates.get(device)
        kind = (link.declared, link.delay_ms) if link else None
        groups.setdefault(kind, []).append(device)
    return list(groups.values())


def _labels(rates: Sequence[Rates]) -> list[str]:
    """Return the labels of links that are declared equal: the declared rates, and those measured,
    if any.
    """
    if not rates:
        return []
    text = "unlimited"
    if rates[0].declared != (None, None):
        down, up = map(_shown, rates[0].declared)
        text = f"{down} / {up} Mbit/s"
    late = f", {rates[0].delay_ms:g} ms" if rates[0].delay_ms else ""
    down = _range([link.measured[0] for link in rates])
    up = _range([link.measured[1] for link in rates])
    if down == up == "-":
        return [f"{text}{late}"]
    return [f"{text}{late}", f"measured {down} / {up}"]


def _shown(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:.4g}"


def _range(rates: Sequence[float | None]) -> str:
    known = [rate for rate in rates if rate is not None]
    if not known:
        return "-"
    ends = (f"{min(known):.3g}", f"{max(known):.3g}")
    return "-".join(dict.fromkeys(ends))


CHANGES: Final = (
    "Devices at the beginning of each global round: those that worked below each of their "
    "parents, and those that the "
    "experiment's trace of availability has."
)
PARENTS_MOST: Final = 5  # lines of devices that worked


def changes(run: Run) -> Figure | None:
    """Return the figure of a run whose devices may be absent or move, else None."""
    experiment = run.experiment
    tree = experiment.tree
    traces = [experiment.online(device) for device in tree.devices]
    traced = any(trace is not None for trace in traces)
    changing = traced or any(tier.min_available for tier in experiment.tiers)
    if run.direct or not run.rounds or not changing:
        return None
    begins = [0.0, *(row.elapsed_s for row in run.rounds[:-1])]
    used = Counter((row.global_round, row.parent) for row in run.devices if row.local_rounds)
    counts: dict[str, list[int]] = {}
    if traced:
        counts["available"] = [_online(traces, t) for t in begins]
    few = len(tree.parents) <= PARENTS_MOST
    for parent in tree.parents:
        name = f"below {parent if few else 'all parents'}"
        before = counts.get(name, [0] * len(begins))
        own = [used[row.global_round, parent] for row in run.rounds]
        counts[name] = list(map(add, before, own))
    lines = {
        name: Curve(list(zip(begins, map(float, each), strict=True)))
        for name, each in counts.items()
    }
    time = Axis("time", seconds_of([run]))
    title = f"Devices over time, {run.ending}"
    y = Axis("devices", whole=True)
    return charts.curves(run.file_name("changes"), title, lines, x=time, y=y)


def _online(traces: Sequence[OnlineTimes | None], t: float) -> int:
    return sum(trace is None or trace.online(t) for trace in traces)
