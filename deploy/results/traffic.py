"""Sections of a report: a function for each figure and table, and the texts that explain them.

First the curves over global rounds, seconds and bytes, then the links, then all others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import add
from statistics import fmean, stdev
from typing import Any, Final

from fedstrata.cloud.records import BROKER, RARE, LinkRecord
from fedstrata.common.accounting.counters import LINK_KINDS
from fedstrata.common.protocol.round_state import GLOBAL_PHASES
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.console.tabular import Cell, Column, Spread, Table
from fedstrata.deploy.results import charts, maps
from fedstrata.deploy.results.charts import Axis, Curve
from fedstrata.deploy.results.device_scores import GLOBAL_ROUND, score_axis
from fedstrata.deploy.results.figures import PHASES, Figure, Point
from fedstrata.deploy.results.maps import NODES_MOST, Rates, quantiles, spaced
from fedstrata.deploy.results.run import Event, Run, columns_of, seconds_of, tiers_of
from fedstrata.deploy.results.series import Series
from fedstrata.deploy.results.whole import byte_columns, score_column, scores_of

LOSS: Final = Axis("test loss", bounds=(0.0, float("inf")))
TRAINING_LOSS: Final = Axis("training loss", bounds=(0.0, float("inf")))


def mean_curve(runs: Sequence[Mapping[int, Point]]) -> Curve:
    """Return the mean over the points of several runs, by global round, and the sample deviations
    (n - 1) of y.

    A point of the mean is at the mean x. It covers the global rounds that all runs with any point
    have; what a run has beyond them is a line of its own in `rest`.
    """
    some = [run for run in runs if run]
    if len(some) < 2:
        return Curve([point for run in some for _, point in sorted(run.items())])
    common = sorted(set.intersection(*(set(run) for run in some)))
    means = [(fmean(run[i][0] for run in some), fmean(run[i][1] for run in some)) for i in common]
    deviations = [stdev(run[i][1] for run in some) for i in common]
    last = max(common, default=0)
    beyond = [
        [point for i, point in sorted(run.items()) if i >= last] for run in some if max(run) > last
    ]
    return Curve(means, deviations, beyond)


def curves(series: Sequence[Series], key: str = "") -> list[Figure]:
    """Return figures of the score and, where it is recorded, of loss, side by side, then the score
    over bytes.

    `key` is appended to their names.
    """
    runs = [run for each in series for run in each.runs]
    tiers = tiers_of(runs)
    overs = [("score", "rounds"), ("loss", "rounds"), ("score", "seconds"), ("loss", "seconds"),
             *(("score", tier) for tier in tiers), ("train_loss", "rounds")]  # fmt: skip
    scored_by = runs[0].experiment.score
    label = scores_of(runs)
    shown = {"score": score_axis(scored_by, label), "loss": LOSS, "train_loss": TRAINING_LOSS}
    names = {"score": label, "loss": "test loss", "train_loss": "training loss"}
    targets = {run.experiment.stop.target for run in runs}
    target = targets.pop() if len(targets) == 1 else None
    short = {each.label: each.mark for each in series}
    figures: list[Figure] = []
    for field, over in overs:
        lines = {each.label: _curve(each, field, over) for each in series}
        every = [
            point for line in lines.values() for part in (line.points, *line.rest) for point in part
        ]
        if field != "score" and not every:
            continue
        of_bytes = bytes_axis(f"{over.upper()} bytes", max((x for x, _ in every), default=0.0))
        x = {"rounds": GLOBAL_ROUND, "seconds": Axis("time", seconds_of(runs))}.get(over, of_bytes)
        y = shown[field]
        name = names[field]
        place = {"rounds": "global rounds"}.get(over, x.name)
        unit = f", {y.unit}" if y.unit else ""
        file = f"{re.sub('[ _]', '-', scored_by.label if field == 'score' else field)}-{over}{key}"
        title = f"{name[:1].upper()}{name[1:]} over {place}{unit}"
        goal = target if field == "score" else None
        figures.append(charts.curves(file, title, lines, x=x, y=y, target=goal, short=short))
    return figures


def _curve(series: Series, field: str, over: str) -> Curve:
    """Return the mean over a series' finished runs, the others as thin lines; over all of them if
    none has finished.
    """
    mean = mean_curve([_points(run, field, over) for run in series.counted])
    others = [_points(run, field, over) for run in series.runs if run not in series.counted]
    rest = [*mean.rest, *([*run.values()] for run in others if run)]
    return Curve(mean.points, mean.deviations, rest, series.style)


def _points(run: Run, field: str, over: str) -> dict[int, Point]:
    """Return a run's points by global round."""
    spent = 0
    found = dict[int, Point]()
    known = over in ("rounds", "seconds", *run.tiers)
    for row in run.rounds if known else ():
        spent += sum(row.bytes_.get(name, 0) for name in columns_of([over]))
        value = getattr(row, field)
        if value is not None:
            x = {"rounds": float(row.global_round), "seconds": row.elapsed_s}.get(
                over, float(spent)
            )
            found[row.global_round] = (x, value)
    return found


LINKS_FOLD: Final = 60  # rows of links.csv beyond which the table is folded

BYTES: Final = (
    "Payload and MQTT packets are counted by the receiver. The TCP stream is the kernel's count "
    "for the child's own "
    "broker connection (TCP_INFO); it includes logins, acknowledgements and pings, but not the "
    "noise bytes of the link "
    "calibration before the run. It is as of the child's last report. TCP and IP headers are not "
    "counted."
)
DIRECT: Final = (
    "This run used no network: bytes are the payload of whole models, seconds are one machine's "
    "computing time with "
    "devices trained one after another. Links were declared, but not enforced."
)
SIMULATED: Final = (
    "These seconds are simulated: virtual ones, of the machines and links that manifest.json has. "
    "Models, messages and "
    "packets are those of a lab of processes; of a TCP stream the MQTT packets are counted."
)
TOPOLOGY: Final = (
    "Rates as declared in the experiment, and as measured before the run if link "
    "calibration was on."
)

_BYTE_PARTS: Final = (
    ("s0", "models"),
    ("s3", "extras"),
    ("s5", "frozen arrays"),
    ("s2", "control"),
    ("s4", "MQTT's own"),
    ("s1", "rest of TCP"),
)


def bytes_axis(name: str, most: float) -> Axis:
    """Return an axis in the byte unit that suits the largest number."""
    unit, factor = next(
        ((u, f) for u, f in (("GB", 1e-9), ("MB", 1e-6), ("kB", 1e-3)) if most * f >= 1), ("B", 1.0)
    )
    return Axis(name, unit, factor)


def traffic(run: Run) -> Figure:
    """Return a figure of each tier's bytes: models, extras and frozen arrays if any, control
    messages, overheads.
    """
    rows = {}
    for (tier, direction), found in _by_direction(run).items():
        payloads = [
            sum(link.payload_bytes or 0 for link in found if link.kind == kind)
            for kind in LINK_KINDS
        ]
        whole = [link for link in found if link.kind == "all"]
        message = sum(link.message_bytes or 0 for link in whole)
        wire = _carried(whole)
        rest = 0 if wire is None else max(0, wire - message)
        rows[f"{tier.upper()} {direction}"] = [*payloads, message - sum(payloads), rest]
    axis = bytes_axis("bytes", max(map(sum, rows.values()), default=0.0))
    rare = [LINK_KINDS.index(kind) for kind in RARE]
    shown = [
        i for i in range(len(_BYTE_PARTS)) if i not in rare or any(row[i] for row in rows.values())
    ]
    parts = [_BYTE_PARTS[i] for i in shown]
    rows = {name: [row[i] for i in shown] for name, row in rows.items()}
    return charts.bars(run.file_name("bytes"), "Bytes of the run", parts, rows, axis=axis)


def tiers(run: Run) -> Table:
    """Return the three byte counts of each tier and direction, and the prediction for a global
    round if any.
    """
    count = max(len(run.rounds), 1)
    prediction = run.prediction
    columns = [
        Column("tier", text=True),
        Column("direction", text=True),
        Column("payload"),
        Column("MQTT packets"),
        Column("TCP stream"),
        Column("MQTT a global round", digits=0),
    ]
    columns += [Column("predicted", digits=0)] * (prediction is not None)
    rows: list[list[Cell]] = []
    for (tier, direction), found in _by_direction(run).items():
        whole = [link for link in found if link.kind == "all"]
        message = sum(link.message_bytes or 0 for link in whole)
        payload = sum(link.payload_bytes or 0 for link in whole)
        line: list[Cell] = [
            tier.upper(),
            direction,
            payload,
            message,
            _carried(whole),
            message / count,
        ]
        if prediction is not None:
            predicted = [
                prediction.bytes_[link.goes] for link in whole if link.goes in prediction.bytes_
            ]
            line.append(sum(predicted) if predicted else None)
        rows.append(line)
    return Table(run.file_name("tiers"), "Bytes by tier and direction", columns, rows)


def links(run: Run) -> Table:
    """Return the rows of links.csv, with the declared rates; without the links of more than
    NODES_MOST devices.
    """
    columns = [
        Column("tier", text=True),
        Column("from", text=True),
        Column("to", text=True),
        Column("kind", text=True),
        Column("payload"),
        Column("MQTT"),
        Column("TCP, noise included"),
        Column("noise before the run"),
        Column("over payload", "%", 2),
        Column("sent again"),
        Column("round trip", "ms", 2),
        Column("least", "ms", 3),
        Column("declared", "Mbit/s"),
        Column("measured", "Mbit/s", 2),
    ]
    rows: list[list[Cell]] = []
    of = declared_links(run)
    title = "Bytes of each link"
    devices = frozenset[str]()
    if len(run.experiment.tree.devices) > NODES_MOST:
        devices = frozenset(run.experiment.tree.devices)
        title += f" but those of the {len(devices)} devices (links.csv has them)"
    for link in run.links:
        if link.to in devices or link.from_ in devices:
            continue
        declared = _declared(run, link, of) if link.kind == "all" else None
        rows.append(
            [
                link.tier,
                link.from_,
                link.to,
                link.kind,
                link.payload_bytes,
                link.message_bytes,
                link.wire_bytes,
                link.probe_bytes or 0,
                link.overhead_percent,
                link.retransmitted_bytes,
                link.rtt_ms,
                link.rtt_min_ms,
                declared,
                link.measured_mbit,
            ]
        )
    return Table(run.file_name("links"), title, columns, rows)


def topology(run: Run) -> Figure:
    """Return a drawing of the lab's nodes and links."""
    measured = {link.goes: link.measured_mbit for link in run.links if link.kind == "all"}
    rates = {}
    for name, link in declared_links(run).items():
        parent = run.experiment.tree.parent(name) if name in run.experiment.tree else CLOUD
        declared = (_rate(link.get("down_mbit")), _rate(link.get("up_mbit")))
        seen = (measured.get(f"{parent} {name}"), measured.get(f"{name} {parent}"))
        rates[name] = Rates(declared, _rate(link.get("delay_ms")) or 0.0, seen)
    return maps.topology(run.file_name("topology"), run.experiment.tree, rates)


def _by_direction(run: Run) -> dict[tuple[str, str], list[LinkRecord]]:
    """Return the rows of the links by tier and direction."""
    found: dict[tuple[str, str], list[LinkRecord]] = {
        (tier, to): [] for tier in run.tiers for to in ("down", "up")
    }
    for link in run.links:
        if link.kind != BROKER and link.tier in run.tiers:
            found[link.tier, "down" if _goes_down(run, link) else "up"].append(link)
    return found


def _goes_down(run: Run, link: LinkRecord) -> bool:
    return (
        link.to != CLOUD
        and link.to in run.experiment.tree
        and run.experiment.tree.parent(link.to) == link.from_
    )


def _carried(whole: Sequence[LinkRecord]) -> int | None:
    """Return the bytes of the TCP streams without link calibration, or None if a child has not
    reported.
    """
    wires = [
        link.wire_bytes - (link.probe_bytes or 0) for link in whole if link.wire_bytes is not None
    ]
    if whole and len(wires) == len(whole):
        return sum(wires)
    return None


def declared_links(run: Run) -> dict[str, Mapping[str, Any]]:
    """Return the links that the manifest has by node; a kept run's has none."""
    links = run.manifest.get("links")
    of = links.get("of") if isinstance(links, Mapping) else None
    known = of if isinstance(of, Mapping) else {}
    return {str(name): link for name, link in known.items() if isinstance(link, Mapping)}


def _declared(run: Run, link: LinkRecord, of: Mapping[str, Mapping[str, Any]]) -> float | None:
    up = None if _goes_down(run, link) else of.get(link.from_)
    down = of.get(link.to)
    return _rate(up.get("up_mbit") if up is not None else (down or {}).get("down_mbit"))


def _rate(value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


EVENTS_MOST: Final = 200
CHILDREN_MOST: Final = 12  # of the cloud that have a curve

SCORES: Final = (
    "Measured on the cloud's test set, with the model that the experiment evaluates (the mean of "
    "the uploads). Seconds "
    "are the cloud's monotonic clock since the whole lab was ready; evaluation in parallel with "
    "the next global round "
    "is not counted. Bytes are MQTT packets, in both directions of all links of a tier. Equal "
    "curves are drawn once."
)
BANDS: Final = (
    "Finished runs that differ only in the seed are one line: the mean, global round by global "
    "round. The band is one "
    "standard deviation (n - 1) above and below it. Thin lines are single runs: those that did "
    "not finish, and what "
    "others have beyond the shortest."
)
SECONDS: Final = (
    "The phases of a global round, as measured at the cloud. record: writing the results of the "
    "previous round. "
    "dispatch: until all its children have the model. train: until the first result. wait: until "
    "the last result. "
    "collect: until that result's model is received. aggregate: mixing the models. evaluate: "
    "waiting for the last "
    "evaluation if it takes longer than a global round. The phases add up to the global round."
)
EPOCHS: Final = (
    "Epochs per local round of the cloud's children, and each device's work: seconds of training "
    "and of waiting for a "
    "slot on its host, as measured there, and the seconds of delay that emulate slower hardware."
)
DATA: Final = (
    "Training samples of each device (rows) by class (columns). The area of a square is "
    "proportional to its samples. "
    "The number on the right is the device's total."
)


def overview(series: Sequence[Series]) -> Table:
    """Return a table with a row for each run."""
    runs = [run for each in series for run in each.runs]
    tiers = tiers_of(runs)
    column, score = _scored(runs)
    texts = (Column(name, text=True) for name in ("series", "id", "state", "seed"))
    columns = [
        *texts,
        Column("global rounds"),
        column,
        Column("test loss", digits=4),
        Column("time", seconds_of(runs)),
        *byte_columns(tiers),
    ]
    rows = [
        (
            each.whole,
            run.id,
            str(run.state),
            str(run.seed),
            len(run.rounds),
            score(run),
            run.loss,
            run.seconds,
            *_megabytes(run, tiers),
        )
        for each in series
        for run in each.runs
    ]
    return Table("overview", "The runs, bytes as MQTT packets", columns, rows)


def _scored(runs: Sequence[Run]) -> tuple[Column, Callable[[Run], float | None]]:
    """Return the column of the runs' scores, and the value of a run in it: in percent if all scores
    are shares.
    """
    factor = 100.0 if all(run.experiment.score.share for run in runs) else 1.0
    column = Column(score_column(runs), *(("%", 2) if factor > 1 else ("", 4)))
    return column, lambda run: None if run.score is None else factor * run.score


def budget(series: Sequence[Series], key: str = "") -> Figure:
    """Return a figure of the phases of each series' mean global round, and of its prediction if
    any.

    `key` is appended to the figure's name.
    """
    rows: dict[str, list[float]] = {}
    short: dict[str, str] = {}
    for each in series:
        seconds = [_a_round(run) for run in each.counted]
        rows[each.label] = [
            fmean(one[phase] for one in seconds) if seconds else 0.0 for phase in GLOBAL_PHASES
        ]
        short |= {each.label: each.mark, f"{each.label}, predicted": f"{each.mark}, predicted"}
        prediction = next((run.prediction for run in each.runs if run.prediction is not None), None)
        if prediction is not None:
            rows[f"{each.label}, predicted"] = [
                prediction.seconds.get(phase, 0.0) for phase in GLOBAL_PHASES
            ]
    axis = Axis("time of a global round", seconds_of(run for each in series for run in each.runs))
    return charts.bars(
        f"budget{key}",
        "Seconds of a global round, mean",
        _PHASE_PARTS,
        rows,
        axis=axis,
        short=short,
    )


def budgets(run: Run) -> Figure:
    """Return a figure of the phases of each global round."""
    values = [[row.phases[phase] for phase in GLOBAL_PHASES] for row in run.rounds]
    name = run.file_name("seconds")
    title = f"Seconds of each global round, {run.ending}"
    return charts.columns(
        name, title, _PHASE_PARTS, values, x=GLOBAL_ROUND, axis=Axis("time", seconds_of([run]))
    )


def phases(run: Run) -> Table:
    """Return a table of a run's seconds by phase: total, share, and in a global round, with sum and
    elapsed time.
    """
    totals: dict[str, float] = {
        phase: sum(row.phases[phase] for row in run.rounds) for phase in GLOBAL_PHASES
    }
    totals |= {_SUM: sum(totals.values()), _ELAPSED: run.seconds}
    columns = [
        Column("phase", text=True),
        Column("total", seconds_of([run]), 3),
        Column("share", "%"),
        Column("a global round", seconds_of([run]), 4),
    ]
    predicted: dict[str, float] = {}
    if run.prediction is not None:
        columns.append(Column("predicted", seconds_of([run]), 4))
        predicted = {
            phase: run.prediction.seconds[phase]
            for phase in GLOBAL_PHASES
            if phase in run.prediction.seconds
        }
        predicted[_SUM] = sum(predicted.values())
    count = max(len(run.rounds), 1)
    whole = run.seconds or 1
    rows = [
        [
            phase,
            total,
            100 * total / whole,
            total / count,
            *[predicted.get(phase)] * (run.prediction is not None),
        ]
        for phase, total in totals.items()
    ]
    return Table(run.file_name("phases"), "Seconds by phase", columns, rows)


def mean_phases(series: Sequence[Series], key: str = "") -> Table:
    """Return a table of the seconds of a global round by phase and series: mean and deviation over
    the runs.

    `key` is appended to the table's name.
    """
    rounds = [[_a_round(run) for run in each.counted] for each in series]
    phases = (*GLOBAL_PHASES, _SUM)
    rows = [
        [phase, *(Spread.of([one[phase] for one in every]) for every in rounds)] for phase in phases
    ]
    columns = [
        Column("phase", text=True),
        *(Column(each.label, seconds_of(each.runs), 4) for each in series),
    ]
    title = "Seconds of a global round, mean ± standard deviation (n - 1) over runs"
    return Table(f"phases{key}", title, columns, rows)


def epochs(run: Run) -> Figure:
    """Return a figure of the epochs (tau_c) of the cloud's children, of evenly spaced ones of many,
    by global round.
    """
    rows = {
        name: [row.epochs.get(name) for row in run.rounds]
        for name in run.experiment.tree.children[CLOUD]
    }
    lines = {}
    for name in spaced(list(rows), CHILDREN_MOST):
        points = [
            (float(r), float(count)) for r, count in enumerate(rows[name], 1) if count is not None
        ]
        lines[name] = Curve(points)
    file = run.file_name("epochs")
    title = "Epochs of each child of the cloud"
    figure = charts.curves(file, title, lines, x=GLOBAL_ROUND, y=Axis("epochs", whole=True))
    columns = (Column("global round"), *(Column(name) for name in rows))
    cells = [(r, *counts) for r, counts in enumerate(zip(*rows.values(), strict=True), 1)]
    return replace(figure, table=Table(file, title, columns, cells))


def work(run: Run) -> Table:
    """Return a table of each device's total work in the run, or of the quantiles over more than
    NODES_MOST devices.
    """
    unit = seconds_of([run])
    columns = [
        Column("parent", text=True),
        Column("device", text=True),
        Column("samples"),
        Column("global rounds"),
        Column("epochs"),
        Column("SGD steps"),
        Column("training", unit, 3),
        Column("waiting for a slot", unit, 3),
        Column("slowed by", unit, 3),
    ]
    found: dict[tuple[str, str], list[Any]] = {}
    paths = any(each.path for each in run.devices)
    for each in run.devices:
        sums = found.setdefault(
            (each.parent, each.device), [each.samples, 0, 0, 0, 0.0, 0.0, 0.0, each.path]
        )
        more = (
            min(1, each.local_rounds),
            each.epochs,
            each.sgd_steps,
            each.train_s,
            each.wait_s,
            each.pause_s,
        )
        sums[1:] = [*map(add, sums[1:7], more), each.path]
    if len(found) > NODES_MOST:
        title = (
            f"Work of {len(found)} devices, quantiles of each column (devices.csv has each device)"
        )
        several = [Column("quantile", text=True), *columns[2:]]
        quantiled = quantiles([sums[:7] for sums in found.values()])
        return Table(run.file_name("devices"), title, several, quantiled)
    columns += [Column("path", text=True)] * paths
    rows = [[*names, *sums[:7], *sums[7:] * paths] for names, sums in found.items()]
    return Table(run.file_name("devices"), "Work of each device", columns, rows)


def events(run: Run) -> tuple[Table, int]:
    """Return a table of the last EVENTS_MOST events without plans and global rounds, and the number
    of omitted ones.
    """
    shown = [event for event in run.events if _is_shown(event)]
    rows = [
        (event.time[:19].replace("T", " "), event.name, _event_text(event))
        for event in shown[-EVENTS_MOST:]
    ]
    columns = [
        Column("time (UTC)", text=True),
        Column("event", text=True),
        Column("what", text=True),
    ]
    return Table(run.file_name("events"), "Events", columns, rows), max(0, len(shown) - EVENTS_MOST)


def global_rounds(run: Run) -> Table:
    """Return a table of the rows of rounds.csv."""
    columns = [
        Column("global round"),
        Column("time", seconds_of([run]), 3),
        Column(score_column([run]), digits=4),
        Column("test loss", digits=4),
        Column("training loss", digits=4),
        *(Column(phase, seconds_of([run]), 4) for phase in GLOBAL_PHASES),
        Column("SGD steps"),
        Column("critical path"),
        *byte_columns(run.tiers, ""),
        Column("missing", text=True),
    ]
    rows = [
        (
            r.global_round,
            r.elapsed_s,
            r.score,
            r.loss,
            r.train_loss,
            *r.phases.values(),
            r.sgd_steps,
            r.path_steps,
            *(r.bytes_.get(column) for column in columns_of(run.tiers)),
            " ".join((*r.missing, *r.refused)),
        )
        for r in run.rounds
    ]
    return Table(run.file_name("rounds"), "Each global round", columns, rows)


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
_SUM = "sum of the phases"
_ELAPSED = "elapsed"
_PHASE_PARTS: Final = [(PHASES[phase], phase) for phase in GLOBAL_PHASES]


def _a_round(run: Run) -> dict[str, float]:
    """Return the seconds of a run's mean global round by phase, and their sum."""
    count = max(len(run.rounds), 1)
    found = {phase: sum(row.phases[phase] for row in run.rounds) / count for phase in GLOBAL_PHASES}
    return found | {_SUM: sum(found.values())}


def _megabytes(run: Run, tiers: Sequence[str]) -> list[float | None]:
    """Return a run's bytes up and down of each tier in MB, None for a tier that it has not."""
    return [
        None if column not in run.totals else run.totals[column] / 1e6
        for column in columns_of(tiers)
    ]


def _is_shown(event: Event) -> bool:
    """Return whether an event is listed: no figure or table covers it, and it is not a normal
    change of presence.
    """
    if event.name == "child":
        return event.facts.get("state") in ("lost", "failed", "disconnected")
    return event.name not in ("plan", "scoring", "classes", "global_round", "evaluated", "measured")


def _event_text(event: Event) -> str:
    known = _SHOWN_FACTS.get(event.name)
    return "; ".join(
        f"{key} {_brief(fact)}"
        for key, fact in event.facts.items()
        if known is None or key in known
    )


def _brief(fact: object, *, most: int = 160) -> str:
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
