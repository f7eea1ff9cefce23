"""Runs against a target accuracy: what it cost to reach it, over the seeds of each experiment.

A group is the runs whose experiments differ in nothing but the seed. A run that never had the target counts in no
mean; how many did is told. The speed-up is paired: the first group's seconds over this group's, seed by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Final

from common.errors import InvalidExperiment
from deploy.console.tabular import Column, Spread, Table
from deploy.runs.records import COUNTS, TIERS
from deploy.runs.run import Run

FIGURES: Final = ("rounds", "seconds", *COUNTS, "sgd_steps", "path_steps")
KINDS: Final = ("links", "hardware", "data")  # what runs that are compared must have in common
_NAMING: Final = frozenset({"seed", "data.root"})  # where the files lie is no part of an experiment
_HOST: Final = ("host", "cpus")


@dataclass(frozen=True, slots=True)
class Reached:
    """A run, and what it cost until the first global round of the target accuracy; None where it never had it."""

    run: Run
    costs: Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one experiment."""

    label: str
    runs: Sequence[Reached]

    @property
    def reached(self) -> list[Reached]:
        """Return the runs that had the target."""
        return [run for run in self.runs if run.costs is not None]

    def spread(self, figure: str) -> Spread | None:
        """Return a cost's mean and deviation over the runs that reached the target."""
        return Spread.of([run.costs[figure] for run in self.runs if run.costs is not None])


def to_target(run: Run, target: float) -> Reached:
    """Return what a run cost until it first had an accuracy."""
    for i, row in enumerate(run.rounds):
        if row.accuracy is not None and row.accuracy >= target:
            done = run.rounds[: i + 1]
            costs: dict[str, float] = {"rounds": row.number, "seconds": row.elapsed_s}
            costs |= {name: sum(each.bytes_[name] for each in done) for name in COUNTS}
            costs |= {"sgd_steps": sum(each.sgd_steps for each in done)}
            costs |= {"path_steps": sum(each.path_steps for each in done)}
            return Reached(run, costs)
    return Reached(run, None)


def target_of(runs: Sequence[Run], given: float | None) -> float:
    """Return the target accuracy: as given, else the experiments' own. Raises InvalidExperiment."""
    if given is not None:
        return given
    own = {run.tree.get("target_accuracy") for run in runs}
    if len(own) > 1:
        raise InvalidExperiment(
            "--target", sorted(map(str, own)), "the experiments have different ones", "Give --target."
        )
    target = own.pop()
    if not isinstance(target, (int, float)):
        raise InvalidExperiment("--target", target, "the experiments have none", "Give --target, such as 0.9.")
    return target


def group(runs: Sequence[Run], target: float, labels: Sequence[str] = ()) -> list[Group]:
    """Return the groups in the order of their first runs, named as given, else by what differs among them.

    Raises InvalidExperiment where the names are not as many as the groups.
    """
    trees = [{key: value for key, value in flat(run.tree).items() if key not in _NAMING} for run in runs]
    for run, tree in zip(runs, trees, strict=True):  # where these may differ, they are not averaged
        tree |= {"direct": run.direct, **{key: run.manifest.get(key) for key in _HOST}}
    kinds: list[dict[str, Any]] = []
    members: list[list[Reached]] = []
    for run, tree in zip(runs, trees, strict=True):
        if tree not in kinds:
            kinds.append(tree)
            members.append([])
        members[kinds.index(tree)].append(to_target(run, target))
    names = list(labels) or tell_apart(kinds)
    if len(names) != len(kinds):
        remedy = f"Give one for each of: {', '.join(tell_apart(kinds))}."
        raise InvalidExperiment("--label", names, f"{len(names)} for {len(kinds)} groups", remedy)
    return [Group(name, found) for name, found in zip(names, members, strict=True)]


def tell_apart(trees: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each tree: the keys in which they differ, and their values there."""
    keys = sorted({key for tree in trees for key in tree})
    apart = [key for key in keys if any(tree.get(key) != trees[0].get(key) for tree in trees)]
    apart = [key for key in apart if key != "name"] or apart
    if not apart:
        return [str(tree.get("name", "")) for tree in trees]
    return [" ".join(f"{key}={_said(tree[key])}" for key in apart if key in tree) or "defaults" for tree in trees]


def differences(runs: Sequence[Run]) -> dict[str, str]:
    """Return what makes runs incomparable, by kind (KINDS), each told with the two runs that show it first."""
    first, found = runs[0], dict[str, str]()
    for run in runs[1:]:
        for kind in KINDS:
            if kind not in found and (told := _differs(kind, first, run)):
                found[kind] = f"{first.id} and {run.id} differ in {told}"
    digests: dict[object, tuple[Run, object]] = {}
    for run in runs:
        if run.partition is not None:
            key = (run.seed, tuple(sorted(flat(run.tree.get("topology", {})).items())))
            other, digest = digests.setdefault(str(key), (run, run.partition.get("digest")))
            if digest != run.partition.get("digest"):
                found.setdefault("data", f"{other.id} and {run.id} of one seed have different splits")
    return found


def check(runs: Sequence[Run], allowed: Sequence[str]) -> None:
    """Raise InvalidExperiment where runs are of different links, hardware or data that are not `allowed` to be."""
    wrong = {kind: told for kind, told in differences(runs).items() if kind not in allowed}
    if wrong:
        remedy = f"Compare like with like, or --allow {','.join(wrong)}."
        raise InvalidExperiment("RUN", [run.id for run in runs], "; ".join(wrong.values()), remedy)


def speed_up(first: Group, other: Group) -> tuple[Spread | None, int, int]:
    """Return the first group's seconds over the other's, paired by seed, over how many seeds, and of how many."""
    seeds = [[str(each.run.seed) for each in each_group.runs] for each_group in (first, other)]
    ours, theirs = _seconds(other), _seconds(first)
    ratios = [theirs[seed] / ours[seed] for seed in theirs if ours.get(seed)]
    return Spread.of(ratios), len(ratios), len({*seeds[0]} & {*seeds[1]})


def table(groups: Sequence[Group], target: float) -> Table:
    """Return the groups as a table: the means and deviations of those runs that reached the target."""
    ways = (Column(f"{tier.upper()} {way}", "MB", 3) for tier in TIERS for way in ("up", "down"))
    columns = [Column("experiment", text=True), Column("reached", text=True), Column("global rounds"),
               Column("time", "s"), *ways,
               Column("SGD steps", digits=0), Column("critical path", digits=0), Column("speed-up", digits=2),
               Column("seeds paired", text=True)]  # fmt: skip
    rows = []
    for each in groups:
        ratio, paired, common = speed_up(groups[0], each)
        costs = [each.spread(figure) for figure in FIGURES]
        costs = [_mega(cost) if name in COUNTS else cost for name, cost in zip(FIGURES, costs, strict=True)]
        rows.append([each.label, f"{len(each.reached)}/{len(each.runs)}", *costs, ratio, f"{paired}/{common}"])
    return Table("compare", f"To an accuracy of {target:g}", columns, rows)


def to_json(groups: Sequence[Group], target: float) -> dict[str, Any]:
    """Return all of it: each group's means and deviations, and each run's own costs."""
    return {
        "target": target,
        "groups": [
            {
                "label": each.label,
                "reached": len(each.reached),
                "of": len(each.runs),
                **{figure: _plain(each.spread(figure)) for figure in FIGURES},
                "speed_up": _plain(ratio) if (ratio := speed_up(groups[0], each)[0]) else None,
                "runs": [
                    {"run": r.run.id, "seed": r.run.seed, "state": r.run.state, "costs": r.costs} for r in each.runs
                ],
            }
            for each in groups
        ],
    }


def notes(groups: Sequence[Group]) -> list[str]:
    """Return what a reader of the table must know of its runs."""
    found = []
    for each in groups:
        for left in (run for run in each.runs if run.costs is None):
            best = max((row.accuracy for row in left.run.rounds if row.accuracy is not None), default=None)
            seen = "no accuracy" if best is None else f"at best {best:.4f}"
            done = f"{len(left.run.rounds)} of {left.run.global_rounds} global rounds, {left.run.state}"
            found.append(f"{each.label}: {left.run.id} (seed {left.run.seed}) did not reach it: {seen} in {done}")
        seeds = [run.run.seed for run in each.runs]
        if len(set(map(str, seeds))) < len(seeds):
            found.append(f"{each.label}: several runs of one seed; the deviation is over runs")
    return found


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a tree's leaves by their dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return leaves


def _differs(kind: str, one: Run, other: Run) -> str:
    """Return in what two runs differ, empty where in nothing of this kind."""
    if kind == "links":
        if one.direct != other.direct:
            return "links: one of them had no network"
        mine, theirs = (_links(run) for run in (one, other))
        shared = {key for key in mine if key in theirs}  # a lab of other size is another experiment, told by its name
        return _first(kind, *({key: links[key] for key in shared} for links in (mine, theirs)))
    if kind == "data":
        mine, theirs = ({**run.tree.get("data", {}), "root": ""} for run in (one, other))
        return _first(kind, mine, theirs)
    return _first(kind, *(_hardware(run) for run in (one, other)))


def _hardware(run: Run) -> dict[str, Any]:
    """Return the cloud's host and what machines the devices play, as declared: the draw of them is the seed's."""
    played = {key: value for key, value in flat(run.tree.get("hardware", {})).items() if "profile" not in key}
    return {key: run.manifest.get(key) for key in _HOST} | played


def _links(run: Run) -> dict[str, Any]:
    """Return who keeps the rates and each node's link; not the profile's name, which changes no number."""
    links = flat(run.manifest.get("links", {}))
    return {key: value for key, value in links.items() if not key.endswith(".profile")}


def _first(kind: str, one: Any, other: Any) -> str:
    mine, theirs = flat({kind: one}), flat({kind: other})
    apart = next((key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)), None)
    return "" if apart is None else f"{apart}: {_said(mine.get(apart))} and {_said(theirs.get(apart))}"


def _seconds(each: Group) -> dict[str, float]:
    """Return the mean seconds of each seed all of whose runs reached the target."""
    by_seed: dict[str, list[float | None]] = {}
    for run in each.runs:
        by_seed.setdefault(str(run.run.seed), []).append(run.costs["seconds"] if run.costs else None)
    return {seed: mean(s for s in found if s is not None) for seed, found in by_seed.items() if None not in found}


def _mega(cost: Spread | None) -> Spread | None:
    return cost and Spread(cost.mean / 1e6, None if cost.deviation is None else cost.deviation / 1e6)


def _plain(cost: Spread | None) -> dict[str, float | None] | None:
    return None if cost is None else {"mean": cost.mean, "deviation": cost.deviation}


def _said(value: Any) -> str:
    return "none" if value is None else str(value)
