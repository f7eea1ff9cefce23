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
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fedstrata.deploy.console.tabular import Table, clean, show, size
from fedstrata.deploy.results import attacks, device_costs, device_scores, maps, sections, whole
from fedstrata.deploy.results.figures import DASHES, TEMPLATES, Figure
from fedstrata.deploy.results.kept_table import SWEEP
from fedstrata.deploy.results.run import Run, State, folders, seconds_of
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
_LINK: Final = ("down_mbit", "up_mbit", "delay_ms")
# name, and of each line the series it is of ("" = all) and its text
Fact = tuple[str, list[tuple[str, str]]]
NAMED_MOST = 5  # runs whose ids are in the name of a report
TITLE_MOST = 60  # letters of the series' names in a title
UNFINISHED_MOST = 3  # runs whose states are among the notes
FOLD = 12  # rows beyond which a table of runs or events is folded


class ShownTable(NamedTuple):
    """A table of a page; a folded one is collapsed at first. `short`: for names of columns and for
    first cells.
    """

    table: Table
    folded: bool
    short: Mapping[str, str]


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

    def add_table(
        self, table: Table, *, folded: bool = False, short: Mapping[str, str] | None = None
    ) -> None:
        """Add a table if it has rows."""
        if table.rows:
            self.tables += [] if self._in_run else [table]
            self.blocks.append(("table", ShownTable(table, folded, short or {})))

    def html(self) -> str:
        """Return the whole page."""
        from markupsafe import Markup

        keys = count(1)
        return _template().render(
            page=self, css=(TEMPLATES / "page.css").read_text(encoding="utf-8"), dashes=DASHES,
            drawn=lambda figure: Markup(figure.svg(f"f{next(keys)}-")),
        )  # fmt: skip


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
        finalize=lambda value: clean(value) if type(value) is str else value,
    )
    return environment.get_template("page.html.jinja")


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
        notes = [
            (
                f"{len(notes)} of {len(runs)} runs are not finished; the table of the runs has "
                "their "
                "states."
            )
        ]
    if len(tasks) > 1:
        notes.append(
            f"{len(tasks)} tasks, between which nothing is comparable: {'; '.join(tasks)}."
        )
    if all(run.simulated for run in runs):
        notes.append(sections.SIMULATED)
    short_name = attrgetter("short")
    page.add(
        "notes", [*notes, *baseline_notes(series, short_name), *condition_notes(series, short_name)]
    )
    short = {each.whole: each.short for each in series}
    page.add("key", [each for each in series if each.number])
    if several:
        page.add_table(whole.table(series), short=short if len(tasks) == 1 else None)
    else:
        page.add("numbers", list(_first_numbers(runs[0])))
    page.add("facts", what_was_run(series))
    if several:
        page.add_table(sections.overview(series), folded=len(runs) > FOLD, short=short)
    for number, task in enumerate(tasks):
        key = f"-task{number}" if len(tasks) > 1 else ""
        _add_task(page, [each for each in series if each.task == task], task, key)
    for each in series:
        for run, name in zip(each.runs, each.names, strict=True):
            if several:
                page.add("run", f"{name} ({run.id})")
                if each.number:
                    page.add("soft", each.whole)
            _add_run(page, run, 3 if several else 2)
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
    page.add("paragraph", sections.SCORES)
    if any(len(each.runs) > 1 for each in series):
        page.add("paragraph", sections.BANDS)
    page.add("curves", sections.curves(series, key))
    page.add("heading", (2, f"Time by phase{of}"))
    page.add("paragraph", sections.SECONDS)
    figures = [sections.budget(series, key)]
    table = sections.mean_phases(series, key)
    if [len(each.runs) for each in series] == [1]:
        (run,) = series[0].runs
        figures = [*figures, sections.budgets(run)]
        table = sections.phases(run)
    page.add("curves", figures)
    page.add_table(table, short={each.label: each.mark for each in series})


def _add_attacks(page: Page, run: Run, level: int) -> None:
    """Add what adversaries did, if there were any."""
    if run.experiment.adversaries:
        page.add("heading", (level, "Adversaries"))
        page.add("paragraph", attacks.TEXT)
        page.add("curves", attacks.figures(run))
        page.add_table(attacks.table(run), folded=True)


def _add_run(page: Page, run: Run, level: int) -> None:
    """Add the sections of a single run; at level 3 it is one of several."""
    if run.rounds and level > 2:
        page.add("heading", (level, "Time by phase"))
        page.add("curves", [sections.budgets(run)])
        page.add_table(sections.phases(run))
    if scores := device_scores.figures(run):
        page.add("heading", (level, "Devices"))
        page.add("paragraph", device_scores.DEVICE_SCORES)
        page.add("curves", scores)
        page.add_table(device_scores.table(run), folded=True)
    _add_attacks(page, run, level)
    if changed := maps.changes(run):
        page.add("heading", (level, "Changes over time"))
        page.add("paragraph", maps.CHANGES)
        page.add("curves", [changed])
    if run.links:
        page.add("heading", (level, "Bytes"))
        if run.direct:
            text = sections.DIRECT
        elif run.simulated:
            text = sections.SIMULATED
        else:
            text = sections.BYTES
        page.add("paragraph", text)
        page.add("curves", [sections.traffic(run)])
        page.add_table(sections.tiers(run))
        page.add_table(sections.links(run), folded=len(run.links) > sections.LINKS_FOLD)
    if sections.declared_links(run):
        page.add("heading", (level, "Topology"))
        page.add("paragraph", sections.TOPOLOGY)
        page.add("figures", [sections.topology(run)])
    if run.rounds:
        page.add("heading", (level, "Epochs and work"))
        page.add("paragraph", sections.EPOCHS)
        page.add("curves", [sections.epochs(run)] if any(row.epochs for row in run.rounds) else [])
        page.add_table(sections.work(run), folded=len(run.experiment.tree.aggregators) > 1)
        if (costs := device_costs.table(run, each_most=maps.NODES_MOST)) is not None:
            page.add_table(costs, folded=len(costs.rows) > 2)
            page.add("soft", device_costs.NOTE)
    if run.partition is not None:
        page.add("heading", (level, "Data"))
        page.add("paragraph", sections.DATA)
        page.add("figures", [maps.partition(run.partition, name=run.file_name("partition"))])
    page.add("heading", (level, "Events"))
    events, omitted = sections.events(run)
    page.add_table(events, folded=len(events.rows) > FOLD)
    if omitted:
        page.add("soft", f"{omitted} earlier events are in events.jsonl.")
    page.add_table(sections.global_rounds(run), folded=True)
    page.add("heading", (level, "The run"))
    page.add("facts", [(name, [("", value)]) for name, value in sections.facts(run)])
    page.add("folded", ("experiment.toml", run.text))


def _first_numbers(run: Run) -> Iterator[tuple[str, str]]:
    totals = run.totals
    yield whole.score_column([run]), "-" if run.score is None else f"{run.score:.4f}"
    yield "global rounds", f"{len(run.rounds)} of {run.experiment.rounds}"
    yield "time", f"{show(run.seconds)} {seconds_of([run])}"
    for tier in run.tiers:
        yield (
            f"{tier.upper()} up / down",
            f"{size(totals[f'{tier}_up_bytes'])} / {size(totals[f'{tier}_down_bytes'])}",
        )


def _unfinished(run: Run) -> str:
    done = f"{len(run.rounds)} of {run.experiment.rounds} global rounds are done"
    if run.state is State.RUNNING:
        return f"{run.id} is still running: {done}. This page shows the run so far."
    if run.state is State.FAILED:
        reason = next(
            (str(e.facts.get("reason", "")) for e in reversed(run.events) if e.name == "failed"), ""
        )
        return f"{run.id} failed: {reason} {done}."
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
                lines = found.setdefault(name, {}).setdefault(each.short, [])
                lines += [line] if line not in lines else []
    rows: list[Fact] = []
    for name, by_label in found.items():
        texts = {label: "; ".join(each) for label, each in by_label.items()}
        rows.append((name, _by_text(texts, len(series))))
    runs = sorted((run for each in series for run in each.runs), key=lambda run: run.started)
    when = [
        f"{run.began:%Y-%m-%d %H:%M:%S} UTC" if run.began else run.started or "-"
        for run in (runs[0], runs[-1])
    ]
    rows.append(
        ("seeds", _by_text({each.short: ", ".join(each.seeds) for each in series}, len(series)))
    )
    return [*rows, ("started", [("", " to ".join(dict.fromkeys(when)))])]


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    leaves = leaves_of(run)
    chosen = chosen_keys(run)
    model_bytes = run.manifest.get("model_bytes")
    yield (
        "model",
        _named(leaves, chosen, "model")
        + (f", {size(model_bytes)}" if isinstance(model_bytes, int) else ""),
    )
    yield "data", _named(leaves, chosen, "data")
    for table in dict.fromkeys(key.partition(".")[0] for key in leaves if ".aggregation." in key):
        yield table, _named(leaves, chosen, table)
    yield "devices", _named(leaves, {*chosen, *(f"training.{key}" for key in STEPS)}, "training")
    yield from (("privacy", line) for line in privacy_of(run))
    yield from (("adversaries", line) for line in attacks.facts(run))
    yield "topology", nodes_of(run)
    yield "links", _links(run, leaves)
    yield "hardware", _hardware(run)
    packages = run.manifest.get("packages", {})
    versions = {
        **(packages if isinstance(packages, Mapping) else {}),
        "Python": run.manifest.get("python"),
    }
    yield (
        "versions",
        ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    )


def privacy_of(run: Run) -> Iterator[str]:
    """Yield what each tier protects, and what it has cost after the last global round."""
    last = run.rounds[-1].epsilon if run.rounds else {}
    for tier in run.experiment.tiers:
        if (privacy := tier.privacy).accounted:
            epsilon = last.get(tier.name)
            cost = "infinite" if epsilon is None else f"{epsilon:.4g}"
            if privacy.sampling_rate:
                claimed = "Poisson sampling"
            else:
                claimed = "no amplification by sampling"
            notes = [claimed]
            if privacy.noise == "seeded":
                notes.append("noise from the seed, which protects nobody")
            if run.experiment.model.initial is not None:
                notes.append("without what model.initial has cost")
            said = f"{tier.name}: each {privacy.unit}, epsilon {cost} at delta {privacy.delta:g}"
            yield f"{said}, {'; '.join(notes)}"


def _named(leaves: Mapping[str, Any], chosen: Collection[str], table: str) -> str:
    """Return a table's names, such as its rule's, and behind them its keys that are not at their
    defaults.
    """
    own = {
        key.removeprefix(f"{table}."): value
        for key, value in leaves.items()
        if key.startswith(f"{table}.")
    }
    # named only where they are not the defaults
    defaults = ("selection.name", "epoch_control.name", "schedule.name")
    names = [key for key in own if key.rpartition(".")[2] in NAMES]
    names = [key for key in names if key not in defaults or f"{table}.{key}" in chosen]
    names.sort(key=lambda key: key != "aggregation.name")
    rest = [key for key in own if key not in names and f"{table}.{key}" in chosen]
    plain = [f"{key.rpartition('.')[2]} {shown(own[key])}" for key in rest]
    return ", ".join([*(shown(own[key]) for key in names), *plain])


def _links(run: Run, leaves: Mapping[str, Any]) -> str:
    tables: dict[str, dict[str, Any]] = {}
    for key, value in leaves.items():
        if key.startswith("links.") and key.count(".") == 2:
            _, tier, last = key.split(".")
            tables.setdefault(tier, {})[last] = value
    texts = []
    for tier, link in tables.items():
        down, up = (
            f"{shown(rate)} Mbit/s" if (rate := link.get(key)) else "unlimited" for key in _LINK[:2]
        )
        rates = down if down == up else f"{down} down, {up} up"
        delay = f", {shown(link['delay_ms'])} ms" if link.get("delay_ms") else ""
        profile = f" ({link['profile']})" if link.get("profile") else ""
        texts.append(f"{tier.upper()} {rates}{delay}{profile}")
    others = {key.split(".")[2] for key in leaves if key.startswith("links.of.")}
    if others:
        texts.append(f"{len(others)} nodes have links of their own")
    if run.direct:
        how = "no network: declared, not enforced"
    else:
        how = f"enforced by: {leaves.get('links.enforce', '-')}"
    return "; ".join([*texts, f"{how}, simulated" if run.simulated else how])


def _hardware(run: Run) -> str:
    manifest = run.manifest
    known = [str(manifest[key]) for key in ("host", "platform") if manifest.get(key)]
    known += [f"{manifest['cpus']} cores"] if manifest.get("cpus") else []
    known += [str(manifest["instructions"])] if manifest.get("instructions") else []
    every = {
        _machine(machine) for machine in _machines(run).values() if isinstance(machine, Mapping)
    }
    if every <= {_machine({"slowdown": 1.0})}:
        emulated = "no emulated hardware"
    else:
        if len(every) == 1:
            emulated = f"devices emulate {every.pop()}"
        else:
            emulated = "devices emulate several machines"
        emulated += " (declared, not emulated)" if run.direct else ""
    where = "simulated, each node on a machine of its own, by" if run.simulated else "cloud on"
    return f"{where} {', '.join(known) or 'an unknown machine'}; {emulated}"


def _machines(run: Run) -> Mapping[str, Any]:
    machines = run.manifest.get("hardware")
    if isinstance(machines, Mapping):
        return machines
    return {}


def _machine(machine: Mapping[str, Any]) -> str:
    profile = f" ({machine['profile']})" if machine.get("profile") else ""
    overhead = f", {shown(machine['overhead_s'])} s overhead" if machine.get("overhead_s") else ""
    step_s = machine.get("step_s")
    if step_s is None:
        pace = f"slowdown {shown(machine.get('slowdown'))}"
    else:
        pace = f"{shown(step_s)} s a step"
    return f"{pace}{overhead}{profile}"


def _by_text(texts: Mapping[str, str], count: int) -> list[tuple[str, str]]:
    """Return the text that all of `count` labels have, else each text behind its labels."""
    found: dict[str, list[str]] = {}
    for label, text in texts.items():
        found.setdefault(text, []).append(label)
    if len(found) == 1 and len(texts) == count:
        return [("", text) for text in found]
    return [("; ".join(labels), text) for text, labels in found.items()]
