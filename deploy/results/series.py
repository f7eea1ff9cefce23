"""Runs as series, which differ in nothing but the seed, their labels, and the tasks that the series
are of.

A ratio or a difference of two series means something only within a task: the same data and
partition, the same nodes, the same model, and with or without a network, where seconds and bytes
are other quantities. Other differences are what is compared (rules, training) or conditions
(CONDITIONS), which are named.

The label of a series is the name of its cell in a sweep, or that of `--label`, or the keys in which
its experiment differs from the others, such as `fedcross, alpha 0.9`. An experiment is a mapping of
its leaves by dotted keys (`flat`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedstrata.cloud.run_folder import SIMULATED
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.short_form import by_table
from fedstrata.common.methods.settings import fedavg, fraction
from fedstrata.common.settings.tables import flat
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.settings.training import CROSS_ENTROPY
from fedstrata.common.text import counted
from fedstrata.deploy.results.figures import styled
from fedstrata.deploy.results.kept_table import CELL
from fedstrata.deploy.results.run import COMMIT, Run, State

NAMES: Final = ("name", "dataset", "partition")  # keys whose value is clear without the key
# leaves that are no keys: their values are texts of their own
WHOLE: Final = ("nodes", "network", "seconds")
PARTS_MOST: Final = 4  # of a label, and more where these do not distinguish; the others are counted
_CLEAR: Final = ("cloud", "model", "training", "data")  # tables whose names need no qualifier


def differing(every: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which experiments differ, in the order of their tables' first
    appearance.
    """
    keys = dict.fromkeys(key for leaves in every for key in leaves)
    tables = list(dict.fromkeys(key.rpartition(".")[0] for key in keys))
    apart = []
    for key in keys:
        first, *others = (leaves.get(key) for leaves in every)
        if others.count(first) < len(others):
            apart.append(key)
    return sorted(apart, key=lambda key: tables.index(key.rpartition(".")[0]))


def labels(every: Sequence[Mapping[str, Any]], chosen: Sequence[Collection[str]] = ()) -> list[str]:
    """Return a label for each experiment: the keys in which they differ; labels differ if the
    experiments do.

    `chosen`: of each experiment, the keys that are not at their defaults. Of keys that mean
    something else elsewhere, such as those of a rule, these alone are in a label. The experiment's
    `name` is in one only where nothing else distinguishes two.
    """
    apart = differing(every)
    if not apart:
        return [str(leaves.get("name", "")) for leaves in every]
    every_key = {key for leaves in every for key in leaves}
    keys = [key for key in apart if key != "name"]
    common = {key for key in keys if _is_common(key, keys, every)}
    some = []
    whole = []
    for leaves, own in zip(every, chosen or [()] * len(every), strict=True):
        there = [key for key in keys if key in leaves and (key in common or key in own)]
        some.append([_part(key, leaves[key], every_key) for key in there])
        whole.append([_part(key, leaves.get(key), every_key) for key in apart])
    count = len({repr(parts) for parts in whole})
    for parts, most in ((some, PARTS_MOST), (some, len(keys)), (whole, len(apart))):
        found = [_joined(each, most) for each in parts]
        if len(set(found)) == count:
            break
    return found


def _is_common(key: str, keys: Collection[str], every: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a key means the same in all experiments: its value is clear without it, or
    they have it, and its table has one name.
    """
    table, _, last = key.rpartition(".")
    if last in NAMES:
        return True
    return all(key in leaves for leaves in every) and f"{table}.name" not in keys


def shown(value: object) -> str:
    """Return a value as it stands in a label."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _part(key: str, value: object, every_key: Collection[str]) -> str:
    table, _, last = key.rpartition(".")
    if key in WHOLE:
        return shown(value)
    if table and last in NAMES:
        first = table.partition(".")[0]
        if first in _CLEAR:
            return shown(value)
        return f"{first} {shown(value)}"
    unlimited = value is None and last.endswith("_mbit")
    return f"{_short(key, every_key)} {'unlimited' if unlimited else shown(value)}"


def _short(key: str, every_key: Collection[str]) -> str:
    """Return the shortest end of a key that is no other key's end."""
    words = key.split(".")
    for start in range(len(words) - 1, 0, -1):
        end = ".".join(words[start:])
        if not any(other != key and f".{other}".endswith(f".{end}") for other in every_key):
            return end
    return key


def _joined(parts: Sequence[str], most: int) -> str:
    shown = list(parts[:most])
    if len(parts) > most:
        shown.append(f"{len(parts) - most} more")
    return ", ".join(shown) or "defaults"


# leaves, or their tables
TASK: Final = ("data", "model", "nodes", "network", "score.name", "score.better")
BUSY: Final = 0.5  # load of a core before a run above which its seconds are in doubt
_IGNORED: Final = ("seed", "data.root", "links.check", "links.tolerance")  # they change no result
_PROFILES: Final = "profiles."  # their effect is in other leaves
_HOST: Final = ("host", "cpus", "instructions")


@dataclass(frozen=True, slots=True)
class Series:
    """Runs that differ in nothing but the seed. `task`: what distinguishes its task, empty if there
    is one only.

    `label`: what distinguishes it from the others of the task; `whole`: from all others. `style`:
    the numbers of its colour and of its dash pattern in all charts.
    """

    label: str
    whole: str
    task: str
    style: tuple[int, int]
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[str]:
        """The seeds, each once."""
        return list(dict.fromkeys(str(run.seed) for run in self.runs))

    @property
    def counted(self) -> list[Run]:
        """The runs over which curves are averaged: the finished ones, all that have a global round
        if none has.
        """
        return self.finished or [run for run in self.runs if run.rounds]

    @property
    def finished(self) -> list[Run]:
        """The runs that finished."""
        return [run for run in self.runs if run.state is State.FINISHED]

    @property
    def names(self) -> list[str]:
        """A name of each run: that of the series, with the seed if there are several, and the id if
        two share it.
        """
        if len(self.runs) == 1:
            return [self.whole]
        seeds = [run.seed for run in self.runs]
        found = []
        for run in self.runs:
            end = f" ({run.ending})" if seeds.count(run.seed) > 1 else ""
            found.append(f"{self.whole}, seed {run.seed}{end}")
        return found


def series_of(runs: Sequence[Run], names: Sequence[str] = ()) -> list[Series]:
    """Return the series, those of a sweep in the order of its axes, the others in that of their
    first runs.

    They are named by `names`, by their sweep, or by what differs.

    Raises InvalidExperiment if the number of names differs from the number of series, and if two
    runs of one task and seed have different splits.
    """
    found = _in_order(_groups(runs))
    every = [leaves for leaves, _ in found]
    chosen = [chosen_keys(members[0]) for _, members in found]
    tasks = _tasks(every, chosen)
    by_keys = _labels_within(tasks, every, chosen)
    if names and len(names) != len(found):
        remedy = f"Give one for each of: {'; '.join(by_keys)}."
        raise InvalidExperiment(
            "--label", list(names), f"{len(names)} for {len(found)} series", remedy
        )
    _check_splits(tasks, [members for _, members in found])
    apart = list(names) or by_keys
    whole = list[str]()
    for label, task in zip(apart, tasks, strict=True):
        if not task:
            whole.append(label)
        elif not names and tasks.count(task) == 1:
            whole.append(task)
        else:
            whole.append(f"{label} ({task})")
    if not names:
        cells = _cells(found)
        named = [cell or label for cell, label in zip(cells, whole, strict=True)]
        if len(set(named)) == len(named):
            apart = [cell or label for cell, label in zip(cells, apart, strict=True)]
            whole = named
    styles = _styles(apart, tasks, [members[0] for _, members in found])
    texts = zip(apart, whole, tasks, styles, strict=True)
    return [Series(*each, tuple(members)) for each, (_, members) in zip(texts, found, strict=True)]


def _in_order(
    found: Sequence[tuple[dict[str, Any], list[Run]]],
) -> list[tuple[dict[str, Any], list[Run]]]:
    """Return the series with those of a sweep's folder in the order of its axes, where the first of
    them is.
    """
    begun: dict[Path, int] = {}
    keys: list[tuple[int, int]] = []
    for position, (_, members) in enumerate(found):
        place = members[0].place
        if place is None:
            keys.append((position, 0))
        else:
            first = begun.setdefault(members[0].path.resolve().parent, position)
            keys.append((first, place.number))
    return [found[position] for position in sorted(range(len(found)), key=keys.__getitem__)]


def _styles(
    apart: Sequence[str], tasks: Sequence[str], runs: Sequence[Run]
) -> list[tuple[int, int]]:
    """Return the style of each series: by its place in the sweep, else by its label; a task is a
    chart.
    """
    known = list(dict.fromkeys(apart))
    placed = all(run.place is not None for run in runs)
    ranks: list[tuple[int, int]] = []
    for label, run in zip(apart, runs, strict=True):
        if placed and run.place is not None:
            ranks.append((run.place.rank, run.place.rest))
        else:
            ranks.append((known.index(label), 0))
    found = [(0, 0)] * len(ranks)
    for task in dict.fromkeys(tasks):
        places = [place for place, other in enumerate(tasks) if other == task]
        for place, style in zip(places, styled([ranks[place] for place in places]), strict=True):
            found[place] = style
    return found


def _groups(runs: Sequence[Run]) -> list[tuple[dict[str, Any], list[Run]]]:
    """Return the runs of each series with its leaves.

    Runs of a cell are one series on whichever hosts; elsewhere those of another host are another
    one.
    """
    found: list[tuple[dict[str, Any], list[Run]]] = []
    for run in runs:
        leaves = leaves_of(run)
        for known, members in found:
            if known == leaves:
                members.append(run)
                break
        else:
            found.append((leaves, [run]))
    groups = []
    for leaves, members in found:
        if any(run.cell for run in members):
            groups.append((leaves, members))
            continue
        hosts: dict[str, list[Run]] = {}
        for run in members:
            hosts.setdefault(str(_host_of(run)), []).append(run)
        groups += [({**leaves, **_host_of(each[0])}, each) for each in hosts.values()]
    return groups


def _cells(found: Sequence[tuple[dict[str, Any], list[Run]]]) -> list[str]:
    """Return the name of each series' cell, "" if its runs have none or several, or another series
    has it, too.
    """
    names = []
    for _, members in found:
        own = {run.cell for run in members if run.cell}
        names.append("".join(own) * (len(own) == 1))
    return [name * (names.count(name) == 1) for name in names]


def _tasks(every: Sequence[Mapping[str, Any]], chosen: Sequence[frozenset[str]]) -> list[str]:
    """Return what distinguishes the task of each experiment, "" if all have the same."""
    tasks = []
    for leaves in every:
        keys = [key for key in leaves if key in TASK or key.partition(".")[0] in TASK]
        tasks.append({key: leaves[key] for key in keys})
    if any(task != tasks[0] for task in tasks):
        return labels(tasks, chosen)
    return [""] * len(tasks)


def _labels_within(
    tasks: Sequence[str], every: Sequence[Mapping[str, Any]], chosen: Sequence[frozenset[str]]
) -> list[str]:
    """Return what distinguishes each experiment from the others of its task."""
    found = [""] * len(every)
    for task in tasks:
        places = [place for place, other in enumerate(tasks) if other == task]
        within = labels([every[place] for place in places], [chosen[place] for place in places])
        for place, label in zip(places, within, strict=True):
            found[place] = label
    return found


def leaves_of(run: Run) -> dict[str, Any]:
    """Return what distinguishes a run's results: its experiment's leaves but the seed, its nodes
    and network.

    Tiers have the keys of the short form, so that labs of different layers can be compared.
    """
    found = flat(by_table(run.experiment.model_dump(mode="json", exclude_none=True)))
    leaves = {
        key: value
        for key, value in found.items()
        if key not in _IGNORED and not key.startswith(_PROFILES)
    }
    leaves |= {"nodes": nodes_of(run), "network": "no network" if run.direct else "network"}
    leaves |= {"seconds": "simulated seconds" if run.simulated else "measured seconds"}
    return leaves


def _host_of(run: Run) -> dict[str, Any]:
    """Return the facts of a run's host."""
    return {key: run.manifest.get(key) for key in _HOST}


def chosen_keys(run: Run) -> frozenset[str]:
    """Return the keys that are not at their defaults, with the keys of `leaves_of`."""
    experiment = run.experiment
    tables = {
        key: getattr(experiment, key) for key in ("cloud", "training", "data", "model", "links")
    }
    tree: dict[str, Any] = {
        key: table.model_dump(exclude_defaults=True) for key, table in tables.items()
    }
    tree["tiers"] = [tier.model_dump(exclude_defaults=True) for tier in experiment.tiers]
    return frozenset(flat(by_table(tree)))


def nodes_of(run: Run) -> str:
    """Return the numbers of a run's nodes, such as `3 institutions, 12 devices`, and their shares
    where they differ.
    """
    texts = []
    above = [CLOUD]
    for kind, layer in zip(
        run.experiment.count_by_kind(), run.experiment.tree.layers[1:], strict=True
    ):
        sizes = [len(run.experiment.tree.children.get(parent, ())) for parent in above]
        shares = f" ({' + '.join(map(str, sizes))})" if max(sizes) - min(sizes) > 1 else ""
        texts.append(f"{counted(len(layer), kind)}{shares}")
        above = layer
    return ", ".join(texts)


def conditions(one: Run, other: Run) -> dict[str, str]:
    """Return the CONDITIONS in which two runs differ, each with its first difference as a text."""
    found: dict[str, str] = {}
    for kind, read in CONDITIONS.items():
        mine = read(one)
        theirs = read(other)
        if kind == "links":  # labs of different nodes are different tasks
            both = mine.keys() & theirs.keys()
            mine = {key: value for key, value in mine.items() if key in both}
            theirs = {key: value for key, value in theirs.items() if key in both}
        if apart := differing([mine, theirs]):
            key = apart[0]
            found[kind] = f"{key}: {shown(mine.get(key))} and {shown(theirs.get(key))}"
    return found


def baselines(series: Sequence[Series]) -> dict[str, Series]:
    """Return the series of each task with which its others are compared: the sweep's, else FedAvg,
    else the first.
    """
    tasks: dict[str, list[Series]] = {}
    for each in series:
        tasks.setdefault(each.task, []).append(each)
    return {task: min(members, key=_as_baseline) for task, members in tasks.items()}


def baseline_notes(series: Sequence[Series]) -> list[str]:
    """Return a line with the baselines and why they are, none without a series that is compared."""
    found = baselines(series)
    if len(found) == len(series):
        return []
    why = {_SWEEPS: "the sweep's baseline", _FEDAVG: "FedAvg", _FIRST_OF_ALL: "the first"}
    texts = [f"{base.whole} ({why[_as_baseline(base)]})" for base in found.values()]
    return [f"compared with {'; '.join(texts)}"]


_SWEEPS, _FEDAVG, _FIRST_OF_ALL = range(3)


def _as_baseline(series: Series) -> int:
    """Return how well a series serves as a baseline, the least is the best."""
    if any(run.place is not None and run.place.baseline for run in series.runs):
        return _SWEEPS
    if _is_fedavg(series.runs[0]):
        return _FEDAVG
    return _FIRST_OF_ALL


def _is_fedavg(run: Run) -> bool:
    """Return whether a run is FedAvg with nothing else: neither a rule, a selector, an objective
    nor epoch control.
    """
    experiment = run.experiment
    plain = all(
        tier.aggregation == fedavg() and tier.selection == fraction() for tier in experiment.tiers
    )
    control = experiment.cloud.epoch_control.name
    return plain and control == "fixed" and experiment.training.objective.name == CROSS_ENTROPY


def unlike(series: Sequence[Series]) -> dict[str, Mapping[str, str]]:
    """Return the conditions in which a series differs from its task's baseline, by whole label and
    kind, as texts.
    """
    found: dict[str, Mapping[str, str]] = {}
    base = baselines(series)
    for each in series:
        texts: dict[str, str] = {}
        for run in each.runs:
            texts = conditions(base[each.task].runs[0], run) | texts
        found[each.whole] = {kind: texts[kind] for kind in CONDITIONS if kind in texts}
    return found


def condition_notes(series: Sequence[Series]) -> list[str]:
    """Return a line for each condition in which series differ from their task's baseline, and on
    busy machines.
    """
    base = baselines(series)
    found = unlike(series)
    names: dict[str, list[str]] = {}
    busy: list[str] = []
    loads = list[float]()
    runs = 0
    for each in series:
        for kind, text in found[each.whole].items():
            note = f"other {kind} than {base[each.task].whole}: {text}"
            names.setdefault(note, []).append(each.whole)
        own = [load for run in each.runs if (load := load_of(run)) > BUSY]
        if own:
            busy.append(each.whole)
            loads += own
            runs += len(each.runs)
    notes = [f"{'; '.join(named)}: {note}" for note, named in names.items()]
    if busy:
        who = "" if 1 < len(busy) == len(series) else f"{'; '.join(busy)}: "
        count = f"{len(loads)} of {runs} runs" if runs > 1 else "the run"
        notes.append(f"{who}{count} began on a busy machine: load up to {max(loads):.1f} a core")
    return [*notes, *kept_notes([run for each in series for run in each.runs])]


def kept_notes(runs: Sequence[Run]) -> list[str]:
    """Return a line with the commits whose seconds kept runs have, none without kept runs."""
    kept = [run.manifest.get(COMMIT) for run in runs if CELL in run.manifest]
    counts = Counter(str(commit or "unknown") for commit in kept)
    if not counts:
        return []
    texts = list(counts)
    if len(counts) > 1:
        texts = [f"{commit} ({counted(count, 'runs')})" for commit, count in counts.items()]
    return [f"the seconds of kept runs are those of commit {', '.join(texts)}"]


def load_of(run: Run) -> float:
    """Return the load of each of the host's cores before the run; 0 where it was not recorded."""
    load = run.manifest.get("load")
    cores = run.manifest.get("cpus")
    if isinstance(load, (int, float)) and isinstance(cores, int) and cores > 0:
        return load / cores
    return 0.0


def _links(run: Run) -> dict[str, Any]:
    """Return what shapes the links, the numbers of each, without profile names, and the trace of
    availability.
    """
    links = flat({key: run.manifest.get(key, {}) for key in ("links", "availability")})
    return {key: value for key, value in links.items() if not key.endswith(".profile")}


def _hardware(run: Run) -> dict[str, Any]:
    """Return the cloud's host and the declared hardware that devices emulate; its random spread
    depends on the seed.
    """
    emulated = flat({"hardware": run.tree.get("hardware", {})})
    kept = {key: value for key, value in emulated.items() if "profile" not in key}
    return _host_of(run) | kept


def _seconds(run: Run) -> dict[str, Any]:
    """Return whether the seconds are simulated, and of which machines."""
    facts = run.manifest.get(SIMULATED)
    speeds = facts.get("speeds", {}) if isinstance(facts, Mapping) else {}
    return {
        "seconds": "simulated" if run.simulated else "measured",
        **flat({"speeds": {name: value for name, value in speeds.items() if value}}),
    }


def _versions(run: Run) -> dict[str, Any]:
    packages = run.manifest.get("packages", {})
    known = packages if isinstance(packages, Mapping) else {}
    return {"python": run.manifest.get("python"), **known, COMMIT: run.manifest.get(COMMIT)}


CONDITIONS: Final[Mapping[str, Callable[[Run], dict[str, Any]]]] = {
    "links": _links, "hardware": _hardware, "seconds": _seconds, "versions": _versions,
}  # fmt: skip


def _check_splits(tasks: Sequence[str], series: Sequence[Sequence[Run]]) -> None:
    """Raise InvalidExperiment if two runs of a task and a seed have different splits."""
    first: dict[tuple[str, int], Run] = {}
    for task, members in zip(tasks, series, strict=True):
        for run in members:
            if run.partition is None:
                continue
            other = first.setdefault((task, run.seed), run)
            if _split(other) != _split(run):
                problem = f"{other.id} and {run.id} have the same seed, but different splits"
                remedy = "Compare runs of the same data and the same release."
                raise InvalidExperiment("RUN", [other.id, run.id], problem, remedy)


def _split(run: Run) -> object:
    return run.partition and run.partition.get("digest")
