"""What a report says of runs: one function for each figure and table, and the words that explain them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from deploy.console.tabular import Column, Table
from deploy.report import charts, maps
from deploy.report.charts import Axis
from deploy.report.compare import flat, tell_apart
from deploy.report.figures import Figure
from deploy.report.link_sections import bytes_axis, file_name
from deploy.report.partition_picture import figure as partition_figure
from deploy.runs.records import PHASES, TIERS, Event
from deploy.runs.run import Run

EVENTS_MOST: Final = 200
PERCENT: Final = Axis("test accuracy", "%", 100.0)
SECONDS_AXIS: Final = Axis("time", "s")

ACCURACY: Final = (
    "Accuracy on the cloud's test set of the mean of the uploads, as the experiment evaluates it. Seconds are the "
    "cloud's monotonic clock from the moment the whole lab was ready, evaluation beside the next global round not "
    "counted; bytes are MQTT packets, both directions of all links of a tier."
)
SECONDS: Final = (
    "A global round as the cloud sees it. record: writing what the last one left. dispatch: until every institution "
    "has the model. train: until the first result. wait: for the last result. collect: its upload. aggregate. "
    "evaluate: waiting for the last evaluation where it takes longer than a global round. The phases add up "
    "to the global round."
)
EPOCHS: Final = (
    "Epochs that each institution's devices trained in each local round, and each device's work: seconds of training "
    "and of waiting for a slot on its host, measured there; and by how many seconds it was slowed to play a slower one."
)
DATA: Final = (
    "Training samples of each device (rows) by class (columns): the area of a square is its share of the fullest one, "
    "the number at the right the device's samples."
)


def labels(runs: Sequence[Run]) -> list[str]:
    """Return a short name for each run: what tells them apart if that is short, else their names and ids."""
    apart = tell_apart([{k: v for k, v in flat(run.tree).items() if k != "data.root"} for run in runs])
    if len(runs) > 1 and len(set(apart)) == len(runs) and max(map(len, apart)) <= 36:
        return apart
    return [f"{run.name} {run.id.rpartition('-')[2]}" for run in runs]


def overview(runs: Sequence[Run], names: Sequence[str]) -> Table:
    """Return a line for each run."""
    columns = [Column("run", text=True), Column("state", text=True), Column("seed"), Column("global rounds"),
               Column("test accuracy", digits=4), Column("time", "s"), *(Column(n) for n in _BYTE_NAMES)]  # fmt: skip
    rows = [
        (name, str(run.state), str(run.seed), len(run.rounds), run.accuracy, run.seconds, *run.totals.values())
        for run, name in zip(runs, names, strict=True)
    ]
    return Table("overview", "The runs, bytes as MQTT packets", columns, rows)


def accuracy(runs: Sequence[Run], names: Sequence[str]) -> list[Figure]:
    """Return the curves over global rounds, seconds, and each tier's bytes."""
    over: dict[str, dict[str, list[charts.Point]]] = {"rounds": {}, "seconds": {}, "wan": {}, "lan": {}}
    for run, name in zip(runs, names, strict=True):
        spent = dict.fromkeys(TIERS, 0)
        lines: dict[str, list[charts.Point]] = {key: [] for key in over}
        for row in run.rounds:
            for tier in TIERS:
                spent[tier] += row.bytes_[f"{tier}_up_bytes"] + row.bytes_[f"{tier}_down_bytes"]
            if row.accuracy is not None:
                at = {"rounds": float(row.number), "seconds": row.elapsed_s, **spent}
                for key, line in lines.items():
                    line.append((at[key], row.accuracy))
        for key, line in lines.items():
            over[key][name] = line
    targets = {run.tree.get("target_accuracy") for run in runs}
    target = targets.pop() if len(targets) == 1 else None
    axes = {"rounds": Axis("global round"), "seconds": SECONDS_AXIS}
    axes |= {tier: bytes_axis(f"{tier.upper()} bytes", over[tier]) for tier in TIERS}
    titles = {"rounds": "Accuracy over global rounds", "seconds": "Accuracy over time"}
    titles |= {tier: f"Accuracy over {tier.upper()} bytes" for tier in TIERS}
    return [
        charts.curves(f"accuracy-{key}", f"{titles[key]}, %", lines, x=axes[key], y=PERCENT, target=target)
        for key, lines in over.items()
    ]


def budget(runs: Sequence[Run], names: Sequence[str]) -> Figure:
    """Return the mean global round of each run, and what was foretold of it."""
    rows: dict[str, list[float]] = {}
    for run, name in zip(runs, names, strict=True):
        count = max(len(run.rounds), 1)
        rows[name] = [sum(row.phases[phase] for row in run.rounds) / count for phase in PHASES]
        if run.prediction is not None:
            rows[f"{name}, predicted"] = [run.prediction.seconds.get(phase, 0.0) for phase in PHASES]
    title = "Seconds of a global round, mean"
    return charts.bars("budget", title, _PHASE_PARTS, rows, axis=Axis("seconds of a global round", "s"))


def budgets(run: Run) -> Figure:
    """Return the budget of each global round."""
    values = [[row.phases[phase] for phase in PHASES] for row in run.rounds]
    name, title = file_name("seconds", run), f"Seconds of each global round, {run.id.rpartition('-')[2]}"
    return charts.columns(name, title, _PHASE_PARTS, values, x="global round", axis=Axis("seconds", "s"))


def phases(runs: Sequence[Run], names: Sequence[str]) -> Table:
    """Return each phase's seconds in the mean global round of each run, and how well they add up to it.

    A single run has the totals and shares too.
    """
    columns, cells = [Column("phase", text=True)], list[Mapping[str, float]]()
    for run, name in zip(runs, names, strict=True):
        totals: dict[str, float] = {phase: sum(row.phases[phase] for row in run.rounds) for phase in PHASES}
        totals |= {_SUM: sum(totals.values()), _ELAPSED: run.seconds}
        if len(runs) == 1:
            columns += [Column("total", "s", 3), Column("share", "%")]
            cells += [totals, {phase: 100 * total / (run.seconds or 1) for phase, total in totals.items()}]
        columns.append(Column(name if len(runs) > 1 else "a global round", "s", 4))
        cells.append({phase: total / max(len(run.rounds), 1) for phase, total in totals.items()})
        if run.prediction is not None:
            told = {phase: run.prediction.seconds[phase] for phase in PHASES if phase in run.prediction.seconds}
            columns.append(Column(f"{name}, predicted" if len(runs) > 1 else "predicted", "s", 4))
            cells.append(told | {_SUM: sum(told.values())})
    rows = [[phase, *(found.get(phase) for found in cells)] for phase in (*PHASES, _SUM, _ELAPSED)]
    return Table("phases", "Seconds by phase" if len(runs) == 1 else "Seconds of a global round, mean", columns, rows)


def epochs(run: Run) -> Figure:
    """Return tau_c of each institution in each global round."""
    return maps.epochs(
        file_name("epochs", run), {name: [row.epochs.get(name) for row in run.rounds] for name in run.children}
    )


def work(run: Run) -> Table:
    """Return what each device did in the run."""
    columns = [Column("institution", text=True), Column("device", text=True), Column("samples"),
               Column("global rounds"), Column("epochs"), Column("SGD steps"), Column("training", "s", 3),
               Column("waiting for a slot", "s", 3)]  # fmt: skip
    found: dict[tuple[str, str], list[Any]] = {}
    pauses = any(each.pause_s is not None for each in run.devices)
    paths = any(each.path for each in run.devices)
    for each in run.devices:
        sums = found.setdefault((each.institution, each.device), [each.samples, 0, 0, 0, 0.0, 0.0, 0.0, each.path])
        for i, value in enumerate((1, each.epochs, each.sgd_steps, each.train_s, each.wait_s, each.pause_s or 0.0), 1):
            sums[i] += value
        sums[7] = each.path
    columns += [Column("slowed by", "s", 3)] * pauses + [Column("path", text=True)] * paths
    rows = [[*names, *sums[:6], *sums[6:7] * pauses, *sums[7:] * paths] for names, sums in found.items()]
    return Table(file_name("devices", run), "Work of each device", columns, rows)


def partition(run: Run) -> Figure | None:
    """Return samples by device and class, if the run kept its split."""
    return None if run.partition is None else partition_figure(run.partition, name=file_name("partition", run))


def events(run: Run) -> tuple[Table, int]:
    """Return what happened but for plans and global rounds, the last EVENTS_MOST, and how many were before them."""
    told = [event for event in run.events if _worth_telling(event)]
    rows = [(event.time[:19].replace("T", " "), event.name, _words(event)) for event in told[-EVENTS_MOST:]]
    columns = [Column("time (UTC)", text=True), Column("event", text=True), Column("what", text=True)]
    return Table(file_name("events", run), "What happened", columns, rows), max(0, len(told) - EVENTS_MOST)


def plans(run: Run) -> Table:
    """Return, for each node and fact, how its rule's decisions began and ended."""
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
    return Table(file_name("plans", run), "What the rules decided", columns, rows)


def global_rounds(run: Run) -> Table:
    """Return the rows of rounds.csv."""
    columns = [Column("global round"), Column("time", "s", 3), Column("test accuracy", digits=4),
               Column("test loss", digits=4), Column("training loss", digits=4),
               *(Column(phase, "s", 4) for phase in PHASES), Column("SGD steps"), Column("critical path"),
               *(Column(name) for name in _BYTE_NAMES), Column("missing", text=True)]  # fmt: skip
    rows = [
        (r.number, r.elapsed_s, r.accuracy, r.loss, r.train_loss, *r.phases.values(), r.sgd_steps, r.path_steps,
         *r.bytes_.values(), " ".join((*r.missing, *r.refused)))
        for r in run.rounds
    ]  # fmt: skip
    return Table(file_name("rounds", run), "Each global round", columns, rows)


def facts(run: Run) -> list[tuple[str, str]]:
    """Return the facts of a run, those of manifest.json among them."""
    told = {"folder": run.path.name, "state": str(run.state), "seed": str(run.seed)}
    if run.partition is not None:
        told["split's digest"] = str(run.partition.get("digest", ""))
    for key, value in run.manifest.items():
        if key != "links":
            told[key.replace("_", " ")] = _brief(value, most=2000)
    return list(told.items())


# Of these events the facts that stand nowhere else in the report.
_TOLD: Final = {"run": ("done", "global_rounds"), "finished": ("global_round", "elapsed_s", "accuracy", "loss")}
_BYTE_NAMES: Final = ("WAN up", "WAN down", "LAN up", "LAN down")
_SUM, _ELAPSED = "sum of the phases", "elapsed"
_PHASE_PARTS: Final = [(f"fill-{phase}", phase) for phase in PHASES]


def _worth_telling(event: Event) -> bool:
    """Return whether no figure or table has it, and it is more than a child's ordinary coming and going."""
    if event.name == "child":
        return event.facts.get("state") in ("lost", "failed", "disconnected")
    return event.name not in ("plan", "global_round", "evaluated", "measured")


def _words(event: Event) -> str:
    known = _TOLD.get(event.name)
    return "; ".join(f"{key} {_brief(fact)}" for key, fact in event.facts.items() if known is None or key in known)


def _brief(fact: object, *, most: int = 160) -> str:
    """Return a fact in few words, numbers rounded."""
    words = fact if isinstance(fact, str) else json.dumps(_rounded(fact), ensure_ascii=False)
    words = words.replace('"', "") if not isinstance(fact, str) else words
    return words if len(words) <= most else f"{words[: most - 1]}…"


def _rounded(fact: object) -> object:
    if isinstance(fact, float):
        return float(f"{fact:.4g}")
    if isinstance(fact, Mapping):
        return {key: _rounded(value) for key, value in fact.items()}
    return list(_each(fact)) if isinstance(fact, list) else fact


def _each(facts: Sequence[object]) -> Iterator[object]:
    return map(_rounded, facts)
