"""HTML report of one or several runs: figures and tables from the runs' files, in one
self-contained file.

The page loads nothing and runs no scripts; its Content-Security-Policy forbids both. It begins with
what was run: model, data, the algorithm of each tier, nodes, links, seeds, time, versions and
hardware.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fedstrata.common.settings.devices import HardwareSettings
from fedstrata.deploy.console.tabular import Table, clean, size
from fedstrata.deploy.results import (
    attacks,
    device_costs,
    device_scores,
    maps,
    phases,
    run_tables,
    traffic_tables,
    waiting,
    whole,
)
from fedstrata.deploy.results.figures import TEMPLATES, Figure
from fedstrata.deploy.results.kept_table import SWEEP
from fedstrata.deploy.results.machines import NO_LINKS, emulated, host_of, links_of
from fedstrata.deploy.results.run import Run, State, folders
from fedstrata.deploy.results.score_curves import BANDS, SCORES, curves
from fedstrata.deploy.results.series import (
    NAMES,
    Series,
    baseline_notes,
    baselines,
    chosen_keys,
    condition_notes,
    leaves_of,
    nodes_of,
    series_of,
    shown,
)

if TYPE_CHECKING:
    from jinja2 import Template

# keys of training that are named even at their defaults
STEPS: Final = ("epochs", "batch_size", "learning_rate")
# named only where they are not the defaults
DEFAULTS: Final = ("selection.name", "epoch_control.name", "schedule.name")
# name, and of each line the series it is of ("" = all) and its text
Fact = tuple[str, list[tuple[str, str]]]
NAMED_MOST = 5  # runs whose ids are in the name of a report
TITLE_MOST = 60  # letters of the series' names in a title
UNFINISHED_MOST = 3  # runs whose states are among the notes
FOLD = 12  # rows beyond which a table of runs or events is folded


class ShownTable(NamedTuple):
    """A table of a page; a folded one is collapsed at first."""

    table: Table
    folded: bool


@dataclass
class Page:
    """A report: what `page.html.jinja` has, and its figures and tables, of several runs without
    those of each run.
    """

    title: str = ""
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    blocks: list[tuple[str, Any]] = field(default_factory=list)
    _in_run: bool = False

    def add(self, kind: str, content: Any) -> None:
        """Add a block unless it is empty. `run` begins the sections of one of several runs, `end`
        ends them.
        """
        if kind in ("run", "end"):
            self._in_run = kind == "run"
        elif kind in ("curves", "figures") and not self._in_run:
            self.figures += content
        if content or kind == "end":
            self.blocks.append((kind, content))

    def add_table(self, table: Table, *, folded: bool = False) -> None:
        """Add a table if it has rows."""
        if table.rows:
            self.tables += [] if self._in_run else [table]
            self.blocks.append(("table", ShownTable(table, folded)))

    def html(self) -> str:
        """Return the whole page."""
        from markupsafe import Markup

        keys = count(1)
        css = (TEMPLATES / "page.css").read_text(encoding="utf-8")

        def drawn(figure: Figure) -> Markup:
            return Markup(figure.svg(f"f{next(keys)}-"))

        return _template().render(page=self, css=css, drawn=drawn)


@cache
def _template() -> Template:
    """Return the page's template, in which all texts are escaped, and without control
    characters.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=_finalized,
    )
    return environment.get_template("page.html.jinja")


def _finalized(value: object) -> object:
    if type(value) is str:  # not text that is marked as safe
        return clean(value)
    return value


def default_file(runs: Sequence[Run]) -> Path:
    """Return where the report of these runs goes: into the run's folder, of several runs beside the
    first one's.

    That of all runs of a sweep has no ids in its name.
    """
    if len(runs) == 1 and runs[0].path.is_dir():  # a kept run has no folder
        return runs[0].path / "report.html"
    home = runs[0].path.resolve().parent
    if (home / SWEEP).exists() and {run.path.resolve() for run in runs} == set(folders(home)):
        return home / "report.html"
    ends = [run.ending for run in runs]
    if len(ends) > NAMED_MOST:
        digest = blake2b(" ".join(ends).encode(), digest_size=4).hexdigest()
        ends = [ends[0], "and", str(len(ends) - 1), "more", digest]
    return home / f"report-{'-'.join(ends)}.html"


def compose(runs: Sequence[Run], labels: Sequence[str] = ()) -> Page:
    """Return the page of the runs. `labels` name the series. Raises InvalidExperiment."""
    series = series_of(runs, labels)
    several = len(runs) > 1
    tasks = list(baselines(series))
    what = f"{len(tasks)} tasks" if len(tasks) > 1 else "; ".join(each.label for each in series)
    what = what if len(what) <= TITLE_MOST else f"{len(series)} series"
    title = f"{len(runs)} runs: {what}" if several else f"{runs[0].experiment.name} {runs[0].id}"
    page = Page(title)
    page.add("title", title)
    notes = [_unfinished(run) for run in runs if run.state is not State.FINISHED]
    if len(notes) > UNFINISHED_MOST:
        left = f"{len(notes)} of {len(runs)} runs are not finished"
        notes = [f"{left}; the table of the runs has their states."]
    if len(tasks) > 1:
        notes.append(
            f"{len(tasks)} tasks, between which nothing is comparable: {'; '.join(tasks)}."
        )
    if all(run.simulated for run in runs):
        notes.append(traffic_tables.SIMULATED)
    page.add("notes", [*notes, *baseline_notes(series), *condition_notes(series)])
    page.add_table(whole.table(series))
    page.add("facts", what_was_run(series))
    if several:
        page.add_table(run_tables.overview(series), folded=len(runs) > FOLD)
    for number, task in enumerate(tasks):
        key = f"-task{number}" if len(tasks) > 1 else ""
        _add_task(page, [each for each in series if each.task == task], task, key)
    for each in series:
        for run, name in zip(each.runs, each.names, strict=True):
            if several:
                page.add("run", f"{name} ({run.id})")
            _add_run(page, run, 2 + several)
            if several:
                page.add("end", None)
    return page


def _add_task(page: Page, series: Sequence[Series], task: str, key: str) -> None:
    """Add what is laid over each other: the runs of one task."""
    if not any(run.rounds for each in series for run in each.runs):
        return
    of = f": {task}" if task else ""
    label = series[0].runs[0].experiment.score_label
    page.add("heading", (2, f"{label[:1].upper()}{label[1:]} and loss{of}"))
    page.add("paragraph", SCORES)
    if any(len(each.runs) > 1 for each in series):
        page.add("paragraph", BANDS)
    page.add("curves", curves(series, key))
    page.add("heading", (2, f"Time by phase{of}"))
    page.add("paragraph", phases.SECONDS)
    figures = [phases.budget(series, key)]
    if [len(each.runs) for each in series] == [1]:
        figures.append(phases.budgets(series[0].runs[0]))
    page.add("curves", figures)
    page.add_table(phases.mean_phases(series, key))


def _add_run(page: Page, run: Run, level: int) -> None:
    """Add the sections of a single run; at level 3 it is one of several."""

    def begin(title: str, text: str = "") -> None:
        page.add("heading", (level, title))
        page.add("paragraph", text)

    if run.rounds and level > 2:
        begin("Time by phase")
        page.add("curves", [phases.budgets(run)])
    if scores := device_scores.figures(run):
        begin("Devices", device_scores.DEVICE_SCORES)
        page.add("curves", scores)
    if run.experiment.adversaries:
        begin("Adversaries", attacks.TEXT)
        page.add("curves", attacks.figures(run))
        page.add_table(attacks.table(run), folded=True)
    if lanes := waiting.lanes(run):
        begin("Waiting", waiting.TEXT)
        page.add("figures", [lanes])
        page.add_table(waiting.links(run), folded=True)
    if changed := maps.changes(run):
        begin("Changes over time", maps.CHANGES)
        page.add("curves", [changed])
    if run.links:
        text = traffic_tables.DIRECT if run.direct else traffic_tables.BYTES
        if run.simulated:
            text = traffic_tables.SIMULATED
        begin("Bytes", text)
        page.add("curves", [traffic_tables.traffic(run)])
        page.add_table(traffic_tables.tiers(run))
    if traffic_tables.declared_links(run):
        begin("Topology", traffic_tables.TOPOLOGY)
        page.add("figures", [traffic_tables.topology(run)])
    if run.rounds:
        begin("Epochs and work", run_tables.EPOCHS)
        if any(row.epochs for row in run.rounds):
            page.add("curves", [run_tables.epochs(run)])
        page.add_table(run_tables.work(run), folded=len(run.experiment.tree.aggregators) > 1)
        if (costs := device_costs.table(run, each_most=maps.NODES_MOST)) is not None:
            page.add_table(costs, folded=len(costs.rows) > 2)
            page.add("soft", device_costs.NOTE)
    if run.partition is not None:
        begin("Data", run_tables.DATA)
        page.add("figures", [maps.partition(run.partition, name=run.file_name("partition"))])
    begin("Events")
    events, omitted = run_tables.events(run)
    page.add_table(events, folded=len(events.rows) > FOLD)
    page.add("soft", omitted and f"{omitted} earlier events are in events.jsonl.")
    begin("The run")
    page.add("facts", [(name, [("", value)]) for name, value in run_tables.facts(run)])
    page.add("folded", ("experiment.toml", run.text))


def _unfinished(run: Run) -> str:
    done = f"{len(run.rounds)} of {run.experiment.rounds} global rounds are done"
    if run.state is State.RUNNING:
        return f"{run.id} is still running: {done}. This page shows the run so far."
    if run.state is State.FAILED:
        return f"{run.id} failed: {run.reason} {done}."
    return (
        f"{run.id} was interrupted or killed: {done}. This page shows the run so far. It can "
        "be resumed."
    )


def what_was_run(series: Sequence[Series]) -> list[Fact]:
    """Return what was run, by name: one line where all runs have it, else a line for each
    series.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for each in series:
        for run in each.runs:
            for name, line in _facts(run):
                lines = found.setdefault(name, {}).setdefault(each.whole, [])
                lines += [line] if line not in lines else []
    found["seeds"] = {each.whole: [", ".join(each.seeds)] for each in series}
    runs = sorted((run for each in series for run in each.runs), key=lambda run: run.started)
    when = dict.fromkeys(map(_start, (runs[0], runs[-1])))
    facts = [(name, _by_text(by_label, len(series))) for name, by_label in found.items()]
    return [*facts, ("started", [("", " to ".join(when))])]


def _start(run: Run) -> str:
    if run.began is None:
        return run.started or "-"
    return f"{run.began:%Y-%m-%d %H:%M:%S} UTC"


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    leaves = leaves_of(run)
    chosen = chosen_keys(run)
    model = _named(leaves, chosen, "model")
    model_bytes = run.manifest.get("model_bytes")
    if isinstance(model_bytes, int):
        model += f", {size(model_bytes)}"
    yield "model", model
    yield "data", _named(leaves, chosen, "data")
    for table in dict.fromkeys(key.partition(".")[0] for key in leaves if ".aggregation." in key):
        yield table, _named(leaves, chosen, table)
    yield "devices", _named(leaves, {*chosen, *(f"training.{key}" for key in STEPS)}, "training")
    yield from (("privacy", line) for line in privacy_of(run))
    yield from (("adversaries", line) for line in attacks.facts(run))
    yield "topology", nodes_of(run)
    yield "links", NO_LINKS if run.direct else links_of([run])
    yield "hardware", _hardware(run)
    packages = run.manifest.get("packages", {})
    versions = dict(packages) if isinstance(packages, Mapping) else {}
    versions["Python"] = run.manifest.get("python")
    yield "versions", ", ".join(f"{name} {each}" for name, each in versions.items() if each)


def privacy_of(run: Run) -> Iterator[str]:
    """Yield what each tier protects, and what it has cost after the last global round."""
    last = run.rounds[-1].epsilon if run.rounds else {}
    for tier in run.experiment.tiers:
        privacy = tier.privacy
        if not privacy.accounted:
            continue
        epsilon = last.get(tier.name)
        cost = "infinite" if epsilon is None else f"{epsilon:.4g}"
        notes = ["Poisson sampling" if privacy.sampling_rate else "no amplification by sampling"]
        if privacy.noise == "seeded":
            notes.append("noise from the seed, which protects nobody")
        if run.experiment.model.initial is not None:
            notes.append("without what model.initial has cost")
        protected = f"{tier.name}: each {privacy.unit}"
        yield f"{protected}, epsilon {cost} at delta {privacy.delta:g}, {'; '.join(notes)}"


def _named(leaves: Mapping[str, Any], chosen: Collection[str], table: str) -> str:
    """Return a table's names, such as its rule's, and behind them its keys that are not at their
    defaults.
    """
    own = {}
    for key, value in leaves.items():
        if key.startswith(f"{table}."):
            own[key.removeprefix(f"{table}.")] = value
    names = []
    others = []
    for key, value in own.items():
        last = key.rpartition(".")[2]
        is_chosen = f"{table}.{key}" in chosen
        if last in NAMES and (key not in DEFAULTS or is_chosen):
            names.append(key)
        elif is_chosen:
            others.append(f"{last} {shown(value)}")
    names.sort(key=lambda key: key != "aggregation.name")
    return ", ".join([*(shown(own[key]) for key in names), *others])


def _hardware(run: Run) -> str:
    """Return the host, and what devices emulate."""
    where = "simulated, each node on a machine of its own, by" if run.simulated else "cloud on"
    machines = "no emulated hardware"
    if run.experiment.hardware != HardwareSettings():
        machines = f"devices emulate {', '.join(emulated([run])) or 'other machines'}"
        machines += " (declared, not emulated)" if run.direct else ""
    return f"{where} {host_of(run)}; {machines}"


def _by_text(lines: Mapping[str, Sequence[str]], count: int) -> list[tuple[str, str]]:
    """Return the text that all of `count` labels have, else each text behind its labels."""
    found: dict[str, list[str]] = {}
    for label, each in lines.items():
        found.setdefault("; ".join(each), []).append(label)
    if len(found) == 1 and len(lines) == count:
        return [("", text) for text in found]
    return [("; ".join(labels), text) for text, labels in found.items()]
