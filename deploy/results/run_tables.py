"""What a report has of single runs: a row for each, the epochs and the work of devices, events, and
facts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.console.tabular import Cell, Column, Table
from fedstrata.deploy.results import charts
from fedstrata.deploy.results.charts import Axis, Curve
from fedstrata.deploy.results.device_scores import GLOBAL_ROUND, times
from fedstrata.deploy.results.figures import Figure
from fedstrata.deploy.results.maps import NODES_MOST, quantiles, spaced
from fedstrata.deploy.results.run import Event, Run, columns_of, seconds_of, tiers_of
from fedstrata.deploy.results.series import Series
from fedstrata.deploy.results.whole import byte_columns, score_column

EVENTS_MOST: Final = 200
CHILDREN_MOST: Final = 12  # of the cloud that have a curve
TEXT_MOST: Final = 160  # letters of a fact of an event

EPOCHS: Final = (
    "Epochs per local round of the cloud's children, and each device's work: seconds of training "
    "and of waiting for a slot on its host, as measured there, and the seconds of delay that "
    "emulate slower hardware."
)
DATA: Final = (
    "Training samples of each device (rows) by class (columns). The area of a square is "
    "proportional to its samples. The number on the right is the device's total."
)


def overview(series: Sequence[Series]) -> Table:
    """Return a table with a row for each run; scores in percent if all are shares."""
    runs = [run for each in series for run in each.runs]
    tiers = tiers_of(runs)
    shares = all(run.experiment.score.share for run in runs)
    factor, unit, digits = (100.0, "%", 2) if shares else (1.0, "", 4)
    columns = [Column(name, text=True) for name in ("series", "id", "state", "seed")]
    columns += [
        Column("global rounds"),
        Column(score_column(runs), unit, digits),
        Column("test loss", digits=4),
        Column("time", seconds_of(runs)),
        *byte_columns(tiers),
    ]
    rows = []
    for each in series:
        for run in each.runs:
            row: list[Cell] = [each.whole, run.id, str(run.state), str(run.seed), len(run.rounds)]
            row += [times(factor, run.score), run.loss, run.seconds]
            counts = [run.totals.get(column) for column in columns_of(tiers)]
            rows.append([*row, *(count and count / 1e6 for count in counts)])
    return Table("overview", "The runs, bytes as MQTT packets", columns, rows)


def epochs(run: Run) -> Figure:
    """Return a figure of the epochs (tau_c) of the cloud's children, of evenly spaced ones of many,
    by global round.
    """
    lines = {}
    for name in spaced(run.experiment.tree.children[CLOUD], CHILDREN_MOST):
        counts = [(float(row.global_round), row.epochs.get(name)) for row in run.rounds]
        lines[name] = Curve([(at, float(count)) for at, count in counts if count is not None])
    title = "Epochs of each child of the cloud"
    axis = Axis("epochs", whole=True)
    return charts.curves(run.file_name("epochs"), title, lines, x=GLOBAL_ROUND, y=axis)


def work(run: Run) -> Table:
    """Return a table of each device's total work in the run, or of the quantiles over more than
    NODES_MOST devices.
    """
    unit = seconds_of([run])
    columns = [
        Column("samples"),
        Column("global rounds"),
        Column("epochs"),
        Column("SGD steps"),
        Column("training", unit, 3),
        Column("waiting for a slot", unit, 3),
        Column("slowed by", unit, 3),
    ]
    sums: dict[tuple[str, str], list[Any]] = {}
    paths: dict[tuple[str, str], str] = {}
    for each in run.devices:
        node = each.parent, each.device
        paths[node] = each.path
        before = sums.get(node, [each.samples, 0, 0, 0, 0.0, 0.0, 0.0])
        more: list[float] = [0, min(1, each.local_rounds), each.epochs, each.sgd_steps]
        more += [each.train_s, each.wait_s, each.pause_s]
        sums[node] = [old + new for old, new in zip(before, more, strict=True)]
    name = run.file_name("devices")
    if len(sums) > NODES_MOST:
        title = f"Work of {len(sums)} devices, quantiles of each column"
        several = [Column("quantile", text=True), *columns]
        return Table(
            name, f"{title} (devices.csv has each device)", several, quantiles([*sums.values()])
        )
    with_path = any(paths.values())
    columns = [Column("parent", text=True), Column("device", text=True), *columns]
    columns += [Column("path", text=True)] * with_path
    rows = [[*node, *own, *[paths[node]] * with_path] for node, own in sums.items()]
    return Table(name, "Work of each device", columns, rows)


def events(run: Run) -> tuple[Table, int]:
    """Return a table of the last EVENTS_MOST events without plans and global rounds, and the number
    of omitted ones.
    """
    shown = [event for event in run.events if _is_shown(event)]
    rows = []
    for event in shown[-EVENTS_MOST:]:
        rows.append((event.time[:19].replace("T", " "), event.name, _event_text(event)))
    columns = [Column(name, text=True) for name in ("time (UTC)", "event", "what")]
    return Table(run.file_name("events"), "Events", columns, rows), max(0, len(shown) - EVENTS_MOST)


def facts(run: Run) -> list[tuple[str, str]]:
    """Return the facts of a run, including those of manifest.json but its tables by node."""
    found = {"folder": run.path.name, "state": str(run.state), "seed": str(run.seed)}
    if run.partition is not None:
        found["split's digest"] = str(run.partition.get("digest", ""))
    for key, value in run.manifest.items():
        if key not in ("links", "hardware"):
            found[key.replace("_", " ")] = _brief(value, most=2000)
    return list(found.items())


# The facts of these events that the report shows nowhere else.
_SHOWN_FACTS: Final = {
    "run": ("done", "global_rounds"),
    "waiting": ("for",),
    "finished": ("global_round", "elapsed_s", "accuracy", "score", "loss"),
}


def _is_shown(event: Event) -> bool:
    """Return whether an event is listed: no figure or table covers it, and it is not a normal
    change of presence.
    """
    if event.name == "child":
        return event.facts.get("state") in ("lost", "failed", "disconnected")
    return event.name not in ("plan", "scoring", "classes", "global_round", "evaluated", "measured")


def _event_text(event: Event) -> str:
    known = _SHOWN_FACTS.get(event.name, event.facts)
    found = [f"{key} {_brief(fact)}" for key, fact in event.facts.items() if key in known]
    return "; ".join(found)


def _brief(fact: object, *, most: int = TEXT_MOST) -> str:
    """Return a fact as text of at most `most` characters, numbers rounded."""
    if isinstance(fact, str):
        text = fact
    else:
        text = json.dumps(_rounded(fact), ensure_ascii=False).replace('"', "")
    if len(text) <= most:
        return text
    return f"{text[: most - 1]}…"


def _rounded(fact: object) -> object:
    if isinstance(fact, float):
        return float(f"{fact:.4g}")
    if isinstance(fact, Mapping):
        return {key: _rounded(value) for key, value in fact.items()}
    if isinstance(fact, list):
        return [_rounded(each) for each in fact]
    return fact
