"""Sections of a report: a function for each figure and table, and the texts that explain them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from common.experiment.score import ACCURACY
from common.experiment.topology import CLOUD
from common.protocol.timeline import GLOBAL_PHASES
from deploy.console.tabular import Column, Table
from deploy.report import charts, maps
from deploy.report.charts import Axis
from deploy.report.compare import distinguishing_labels, flat
from deploy.report.figures import Figure
from deploy.report.link_sections import bytes_axis, file_name
from deploy.report.partition_picture import figure as partition_figure
from deploy.runs.records import Event
from deploy.runs.run import Run, columns_of, tiers_of

EVENTS_MOST: Final = 200
SHARES: Final = (ACCURACY, "binary_accuracy")  # scores that are shown in percent
GLOBAL_ROUND: Final = Axis("global round")
SECONDS_AXIS: Final = Axis("time", "s")

SCORES: Final = (
    "Measured on the cloud's test set, with the model that the experiment evaluates (the mean of the uploads). Seconds "
    "are the cloud's monotonic clock since the whole lab was ready; evaluation in parallel with the next global round "
    "is not counted. Bytes are MQTT packets, in both directions of all links of a tier."
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


def labels(runs: Sequence[Run]) -> list[str]:
    """Return a short label for each run: the keys that differ if they are short, else the name and a part of the id."""
    apart = distinguishing_labels([{k: v for k, v in flat(run.tree).items() if k != "data.root"} for run in runs])
    if len(runs) > 1 and len(set(apart)) == len(runs) and max(map(len, apart)) <= 36:
        return apart
    return [f"{run.name} {run.id.rpartition('-')[2]}" for run in runs]


def overview(runs: Sequence[Run], names: Sequence[str]) -> Table:
    """Return a table with a row for each run."""
    tiers = tiers_of(runs)
    columns = [Column("run", text=True), Column("state", text=True), Column("seed"), Column("global rounds"),
               Column(score_column(runs), digits=4), Column("time", "s"), *_byte_columns(tiers)]  # fmt: skip
    rows = [
        (
            name,
            str(run.state),
            str(run.seed),
            len(run.rounds),
            run.score,
            run.seconds,
            *(run.totals.get(column) for column in columns_of(tiers)),
        )
        for run, name in zip(runs, names, strict=True)
    ]
    return Table("overview", "The runs, bytes as MQTT packets", columns, rows)


def score_column(runs: Sequence[Run]) -> str:
    """Return the title of a column of the runs' scores."""
    labels = sorted({run.scored_by.label for run in runs})
    return f"test {' or '.join(labels)}"


def scores(runs: Sequence[Run], names: Sequence[str]) -> list[Figure]:
    """Return curves of each score that runs have over global rounds, seconds, and each tier's bytes."""
    found: list[Figure] = []
    for label in dict.fromkeys(run.scored_by.label for run in runs):
        same = [(run, name) for run, name in zip(runs, names, strict=True) if run.scored_by.label == label]
        found += _scores([run for run, _ in same], [name for _, name in same], label)
    return found


def _scores(runs: Sequence[Run], names: Sequence[str], label: str) -> list[Figure]:
    tiers = tiers_of(runs)
    over: dict[str, dict[str, list[charts.Point]]] = {key: {} for key in ("rounds", "seconds", *tiers)}
    for run, name in zip(runs, names, strict=True):
        spent = dict.fromkeys(run.tiers, 0)
        lines: dict[str, list[charts.Point]] = {key: [] for key in ("rounds", "seconds", *run.tiers)}
        for row in run.rounds:
            for tier in run.tiers:
                spent[tier] += row.bytes_[f"{tier}_up_bytes"] + row.bytes_[f"{tier}_down_bytes"]
            if row.score is not None:
                at = {"rounds": float(row.global_round), "seconds": row.elapsed_s, **spent}
                for key, line in lines.items():
                    line.append((at[key], row.score))
        for key, line in lines.items():
            over[key][name] = line
    targets = {run.target for run in runs}
    target = targets.pop() if len(targets) == 1 else None
    axes = {"rounds": GLOBAL_ROUND, "seconds": SECONDS_AXIS}
    axes |= {tier: bytes_axis(f"{tier.upper()} bytes", over[tier]) for tier in tiers}
    shares = runs[0].scored_by.name in SHARES
    y = Axis(f"test {label}", "%", 100.0) if shares else Axis(f"test {label}")
    title, unit = label[:1].upper() + label[1:], ", %" if shares else ""
    titles = {"rounds": f"{title} over global rounds", "seconds": f"{title} over time"}
    titles |= {tier: f"{title} over {tier.upper()} bytes" for tier in tiers}
    return [
        charts.curves(
            f"{label.replace(' ', '-')}-{key}", f"{titles[key]}{unit}", lines, x=axes[key], y=y, target=target
        )
        for key, lines in over.items()
    ]


def budget(runs: Sequence[Run], names: Sequence[str]) -> Figure:
    """Return a figure of the phases of each run's mean global round, and of its prediction if any."""
    rows: dict[str, list[float]] = {}
    for run, name in zip(runs, names, strict=True):
        count = max(len(run.rounds), 1)
        rows[name] = [sum(row.phases[phase] for row in run.rounds) / count for phase in GLOBAL_PHASES]
        if run.prediction is not None:
            rows[f"{name}, predicted"] = [run.prediction.seconds.get(phase, 0.0) for phase in GLOBAL_PHASES]
    title = "Seconds of a global round, mean"
    return charts.bars("budget", title, _PHASE_PARTS, rows, axis=Axis("time of a global round", "s"))


def budgets(run: Run) -> Figure:
    """Return a figure of the phases of each global round."""
    values = [[row.phases[phase] for phase in GLOBAL_PHASES] for row in run.rounds]
    name, title = file_name("seconds", run), f"Seconds of each global round, {run.id.rpartition('-')[2]}"
    return charts.columns(name, title, _PHASE_PARTS, values, x=GLOBAL_ROUND, axis=SECONDS_AXIS)


def phases(runs: Sequence[Run], names: Sequence[str]) -> Table:
    """Return a table of each phase's seconds in the mean global round of each run, with their sum and the elapsed time.

    For a single run it has totals and shares, too.
    """
    columns, cells = [Column("phase", text=True)], list[Mapping[str, float]]()
    for run, name in zip(runs, names, strict=True):
        totals: dict[str, float] = {phase: sum(row.phases[phase] for row in run.rounds) for phase in GLOBAL_PHASES}
        totals |= {_SUM: sum(totals.values()), _ELAPSED: run.seconds}
        if len(runs) == 1:
            columns += [Column("total", "s", 3), Column("share", "%")]
            cells += [totals, {phase: 100 * total / (run.seconds or 1) for phase, total in totals.items()}]
        columns.append(Column(name if len(runs) > 1 else "a global round", "s", 4))
        cells.append({phase: total / max(len(run.rounds), 1) for phase, total in totals.items()})
        if run.prediction is not None:
            predicted = {
                phase: run.prediction.seconds[phase] for phase in GLOBAL_PHASES if phase in run.prediction.seconds
            }
            columns.append(Column(f"{name}, predicted" if len(runs) > 1 else "predicted", "s", 4))
            cells.append(predicted | {_SUM: sum(predicted.values())})
    rows = [[phase, *(found.get(phase) for found in cells)] for phase in (*GLOBAL_PHASES, _SUM, _ELAPSED)]
    return Table("phases", "Seconds by phase" if len(runs) == 1 else "Seconds of a global round, mean", columns, rows)


def epochs(run: Run) -> Figure:
    """Return a figure of the epochs (tau_c) of each child of the cloud in each global round."""
    names = run.nodes.children[CLOUD]
    return maps.epochs(file_name("epochs", run), {name: [row.epochs.get(name) for row in run.rounds] for name in names})


def work(run: Run) -> Table:
    """Return a table of each device's total work in the run."""
    columns = [Column("parent", text=True), Column("device", text=True), Column("samples"),
               Column("global rounds"), Column("epochs"), Column("SGD steps"), Column("training", "s", 3),
               Column("waiting for a slot", "s", 3)]  # fmt: skip
    found: dict[tuple[str, str], list[Any]] = {}
    pauses = any(each.pause_s is not None for each in run.devices)
    paths = any(each.path for each in run.devices)
    for each in run.devices:
        sums = found.setdefault((each.parent, each.device), [each.samples, 0, 0, 0, 0.0, 0.0, 0.0, each.path])
        for i, value in enumerate((1, each.epochs, each.sgd_steps, each.train_s, each.wait_s, each.pause_s or 0.0), 1):
            sums[i] += value
        sums[7] = each.path
    columns += [Column("slowed by", "s", 3)] * pauses + [Column("path", text=True)] * paths
    rows = [[*names, *sums[:6], *sums[6:7] * pauses, *sums[7:] * paths] for names, sums in found.items()]
    return Table(file_name("devices", run), "Work of each device", columns, rows)


def partition(run: Run) -> Figure | None:
    """Return a figure of the samples by device and class, or None if the run has no partition.json."""
    return None if run.partition is None else partition_figure(run.partition, name=file_name("partition", run))


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
               *_byte_columns(run.tiers), Column("missing", text=True)]  # fmt: skip
    rows = [
        (r.global_round, r.elapsed_s, r.score, r.loss, r.train_loss, *r.phases.values(), r.sgd_steps, r.path_steps,
         *(r.bytes_.get(column) for column in columns_of(run.tiers)), " ".join((*r.missing, *r.refused)))
        for r in run.rounds
    ]  # fmt: skip
    return Table(file_name("rounds", run), "Each global round", columns, rows)


def facts(run: Run) -> list[tuple[str, str]]:
    """Return the facts of a run, including those of manifest.json."""
    found = {"folder": run.path.name, "state": str(run.state), "seed": str(run.seed)}
    if run.partition is not None:
        found["split's digest"] = str(run.partition.get("digest", ""))
    for key, value in run.manifest.items():
        if key != "links":
            found[key.replace("_", " ")] = _brief(value, most=2000)
    return list(found.items())


# The facts of these events that the report shows nowhere else.
_SHOWN_FACTS: Final = {
    "run": ("done", "global_rounds"),
    "finished": ("global_round", "elapsed_s", "accuracy", "score", "loss"),
}
_SUM, _ELAPSED = "sum of the phases", "elapsed"
_PHASE_PARTS: Final = [(f"fill-{phase}", phase) for phase in GLOBAL_PHASES]


def _byte_columns(tiers: Sequence[str]) -> list[Column]:
    return [Column(f"{tier.upper()} {way}") for tier in tiers for way in ("up", "down")]


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
