"""A picture of what changed while a run ran: available devices and links' rates under the global rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from common.experiment.schema import Experiment
from common.experiment.traces import LinkTrace, RateTrace
from deploy.console.tabular import Cell, Column, Table, show
from deploy.report.charts import stroke, ticks
from deploy.report.figures import LETTER, Figure, legend, path, rect, text
from deploy.report.link_sections import file_name
from deploy.runs.run import Run

CHANGES: Final = (
    "The traces of the experiment on the clock of the global rounds: how many devices were available, and the rates of "
    "links with a trace. Links with the same trace share a chart."
)
WIDTH: Final = 640.0
HEIGHT: Final = 78.0  # of a chart
LEFT: Final = 46.0
TIMES_MOST: Final = 2000  # of changes that are drawn one by one; more are sampled
SAMPLES: Final = 640
TRACES_MOST: Final = 5  # charts of links

Steps = Sequence[tuple[float, float]]  # from each time on, a value


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of step lines by label; `high`: the least end of its axis."""

    title: str
    lines: dict[str, Steps]
    high: float = 0.0


def figure(run: Run) -> Figure | None:
    """Return the figure of a run that replayed traces, else None."""
    experiment = run.experiment
    if run.direct or not run.rounds:
        return None
    panels = [*_available(experiment, run.seconds), *_links(experiment, run.seconds)]
    if not panels:
        return None
    title, end = f"Changes over time, {run.id.rpartition('-')[2]}", run.seconds
    marks = ticks(0.0, end)

    def across(t: float) -> float:
        return LEFT + WIDTH * t / marks[-1]

    elements = [text(2, 40, "rounds", kind="soft")]
    begin = 0.0
    for row in run.rounds:
        tooltip = f"global round {row.global_round}: {show(begin, 1)} to {show(row.elapsed_s, 1)} s"
        kind = "fill-line" if row.global_round % 2 else "fill-grid"
        wide = max(across(row.elapsed_s) - across(begin) - 0.5, 0.5)
        elements.append(rect(across(begin), 30, wide, 12, kind, title=tooltip))
        begin = row.elapsed_s
    top = 66.0
    for panel in panels:
        elements += _drawn(panel, top, across, end=end, marks=marks)
        top += HEIGHT + 30
    for mark in marks:
        elements.append(text(across(mark), top - 6, f"{mark:g}", anchor="middle"))
    elements.append(text(LEFT + WIDTH / 2, top + 12, "time, s", anchor="middle", kind="soft"))
    drawn = "; ".join(panel.title for panel in panels)
    size, table = (LEFT + WIDTH + 24, top + 20), _numbers(run, panels)
    return Figure(table.name, title, drawn, size, elements, table)


def _drawn(
    panel: Panel, top: float, across: Callable[[float], float], *, end: float, marks: Sequence[float]
) -> list[str]:
    """Return the elements of a chart whose title is at `top`."""
    base = top + 10 + HEIGHT
    levels = ticks(0.0, max(panel.high, *(value for line in panel.lines.values() for _, value in line)), wanted=3)
    elements = [text(LEFT, top, panel.title)]
    for level in levels:
        at = base - HEIGHT * level / levels[-1]
        line = [(LEFT, at), (LEFT + WIDTH, at)]
        elements += [path(line, "grid" if level else "line"), text(LEFT - 6, at + 4, f"{level:g}", anchor="end")]
    elements += [path([(across(mark), base), (across(mark), base + 4)], "line") for mark in marks]
    for i, steps in enumerate(panel.lines.values()):
        points: list[tuple[float, float]] = []
        for (t, value), after in zip(steps, [*(t for t, _ in steps[1:]), end], strict=True):
            at = base - HEIGHT * value / levels[-1]
            points += [(across(t), at), (across(after), at)]
        elements.append(path(points, stroke(i, i)))
    if len(panel.lines) > 1:
        names = [(stroke(i, i), label) for i, label in enumerate(panel.lines)]
        elements += legend(LEFT + LETTER * (len(panel.title) + 3), top, names, width=WIDTH)[0]
    return elements


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
    columns = (Column("chart", text=True), Column("line", text=True), Column("time", "s", 3), Column("value", digits=3))
    rows: list[Sequence[Cell]] = [
        (panel.title, label, t, value) for panel in panels for label, steps in panel.lines.items() for t, value in steps
    ]
    return Table(file_name("changes", run), "Changes over time", columns, rows)
