"""Who waited: the share of each global round in which a device trained, a lane for each, and how
long links were busy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import fsum
from operator import itemgetter
from typing import Final, NamedTuple

from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.console.tabular import Cell, Column, Table, clean
from fedstrata.deploy.results.charts import BELOW
from fedstrata.deploy.results.figures import COLUMN, LETTER, Box, Canvas, Figure
from fedstrata.deploy.results.maps import ROW, spaced
from fedstrata.deploy.results.run import Run, seconds_of

LANES_MOST: Final = 60
LINKS_MOST: Final = 300  # directions in the table
CELLS_MOST: Final = 120  # of a lane: more global rounds are drawn several as one
COLOUR: Final = "s0"
FAINTEST: Final = 0.06  # the opacity of no training at all
TEXT: Final = (
    "A lane is a device, a cell a global round: the darker, the longer the device trained in it, "
    "with the pauses that emulate slower hardware. In the rest of the time it received, sent, or "
    "waited. At the right is the share of the whole run. A link is busy while its MQTT bytes pass "
    "at its declared rate."
)


class Span(NamedTuple):
    """Consecutive global rounds: the first one, the last one, and seconds since the run's begin."""

    first: int
    last: int
    begin_s: float
    end_s: float


def spans(run: Run) -> list[Span]:
    """Return the global rounds of a run, several as one if there are many."""
    together = -(-len(run.rounds) // CELLS_MOST)
    found = []
    begin_s = 0.0
    for place in range(0, len(run.rounds), together):
        some = run.rounds[place : place + together]
        end_s = some[-1].elapsed_s
        found.append(Span(some[0].global_round, some[-1].global_round, begin_s, end_s))
        begin_s = end_s
    return found


def trained_s(run: Run) -> dict[str, dict[int, float]]:
    """Return the seconds of training of each device, by its path and global round."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in run.devices:
        found[row.node][row.global_round] = row.train_s + row.pause_s
    return dict(found)


def lanes(run: Run) -> Figure | None:
    """Return the picture; None without network or time, or before the first global round."""
    trained = trained_s(run)
    if run.direct or not run.rounds or not trained:
        return None
    shown = spaced(list(trained), LANES_MOST)
    cells = spans(run)
    whole = Span(cells[0].first, cells[-1].last, 0.0, cells[-1].end_s)
    names = [clean(node.partition("/")[2]) for node in shown]
    boxes = []
    for lane, node in enumerate(shown):
        for cell in cells:
            share = _share(trained[node], cell)
            opacity = FAINTEST + (1 - FAINTEST) * share
            rounds = f"{cell.first}" if cell.first == cell.last else f"{cell.first}-{cell.last}"
            text = f"{names[lane]}, global round {rounds}: trained {100 * share:.0f} % of the time"
            width = cell.end_s - cell.begin_s
            boxes.append(Box(cell.begin_s, lane - 0.4, width, 0.8, COLOUR, text, opacity))

    def draw() -> Canvas:
        left = 6 + LETTER * max(map(len, names))
        canvas = Canvas(COLUMN, ROW * len(shown) + BELOW)
        axes = canvas.axes()
        canvas.place(axes, left=left, top=0, right=6 * LETTER, bottom=BELOW)
        axes.set(xlim=(0, whole.end_s), ylim=(len(shown) - 0.5, -0.5), xlabel=seconds_of([run]))
        axes.set_yticks(range(len(shown)), names)
        canvas.boxes(axes, boxes)
        for lane, node in enumerate(shown):
            share = _share(trained[node], whole)
            axes.text(1.01 * whole.end_s, lane, f"{100 * share:.0f} %", va="center")
        return canvas

    title = f"Who trained when, {run.ending}"
    if len(shown) < len(trained):
        title += f": {len(shown)} of {len(trained)} devices, evenly spaced"
    return Figure(run.file_name("waiting"), title, TEXT, draw, _devices(run, trained, shown, whole))


def _share(trained: Mapping[int, float], cell: Span) -> float:
    seconds = fsum(trained.get(number, 0.0) for number in range(cell.first, cell.last + 1))
    return min(1.0, seconds / max(cell.end_s - cell.begin_s, 1e-9))


def _devices(
    run: Run, trained: Mapping[str, Mapping[int, float]], shown: Sequence[str], whole: Span
) -> Table:
    """Return the numbers of the picture: of the whole run."""
    rows: list[Sequence[Cell]] = []
    for node in shown:
        share = _share(trained[node], whole)
        rows.append((node, len(trained[node]), fsum(trained[node].values()), 100 * share))
    columns = [
        Column("device", text=True),
        Column("global rounds"),
        Column("trained", seconds_of([run])),
        Column("of the time", "%"),
    ]
    return Table(run.file_name("waiting"), f"Waiting of devices, {run.ending}", columns, rows)


def links(run: Run) -> Table:
    """Return how busy each link with a declared rate was, the busiest first."""
    sent = {row.goes: row.message_bytes for row in run.links if row.kind == "all"}
    tree = run.experiment.tree
    rows: list[Sequence[Cell]] = []
    for name in tree.below(CLOUD):
        parent = tree.parent(name)
        link = run.experiment.link(name)
        for begin, end, way in ((parent, name, link.down), (name, parent, link.up)):
            rate = way.rate if way.trace is None else way.trace.mean()
            count = sent.get(f"{begin} {end}")
            if count and rate and run.seconds:
                rows.append((begin, end, 100 * count / rate / run.seconds))
    rows.sort(key=itemgetter(2), reverse=True)
    title = f"Busy links, {run.ending}"
    if len(rows) > LINKS_MOST:
        title += f": the busiest {LINKS_MOST} of {len(rows)} directions"
    columns = [Column("from", text=True), Column("to", text=True), Column("busy", "%")]
    return Table(run.file_name("busy"), title, columns, rows[:LINKS_MOST])
