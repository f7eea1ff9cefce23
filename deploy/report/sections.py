"""Sections of a report: a function for each figure and table, and the texts that explain them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from common.experiment.topology import CLOUD
from common.protocol.timeline import GLOBAL_PHASES
from deploy.console.tabular import Cell, Column, Spread, Table
from deploy.report import charts, maps
from deploy.report.charts import Axis
from deploy.report.curves import GLOBAL_ROUND, SECONDS_AXIS
from deploy.report.figures import PHASES, Figure
from deploy.report.link_sections import file_name
from deploy.report.maps import NODES_MOST, quantiles
from deploy.runs.groups import Series, by_seed, firsts, paired
from deploy.runs.run import Event, Run, columns_of, tiers_of

EVENTS_MOST: Final = 200

SCORES: Final = (
    "Measured on the cloud's test set, with the model that the experiment evaluates (the mean of the uploads). Seconds "
    "are the cloud's monotonic clock since the whole lab was ready; evaluation in parallel with the next global round "
    "is not counted. Bytes are MQTT packets, in both directions of all links of a tier. Equal curves are drawn once."
)
BANDS: Final = (
    "Finished runs that differ only in the seed are one line: the mean, global round by global round. The band is one "
    "standard deviation (n - 1) above and below it. Thin lines are single runs: those that did not finish, and what "
    "others have beyond the shortest."
)
SECONDS: Final = (
    "The phases of a global round, as measured at the cloud. record: writing the results of the previous round. "
    "dispatch: until all its children have the model. train: until the first result. wait: until the last result. "
    "collect: until that result's model is received. aggregate: mixing the models. evaluate: waiting for the last "
    "evaluation if it takes longer than a global round. The phases add up to the global round."
)
EPOCHS: Final = (
    "Epochs per local round of the cloud's children, and each device's work: seconds of training and of waiting for a "
    "slot on its host, as measured there, and the seconds of delay that emulate slower hardware."
)
DATA: Final = (
    "Training samples of each device (rows) by class (columns). The area of a square is proportional to its samples. "
    "The number on the right is the device's total."
)


def overview(series: Sequence[Series]) -> Table:
    """Return a table with a row for each run."""
    runs = [run for each in series for run in each.runs]
    tiers = tiers_of(runs)
    column, score = _scored(runs)
    texts = (Column(name, text=True) for name in ("series", "id", "state", "seed"))
    columns = [*texts, Column("global rounds"), column, Column("test loss", digits=4), Column("time", "s"),
               *_byte_columns(tiers, "MB")]  # fmt: skip
    rows = [
        (each.whole, run.id, str(run.state), str(run.seed), len(run.rounds), score(run), run.loss, run.seconds,
         *_megabytes(run, tiers))
        for each in series
        for run in each.runs
    ]  # fmt: skip
    return Table("overview", "The runs, bytes as MQTT packets", columns, rows)


def means(series: Sequence[Series]) -> Table:
    """Return a table with a row for each series: means and deviations over its finished runs.

    The difference is that to the first series of the same task, paired by seeds.
    """
    runs = [run for each in series for run in each.runs]
    tiers = tiers_of(runs)
    column, score = _scored(runs)
    tasks = any(each.task for each in series)
    columns = [
        *[Column("task", text=True)] * tasks,
        *(Column(name, text=True) for name in ("series", "finished", "seeds")),
        *(Column("global rounds"), column),
        Column("difference, paired", "points" if column.unit else "", column.digits),
        *(Column("test loss", digits=4), Column("time", "s"), *_byte_columns(tiers, "MB")),
    ]
    rows: list[Sequence[Cell]] = []
    for each in series:
        first = firsts(series)[each.task]
        done = each.finished
        theirs, own = (by_seed(one.finished, score) for one in (first, each))
        bytes_ = [[_megabytes(run, [tier]) for run in done] for tier in tiers]
        rows.append((
            *[each.task] * tasks, each.label, f"{len(done)}/{len(each.runs)}", ", ".join(each.seeds),
            Spread.of([len(run.rounds) for run in done]), _spread(score(run) for run in done),
            None if each is first else paired(theirs, own, lambda before, after: after - before),
            _spread(run.loss for run in done), Spread.of([run.seconds for run in done]),
            *(_spread(cells[i] for cells in cells_of) for cells_of in bytes_ for i in (0, 1)),
        ))  # fmt: skip
    title = "The series: mean ± standard deviation (n - 1) over the finished runs"
    return Table("series", title, columns, rows)


def score_column(runs: Sequence[Run]) -> str:
    """Return the title of a column of the runs' scores."""
    labels = sorted({run.scored_by.label for run in runs})
    return f"test {' or '.join(labels)}"


def _scored(runs: Sequence[Run]) -> tuple[Column, Callable[[Run], float | None]]:
    """Return the column of the runs' scores, and the value of a run in it: in percent if all scores are shares."""
    factor = 100.0 if all(run.scored_by.share for run in runs) else 1.0
    column = Column(score_column(runs), *(("%", 2) if factor > 1 else ("", 4)))
    return column, lambda run: None if run.score is None else factor * run.score


def budget(series: Sequence[Series], key: str = "") -> Figure:
    """Return a figure of the phases of each series' mean global round, and of its prediction if any.

    `key` is appended to the figure's name.
    """
    rows: dict[str, list[float]] = {}
    short: dict[str, str] = {}
    for each in series:
        seconds = [_a_round(run) for run in each.counted]
        rows[each.label] = [fmean(one[phase] for one in seconds) if seconds else 0.0 for phase in GLOBAL_PHASES]
        short |= {each.label: each.mark, f"{each.label}, predicted": f"{each.mark}, predicted"}
        prediction = next((run.prediction for run in each.runs if run.prediction is not None), None)
        if prediction is not None:
            rows[f"{each.label}, predicted"] = [prediction.seconds.get(phase, 0.0) for phase in GLOBAL_PHASES]
    title = "Seconds of a global round, mean"
    return charts.bars(f"budget{key}", title, _PHASE_PARTS, rows, axis=Axis("time of a global round", "s"), short=short)


def budgets(run: Run) -> Figure:
    """Return a figure of the phases of each global round."""
    values = [[row.phases[phase] for phase in GLOBAL_PHASES] for row in run.rounds]
    name, title = file_name("seconds", run), f"Seconds of each global round, {run.id.rpartition('-')[2]}"
    return charts.columns(name, title, _PHASE_PARTS, values, x=GLOBAL_ROUND, axis=SECONDS_AXIS)


def phases(run: Run) -> Table:
    """Return a table of a run's seconds by phase: total, share, and in a global round, with sum and elapsed time."""
    totals: dict[str, float] = {phase: sum(row.phases[phase] for row in run.rounds) for phase in GLOBAL_PHASES}
    totals |= {_SUM: sum(totals.values()), _ELAPSED: run.seconds}
    columns = [Column("phase", text=True), Column("total", "s", 3), Column("share", "%"),
               Column("a global round", "s", 4)]  # fmt: skip
    predicted: dict[str, float] = {}
    if run.prediction is not None:
        columns.append(Column("predicted", "s", 4))
        predicted = {phase: run.prediction.seconds[phase] for phase in GLOBAL_PHASES if phase in run.prediction.seconds}
        predicted[_SUM] = sum(predicted.values())
    count, whole = max(len(run.rounds), 1), run.seconds or 1
    rows = [
        [phase, total, 100 * total / whole, total / count, *[predicted.get(phase)] * (run.prediction is not None)]
        for phase, total in totals.items()
    ]
    return Table(file_name("phases", run), "Seconds by phase", columns, rows)


def mean_phases(series: Sequence[Series], key: str = "") -> Table:
    """Return a table of the seconds of a global round by phase and series: mean and deviation over the runs.

    `key` is appended to the table's name.
    """
    rounds = [[_a_round(run) for run in each.counted] for each in series]
    rows = [
        [phase, *(Spread.of([one[phase] for one in every]) for every in rounds)] for phase in (*GLOBAL_PHASES, _SUM)
    ]
    columns = [Column("phase", text=True), *(Column(each.label, "s", 4) for each in series)]
    return Table(
        f"phases{key}", "Seconds of a global round, mean ± standard deviation (n - 1) over runs", columns, rows
    )


def epochs(run: Run) -> Figure:
    """Return a figure of the epochs (tau_c) of each child of the cloud in each global round."""
    names = run.nodes.children[CLOUD]
    return maps.epochs(file_name("epochs", run), {name: [row.epochs.get(name) for row in run.rounds] for name in names})


def work(run: Run) -> Table:
    """Return a table of each device's total work in the run, or of the quantiles over more than NODES_MOST devices."""
    columns = [Column("parent", text=True), Column("device", text=True), Column("samples"),
               Column("global rounds"), Column("epochs"), Column("SGD steps"), Column("training", "s", 3),
               Column("waiting for a slot", "s", 3), Column("slowed by", "s", 3)]  # fmt: skip
    found: dict[tuple[str, str], list[Any]] = {}
    paths = any(each.path for each in run.devices)
    for each in run.devices:
        sums = found.setdefault((each.parent, each.device), [each.samples, 0, 0, 0, 0.0, 0.0, 0.0, each.path])
        for i, value in enumerate((1, each.epochs, each.sgd_steps, each.train_s, each.wait_s, each.pause_s), 1):
            sums[i] += value
        sums[7] = each.path
    if len(found) > NODES_MOST:
        title = f"Work of {len(found)} devices, quantiles of each column (devices.csv has each device)"
        several = [Column("quantile", text=True), *columns[2:]]
        quantiled = quantiles([sums[:7] for sums in found.values()])
        return Table(file_name("devices", run), title, several, quantiled)
    columns += [Column("path", text=True)] * paths
    rows = [[*names, *sums[:7], *sums[7:] * paths] for names, sums in found.items()]
    return Table(file_name("devices", run), "Work of each device", columns, rows)


def partition(run: Run) -> Figure | None:
    """Return a figure of the samples by device and class, or None if the run has no partition.json."""
    return None if run.partition is None else maps.partition(run.partition, name=file_name("partition", run))


def events(run: Run) -> tuple[Table, int]:
    """Return a table of the last EVENTS_MOST events without plans and global rounds, and the number of omitted ones."""
    shown = [event for event in run.events if _is_shown(event)]
    rows = [(event.time[:19].replace("T", " "), event.name, _event_text(event)) for event in shown[-EVENTS_MOST:]]
    columns = [Column("time (UTC)", text=True), Column("event", text=True), Column("what", text=True)]
    return Table(file_name("events", run), "Events", columns, rows), max(0, len(shown) - EVENTS_MOST)


def plans(run: Run) -> Table:
    """Return a table of the first and the last decision of each node's aggregation rule, by fact."""
    found: dict[tuple[str, str], list[object]] = {}
    for event in run.events:
        if event.name == "plan":
            facts = {
                key: fact for key, fact in event.facts.items() if key not in ("global_round", "node", "local_round")
            }
            for key, fact in facts.items():
                found.setdefault((str(event.facts.get("node", "")), key), []).append(fact)
    columns = [Column("node", text=True), Column("fact", text=True), Column("plans"), Column("first", text=True),
               Column("last", text=True)]  # fmt: skip
    rows = [(*names, len(facts), _brief(facts[0]), _brief(facts[-1])) for names, facts in found.items()]
    return Table(file_name("plans", run), "Decisions of the aggregation rules", columns, rows)


def global_rounds(run: Run) -> Table:
    """Return a table of the rows of rounds.csv."""
    columns = [Column("global round"), Column("time", "s", 3), Column(score_column([run]), digits=4),
               Column("test loss", digits=4), Column("training loss", digits=4),
               *(Column(phase, "s", 4) for phase in GLOBAL_PHASES), Column("SGD steps"), Column("critical path"),
               *_byte_columns(run.tiers, ""), Column("missing", text=True)]  # fmt: skip
    rows = [
        (r.global_round, r.elapsed_s, r.score, r.loss, r.train_loss, *r.phases.values(), r.sgd_steps, r.path_steps,
         *(r.bytes_.get(column) for column in columns_of(run.tiers)), " ".join((*r.missing, *r.refused)))
        for r in run.rounds
    ]  # fmt: skip
    return Table(file_name("rounds", run), "Each global round", columns, rows)


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
_SUM, _ELAPSED = "sum of the phases", "elapsed"
_PHASE_PARTS: Final = [(PHASES[phase], phase) for phase in GLOBAL_PHASES]


def _a_round(run: Run) -> dict[str, float]:
    """Return the seconds of a run's mean global round by phase, and their sum."""
    count = max(len(run.rounds), 1)
    found = {phase: sum(row.phases[phase] for row in run.rounds) / count for phase in GLOBAL_PHASES}
    return found | {_SUM: sum(found.values())}


def _spread(values: Iterable[float | None]) -> Spread | None:
    return Spread.of([value for value in values if value is not None])


def _megabytes(run: Run, tiers: Sequence[str]) -> list[float | None]:
    """Return a run's bytes up and down of each tier in MB, None for a tier that it has not."""
    return [None if column not in run.totals else run.totals[column] / 1e6 for column in columns_of(tiers)]


def _byte_columns(tiers: Sequence[str], unit: str) -> list[Column]:
    return [Column(f"{tier.upper()} {way}", unit, 3) for tier in tiers for way in ("up", "down")]


def _is_shown(event: Event) -> bool:
    """Return whether an event is listed: no figure or table covers it, and it is not a normal change of presence."""
    if event.name == "child":
        return event.facts.get("state") in ("lost", "failed", "disconnected")
    return event.name not in ("plan", "global_round", "evaluated", "measured")


def _event_text(event: Event) -> str:
    known = _SHOWN_FACTS.get(event.name)
    return "; ".join(f"{key} {_brief(fact)}" for key, fact in event.facts.items() if known is None or key in known)


def _brief(fact: object, *, most: int = 160) -> str:
    """Return a fact as text of at most `most` characters, numbers rounded."""
    text = fact if isinstance(fact, str) else json.dumps(_rounded(fact), ensure_ascii=False)
    text = text.replace('"', "") if not isinstance(fact, str) else text
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _rounded(fact: object) -> object:
    if isinstance(fact, float):
        return float(f"{fact:.4g}")
    if isinstance(fact, Mapping):
        return {key: _rounded(value) for key, value in fact.items()}
    return list(_each(fact)) if isinstance(fact, list) else fact


def _each(facts: Sequence[object]) -> Iterator[object]:
    return map(_rounded, facts)
