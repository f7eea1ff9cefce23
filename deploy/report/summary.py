"""What was run: model, data, the algorithm of each tier, nodes, links, seeds, time, versions and hardware."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from deploy.console.tabular import Cell, Column, Table, size
from deploy.report.link_sections import file_name
from deploy.runs.groups import Series, chosen_keys, leaves_of, nodes_of
from deploy.runs.labels import NAMES, shown
from deploy.runs.run import STARTED, Run

STEPS: Final = ("epochs", "batch_size", "learning_rate")  # keys of training that are named even at their defaults
_LINK: Final = ("down_mbit", "up_mbit", "delay_ms")
Fact = tuple[str, list[tuple[str, str]]]  # name, and of each line the series it is of ("" = all) and its text


def facts(series: Sequence[Series]) -> list[Fact]:
    """Return what was run, by name: one line where all runs have it, else a line for each series."""
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
    starts = sorted(run.started for each in series for run in each.runs)
    when = [_time(start) for start in dict.fromkeys([starts[0], starts[-1]])]
    rows += [("seeds", _seeds(series)), ("started", [("", " to ".join(when))])]
    return rows


def machines(run: Run) -> Table:
    """Return a table of the machines that devices emulate; without rows where all are the same."""
    of = {name: machine for name, machine in _machines(run).items() if isinstance(machine, Mapping)}
    columns = [Column("device", text=True), Column("slowdown", digits=3), Column("overhead", "s", 3),
               Column("profile", text=True)]  # fmt: skip
    rows: list[Sequence[Cell]] = []
    if len({_machine(machine) for machine in of.values()}) > 1:
        rows = [
            (name, *(machine.get(key) for key in ("slowdown", "overhead_s", "profile"))) for name, machine in of.items()
        ]
    return Table(file_name("hardware", run), "Machines that devices emulate", columns, rows)


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    leaves, chosen = leaves_of(run), chosen_keys(run)
    model_bytes = run.manifest.get("model_bytes")
    yield "model", _named(leaves, chosen, "model") + (f", {size(model_bytes)}" if isinstance(model_bytes, int) else "")
    yield "data", _named(leaves, chosen, "data")
    for table in dict.fromkeys(key.partition(".")[0] for key in leaves if ".aggregation." in key):
        yield table, _named(leaves, chosen, table)
    yield "devices", _named(leaves, {*chosen, *(f"training.{key}" for key in STEPS)}, "training")
    yield "topology", nodes_of(run)
    yield "links", _links(run, leaves)
    yield "hardware", _hardware(run)
    packages = run.manifest.get("packages", {})
    versions = {**(packages if isinstance(packages, Mapping) else {}), "Python": run.manifest.get("python")}
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _named(leaves: Mapping[str, Any], chosen: Collection[str], table: str) -> str:
    """Return a table's names, such as its rule's, and behind them its keys that are not at their defaults."""
    own = {key.removeprefix(f"{table}."): value for key, value in leaves.items() if key.startswith(f"{table}.")}
    defaults = ("selection.name", "epoch_control.name", "schedule.name")  # named only where they are not the defaults
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
        down, up = (f"{shown(rate)} Mbit/s" if (rate := link.get(key)) else "unlimited" for key in _LINK[:2])
        rates = down if down == up else f"{down} down, {up} up"
        delay = f", {shown(link['delay_ms'])} ms" if link.get("delay_ms") else ""
        profile = f" ({link['profile']})" if link.get("profile") else ""
        texts.append(f"{tier.upper()} {rates}{delay}{profile}")
    others = {key.split(".")[2] for key in leaves if key.startswith("links.of.")}
    if others:
        texts.append(f"{len(others)} nodes have links of their own")
    how = "no network: declared, not enforced" if run.direct else f"enforced by: {leaves.get('links.enforce', '-')}"
    return "; ".join([*texts, how])


def _hardware(run: Run) -> str:
    manifest = run.manifest
    known = [str(manifest[key]) for key in ("host", "platform") if manifest.get(key)]
    known += [f"{manifest['cpus']} cores"] if manifest.get("cpus") else []
    every = {_machine(machine) for machine in _machines(run).values() if isinstance(machine, Mapping)}
    if every <= {_machine({"slowdown": 1.0})}:
        emulated = "no emulated hardware"
    else:
        emulated = f"devices emulate {every.pop()}" if len(every) == 1 else "devices emulate several machines"
        emulated += " (declared, not emulated)" if run.direct else ""
    return f"cloud on {', '.join(known) or 'an unknown machine'}; {emulated}"


def _machines(run: Run) -> Mapping[str, Any]:
    machines = run.manifest.get("hardware")
    return machines if isinstance(machines, Mapping) else {}


def _machine(machine: Mapping[str, Any]) -> str:
    profile = f" ({machine['profile']})" if machine.get("profile") else ""
    overhead = f", {shown(machine['overhead_s'])} s overhead" if machine.get("overhead_s") else ""
    return f"slowdown {shown(machine.get('slowdown'))}{overhead}{profile}"


def _seeds(series: Sequence[Series]) -> list[tuple[str, str]]:
    texts = {each.short: ", ".join(each.seeds) for each in series}
    return _by_text(texts, len(series))


def _by_text(texts: Mapping[str, str], count: int) -> list[tuple[str, str]]:
    """Return the text that all of `count` labels have, else each text behind its labels."""
    found: dict[str, list[str]] = {}
    for label, text in texts.items():
        found.setdefault(text, []).append(label)
    if len(found) == 1 and len(texts) == count:
        return [("", text) for text in found]
    return [("; ".join(labels), text) for text, labels in found.items()]


def _time(started: str) -> str:
    try:
        return f"{datetime.strptime(started, STARTED).replace(tzinfo=UTC):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return started or "-"
