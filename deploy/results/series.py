"""Runs as series, which differ in nothing but the seed, their labels, and the tasks that the series are of.

A ratio or a difference of two series means something only within a task: the same data and partition, the same nodes,
the same model, and with or without a network, where seconds and bytes are other quantities. Other differences are what
is compared (rules, training) or conditions (CONDITIONS), which are named.

A label has the keys in which experiments differ, such as `fedcross, alpha 0.9`. An experiment is a mapping of its
leaves by dotted keys (`flat`). A key that follows from another difference is not in a label: with `fedcross` beside
`fedavg`, the other keys of that table are those of the rule. They are named where they are not the defaults, or where
two experiments of that rule differ in them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from cloud.results import SIMULATED
from common.errors import InvalidExperiment
from common.experiment.short_form import by_table
from common.experiment.topology import CLOUD
from deploy.console.tabular import Spread
from deploy.results.run import Run, State

NAMES: Final = ("name", "profile", "dataset", "partition")  # keys whose value is clear without the key
WHOLE: Final = ("nodes", "network", "seconds")  # leaves that are no keys: their values are texts of their own
PARTS_MOST: Final = 4  # of a label, and more where these do not distinguish; the others are counted
_PROFILE: Final = ".profile"
_CLEAR: Final = ("cloud", "model", "training", "data")  # tables whose names need no qualifier


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return leaves


def differing(every: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which experiments differ, in the order of their tables' first appearance."""
    keys = dict.fromkeys(key for leaves in every for key in leaves)
    tables = list(dict.fromkeys(key.rpartition(".")[0] for key in keys))
    apart = [key for key in keys if any(leaves.get(key) != every[0].get(key) for leaves in every)]
    return sorted(apart, key=lambda key: tables.index(key.rpartition(".")[0]))


def labels(every: Sequence[Mapping[str, Any]], chosen: Sequence[Collection[str]] = ()) -> list[str]:
    """Return a label for each experiment; they differ if the experiments do.

    `chosen`: of each experiment, the keys that are not at their defaults. The experiment's `name` is in a label only
    where nothing else distinguishes two.
    """
    keys = differing(every)
    own = chosen or [()] * len(every)
    apart = len({repr([leaves.get(key) for key in keys]) for leaves in every})
    for considered in ([key for key in keys if key != "name"], keys):
        parts = [_parts(considered, leaves, every, kept) for leaves, kept in zip(every, own, strict=True)]
        for most in range(PARTS_MOST, max(map(len, parts), default=0) + PARTS_MOST):
            found = [_joined(each, most) for each in parts]
            if considered and len(set(found)) == apart:
                return found
    return [str(leaves.get("name", "")) for leaves in every]


def shown(value: object) -> str:
    """Return a value as it stands in a label."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _parts(
    keys: Sequence[str], leaves: Mapping[str, Any], every: Sequence[Mapping[str, Any]], chosen: Collection[str]
) -> list[str]:
    every_key = {key for each in every for key in each}
    parts = []
    for key in keys:
        reason = _reason(key, keys, every)
        if key.endswith(_PROFILE) and key not in leaves:
            continue  # its own numbers are named
        if reason and not (reason.endswith(_PROFILE) and reason not in leaves):
            peers = [each for each in every if each.get(reason) == leaves.get(reason)]
            alike = all(each.get(key) == leaves.get(key) for each in peers)
            if alike and not (key in chosen and key in leaves and _is_choice(reason)):
                continue
        parts.append(_part(key, leaves.get(key), every_key))
    return parts


def _reason(key: str, keys: Sequence[str], every: Sequence[Mapping[str, Any]]) -> str:
    """Return another key of `keys` whose difference explains this one's, or ""."""
    *tables, last = key.split(".")
    for depth in range(len(tables), 0, -1) if last not in NAMES else ():
        for name in NAMES:
            if (other := ".".join([*tables[:depth], name])) in keys:
                return other
    return "nodes" if "nodes" in keys and key != "nodes" and any(key not in leaves for leaves in every) else ""


def _is_choice(reason: str) -> bool:
    """Return whether further keys say more than this one: a profile gives them, and nodes have none."""
    return reason.rpartition(".")[2] in NAMES and not reason.endswith(_PROFILE)


def _part(key: str, value: object, every_key: Collection[str]) -> str:
    table, _, last = key.rpartition(".")
    if key in WHOLE:
        return shown(value)
    if table and last in NAMES:
        return f"{_qualifier(table)} {shown(value)}".strip()
    unlimited = value is None and last.endswith("_mbit")
    return f"{_short(key, every_key)} {'unlimited' if unlimited else shown(value)}"


def _qualifier(table: str) -> str:
    first, *below = table.split(".")
    if first in _CLEAR:
        return ""
    return below[-1] if first == "links" and below else first


def _short(key: str, every_key: Collection[str]) -> str:
    """Return the shortest end of a key that is no other key's end; a link's has its tier or node."""
    words = key.split(".")
    least = 2 if words[0] in ("links", "transfer") and len(words) > 2 else 1
    ends = (".".join(words[start:]) for start in range(len(words) - least, 0, -1))
    return next((end for end in ends if not any(o != key and f".{o}".endswith(f".{end}") for o in every_key)), key)


def _joined(parts: Sequence[str], most: int) -> str:
    more = len(parts) - most
    return ", ".join([*parts[:most], *([f"{more} more"] if more > 0 else [])]) or "defaults"


TASK: Final = ("data", "model", "nodes", "network", "score.name", "score.better")  # leaves, or their tables
BUSY: Final = 0.5  # load of a core before a run above which its seconds are in doubt
NAME_MOST: Final = 24  # letters of a series' name up to which reports repeat it; longer ones are numbered
_IGNORED: Final = ("seed", "data.root", "links.check", "links.tolerance")  # they change no result
_PROFILES: Final = "profiles."  # their effect is in other leaves
_FIRST: Final = ("cloud", "institution", "training", "nodes", "data", "model", "network")  # in labels; then the others
_LAST: Final = ("links", "hardware", "transfer")
_HOST: Final = ("host", "cpus")


@dataclass(frozen=True, slots=True)
class Series:
    """Runs that differ in nothing but the seed. `task`: what distinguishes its task, empty if there is one only.

    `label`: what distinguishes it from the others of the task; `whole`: from all others. `number`: `#2` if names are
    too long to be repeated, else empty.
    """

    label: str
    whole: str
    task: str
    number: str
    runs: tuple[Run, ...]

    @property
    def short(self) -> str:
        """The number, or the whole label."""
        return self.number or self.whole

    @property
    def mark(self) -> str:
        """The number, or the label within the task."""
        return self.number or self.label

    @property
    def seeds(self) -> list[str]:
        """The seeds, each once."""
        return list(dict.fromkeys(str(run.seed) for run in self.runs))

    @property
    def counted(self) -> list[Run]:
        """The runs over which curves are averaged: the finished ones, all that have a global round if none has."""
        return self.finished or [run for run in self.runs if run.rounds]

    @property
    def finished(self) -> list[Run]:
        """The runs that finished."""
        return [run for run in self.runs if run.state is State.FINISHED]

    @property
    def names(self) -> list[str]:
        """A name of each run: the short one, with the seed if there are several, and the id if two share it."""
        seeds = [str(run.seed) for run in self.runs]
        if len(self.runs) == 1:
            return [self.short]
        ends = [f" ({run.ending})" if seeds.count(seed) > 1 else ""
                for run, seed in zip(self.runs, seeds, strict=True)]  # fmt: skip
        return [f"{self.short}, seed {seed}{end}" for seed, end in zip(seeds, ends, strict=True)]


def series_of(runs: Sequence[Run], names: Sequence[str] = ()) -> list[Series]:
    """Return the series in the order of their first runs, named by `names`, by their sweep, or by what differs.

    Raises InvalidExperiment if the number of names differs from the number of series, and if two runs of one task and
    seed have different splits.
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
    every = [leaves for leaves, _ in found]
    chosen = [chosen_keys(members[0]) for _, members in found]
    tasks = _tasks(every, chosen)
    cells = [] if names else _cells([members for _, members in found])
    apart = list(names) or cells or _labels_within(tasks, every, chosen)
    if len(apart) != len(found):
        remedy = f"Give one for each of: {'; '.join(_labels_within(tasks, every, chosen))}."
        raise InvalidExperiment("--label", apart, f"{len(apart)} for {len(found)} series", remedy)
    _check_splits([(task, run) for task, (_, members) in zip(tasks, found, strict=True) for run in members])
    alone = [not names and tasks.count(task) == 1 for task in tasks]
    whole = cells or [
        task if task and only else f"{label} ({task})" if task else label
        for label, task, only in zip(apart, tasks, alone, strict=True)
    ]
    numbered = len(found) > 1 and max(map(len, whole)) > NAME_MOST
    numbers = [f"#{i}" if numbered else "" for i in range(1, len(found) + 1)]
    texts = zip(apart, whole, tasks, numbers, strict=True)
    return [Series(*each, tuple(members)) for each, (_, members) in zip(texts, found, strict=True)]


def _cells(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return the sweep's name of each group of runs, none if one has no name, or not a name of its own."""
    found = [{run.cell for run in members} for members in groups]
    names = [name for each in found for name in each if name]
    return names if len(set(names)) == len(names) == len(groups) == sum(map(len, found)) else []


def _tasks(every: Sequence[Mapping[str, Any]], chosen: Sequence[frozenset[str]]) -> list[str]:
    """Return what distinguishes the task of each experiment, "" if all have the same."""
    tasks = [
        {key: value for key, value in leaves.items() if key in TASK or key.partition(".")[0] in TASK}
        for leaves in every
    ]
    return labels(tasks, chosen) if any(task != tasks[0] for task in tasks) else [""] * len(tasks)


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
    """Return what distinguishes a run's results: its experiment's leaves but the seed, its nodes, network and host.

    Tiers have the keys of the short form, so that labs of different layers can be compared.
    """
    found = flat(by_table(run.experiment.model_dump(mode="json", exclude_none=True)))
    leaves = {key: value for key, value in found.items() if key not in _IGNORED and not key.startswith(_PROFILES)}
    leaves |= {"nodes": nodes_of(run), "network": "no network" if run.direct else "network"}
    leaves |= {"seconds": "simulated seconds" if run.simulated else "measured seconds"}
    leaves |= {key: run.manifest.get(key) for key in _HOST}
    return dict(sorted(leaves.items(), key=lambda leaf: _rank(leaf[0])))


def chosen_keys(run: Run) -> frozenset[str]:
    """Return the keys that are not at their defaults, with the keys of `leaves_of`."""
    experiment = run.experiment
    tables = {key: getattr(experiment, key) for key in ("cloud", "training", "data", "model", "links")}
    tree: dict[str, Any] = {key: table.model_dump(exclude_defaults=True) for key, table in tables.items()}
    tree["tiers"] = [tier.model_dump(exclude_defaults=True) for tier in experiment.tiers]
    return frozenset(flat(by_table(tree)))


def _rank(key: str) -> int:
    """Return the place of a leaf's table in labels; the order within tables remains."""
    table, dot, _ = key.partition(".")
    if table in _FIRST:
        return _FIRST.index(table)
    return len(_FIRST) if not dot or table in _LAST else 1  # tables of tiers below the cloud: behind the cloud's


def nodes_of(run: Run) -> str:
    """Return the numbers of a run's nodes, such as `3 institutions, 12 devices`, and their shares where they differ."""
    texts, above = [], [CLOUD]
    for kind, layer in zip(run.experiment.count_by_kind(), run.experiment.tree.layers[1:], strict=True):
        sizes = [len(run.experiment.tree.children.get(parent, ())) for parent in above]
        shares = f" ({' + '.join(map(str, sizes))})" if max(sizes) - min(sizes) > 1 else ""
        texts.append(f"{len(layer)} {kind if len(layer) != 1 else kind.removesuffix('s')}{shares}")
        above = layer
    return ", ".join(texts)


def conditions(one: Run, other: Run) -> dict[str, str]:
    """Return the CONDITIONS in which two runs differ, each with its first difference as a text."""
    found: dict[str, str] = {}
    for kind, read in CONDITIONS.items():
        mine, theirs = read(one), read(other)
        if kind == "links":  # labs of different nodes are different tasks
            mine, theirs = ({key: each[key] for key in mine if key in theirs} for each in (mine, theirs))
        if apart := differing([mine, theirs]):
            found[kind] = f"{apart[0]}: {shown(mine.get(apart[0]))} and {shown(theirs.get(apart[0]))}"
    return found


def firsts(series: Sequence[Series]) -> dict[str, Series]:
    """Return the first series of each task: the others of it are compared with it."""
    found: dict[str, Series] = {}
    for each in series:
        found.setdefault(each.task, each)
    return found


def unlike(series: Sequence[Series]) -> dict[str, Mapping[str, str]]:
    """Return the conditions in which a series differs from the first of its task, by whole label and kind, as texts."""
    found: dict[str, Mapping[str, str]] = {}
    for each in series:
        texts: dict[str, str] = {}
        for run in each.runs:
            texts = conditions(firsts(series)[each.task].runs[0], run) | texts
        found[each.whole] = {kind: texts[kind] for kind in CONDITIONS if kind in texts}
    return found


def condition_notes(series: Sequence[Series], name: Callable[[Series], str] = attrgetter("whole")) -> list[str]:
    """Return a line for each condition in which series differ from the first of their task, and on busy machines."""
    base, found = firsts(series), unlike(series)
    names: dict[str, list[str]] = {}
    for each in series:
        for kind, text in found[each.whole].items():
            names.setdefault(f"other {kind} than {name(base[each.task])}: {text}", []).append(name(each))
    notes = [f"{'; '.join(named)}: {note}" for note, named in names.items()]
    loads = {each.whole: [load for run in each.runs if (load := load_of(run)) > BUSY] for each in series}
    busy = [each for each in series if loads[each.whole]]
    if busy:
        every = [load for some in loads.values() for load in some]
        runs = sum(len(each.runs) for each in busy)
        who = "" if 1 < len(busy) == len(series) else f"{'; '.join(map(name, busy))}: "
        count = f"{len(every)} of {runs} runs" if runs > 1 else "the run"
        notes.append(f"{who}{count} began on a busy machine: load up to {max(every):.1f} a core")
    return notes


def paired(
    first: Mapping[str, float], other: Mapping[str, float], combine: Callable[[float, float], float]
) -> Spread | None:
    """Return mean and deviation of `combine(first, other)` over the common seeds, None without one.

    Runs of one seed share split, selection and batches, so this is sharper than the difference of the means.
    """
    return Spread.of([combine(value, other[seed]) for seed, value in first.items() if seed in other])


def by_seed(runs: Sequence[Run], value: Callable[[Run], float | None]) -> dict[str, float]:
    """Return the mean value of the runs of each seed, of seeds all of whose runs have one."""
    found: dict[str, list[float | None]] = {}
    for run in runs:
        found.setdefault(str(run.seed), []).append(value(run))
    whole = {seed: [v for v in values if v is not None] for seed, values in found.items() if None not in values}
    return {seed: sum(values) / len(values) for seed, values in whole.items()}


def load_of(run: Run) -> float:
    """Return the load of each of the host's cores before the run; 0 where it was not recorded."""
    load, cores = run.manifest.get("load"), run.manifest.get("cpus")
    return load / cores if isinstance(load, (int, float)) and isinstance(cores, int) and cores > 0 else 0.0


def _links(run: Run) -> dict[str, Any]:
    """Return what shapes the links, the numbers of each, without profile names, and the trace of availability."""
    links = flat({key: run.manifest.get(key, {}) for key in ("links", "availability")})
    return {key: value for key, value in links.items() if not key.endswith(".profile")}


def _hardware(run: Run) -> dict[str, Any]:
    """Return the cloud's host and the declared hardware that devices emulate; its random spread depends on the seed."""
    emulated = flat({"hardware": run.tree.get("hardware", {})})
    kept = {key: value for key, value in emulated.items() if "profile" not in key}
    return {key: run.manifest.get(key) for key in _HOST} | kept


def _seconds(run: Run) -> dict[str, Any]:
    """Return whether the seconds are simulated, and of which machines."""
    facts = run.manifest.get(SIMULATED)
    speeds = facts.get("speeds", {}) if isinstance(facts, Mapping) else {}
    return {"seconds": "simulated" if run.simulated else "measured", **flat({"speeds": speeds})}


def _versions(run: Run) -> dict[str, Any]:
    packages = run.manifest.get("packages", {})
    return {"python": run.manifest.get("python"), **(packages if isinstance(packages, Mapping) else {})}


CONDITIONS: Final[Mapping[str, Callable[[Run], dict[str, Any]]]] = {
    "links": _links, "hardware": _hardware, "seconds": _seconds, "versions": _versions,
}  # fmt: skip


def _check_splits(runs: Sequence[tuple[str, Run]]) -> None:
    """Raise InvalidExperiment if two runs of a task and a seed have different splits."""
    digests: dict[tuple[str, str], tuple[Run, object]] = {}
    for task, run in runs:
        if run.partition is not None:
            other, digest = digests.setdefault((task, str(run.seed)), (run, run.partition.get("digest")))
            if digest != run.partition.get("digest"):
                problem = f"{other.id} and {run.id} have the same seed, but different splits"
                remedy = "Compare runs of the same data and the same release."
                raise InvalidExperiment("RUN", [other.id, run.id], problem, remedy)
