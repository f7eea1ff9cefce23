"""Comparison of the costs of reaching a target score, accuracy by default, over the seeds of each experiment.

A group consists of runs whose experiments differ only in the seed. Means include only runs that reached the target;
the table shows how many did. The speed-up is paired: the first group's seconds over this group's, seed by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Final

from common.errors import InvalidExperiment
from common.experiment.score import ACCURACY
from deploy.console.tabular import Column, Spread, Table
from deploy.runs.run import Run, columns_of, tiers_of

KINDS: Final = ("links", "hardware", "data")  # compared runs must agree in these
_NAMING: Final = frozenset({"seed", "data.root"})  # these keys do not distinguish experiments
VOWELS: Final = "aeiou"
_HOST: Final = ("host", "cpus")


@dataclass(frozen=True, slots=True)
class Reached:
    """A run, and its costs up to the first global round that reached the target; None if none did."""

    run: Run
    costs: Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one experiment."""

    label: str
    runs: Sequence[Reached]

    @property
    def reached(self) -> list[Reached]:
        """The runs that reached the target."""
        return [run for run in self.runs if run.costs is not None]

    def spread(self, figure: str) -> Spread | None:
        """Return the mean and the standard deviation of a cost over the runs that reached the target."""
        return Spread.of([run.costs[figure] for run in self.runs if run.costs is not None and figure in run.costs])


def to_target(run: Run, target: float) -> Reached:
    """Return a run's costs until it first reached a score."""
    for i, row in enumerate(run.rounds):
        if run.scored_by.reached(row.score, target):
            done = run.rounds[: i + 1]
            costs: dict[str, float] = {"rounds": row.global_round, "seconds": row.elapsed_s}
            costs |= {name: sum(each.bytes_[name] for each in done) for name in columns_of(run.tiers)}
            costs |= {"sgd_steps": sum(each.sgd_steps for each in done)}
            costs |= {"path_steps": sum(each.path_steps for each in done)}
            return Reached(run, costs)
    return Reached(run, None)


def target_of(runs: Sequence[Run], given: float | None) -> float:
    """Return the target of the score: `given`, else that of the experiments. Raises InvalidExperiment."""
    scores = {(run.scored_by.name, run.scored_by.higher) for run in runs}
    if len(scores) > 1:
        names = sorted(run.scored_by.name for run in runs)
        raise InvalidExperiment("RUN", [run.id for run in runs], f"they have several scores: {', '.join(names)}",
                                "Compare runs with the same score.")  # fmt: skip
    if given is not None:
        if runs[0].scored_by.name == ACCURACY and not 0 <= given <= 1:
            raise InvalidExperiment("--target", given, "an accuracy is a fraction of 1", "Give 0 to 1.")
        return given
    own = {run.target for run in runs}
    if len(own) > 1:
        raise InvalidExperiment(
            "--target", sorted(map(str, own)), "the experiments have different ones", "Give --target."
        )
    target = own.pop()
    if not isinstance(target, (int, float)):
        raise InvalidExperiment("--target", target, "the experiments have none", "Give --target, such as 0.9.")
    return target


def group(runs: Sequence[Run], target: float, labels: Sequence[str] = ()) -> list[Group]:
    """Return the groups in the order of their first runs, named by `labels` or by the keys that differ.

    Raises InvalidExperiment if the number of labels differs from the number of groups.
    """
    trees = [{key: value for key, value in flat(run.tree).items() if key not in _NAMING} for run in runs]
    for run, tree in zip(runs, trees, strict=True):  # runs that differ in these are not averaged
        tree |= {"direct": run.direct, **{key: run.manifest.get(key) for key in _HOST}}
    kinds: list[dict[str, Any]] = []
    members: list[list[Reached]] = []
    for run, tree in zip(runs, trees, strict=True):
        if tree not in kinds:
            kinds.append(tree)
            members.append([])
        members[kinds.index(tree)].append(to_target(run, target))
    names = list(labels) or distinguishing_labels(kinds)
    if len(names) != len(kinds):
        remedy = f"Give one for each of: {', '.join(distinguishing_labels(kinds))}."
        raise InvalidExperiment("--label", names, f"{len(names)} for {len(kinds)} groups", remedy)
    return [Group(name, found) for name, found in zip(names, members, strict=True)]


def distinguishing_labels(trees: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label for each tree: the keys in which the trees differ, with the tree's values."""
    keys = sorted({key for tree in trees for key in tree})
    apart = [key for key in keys if any(tree.get(key) != trees[0].get(key) for tree in trees)]
    apart = [key for key in apart if key != "name"] or apart
    if not apart:
        return [str(tree.get("name", "")) for tree in trees]
    return [" ".join(f"{key}={_shown(tree[key])}" for key in apart if key in tree) or "defaults" for tree in trees]


def differences(runs: Sequence[Run]) -> dict[str, str]:
    """Return the differences that make runs incomparable, by kind (KINDS), each with the first two runs that differ."""
    first, found = runs[0], dict[str, str]()
    for run in runs[1:]:
        for kind in KINDS:
            if kind not in found and (difference := _difference(kind, first, run)):
                found[kind] = f"{first.id} and {run.id} differ in {difference}"
    digests: dict[object, tuple[Run, object]] = {}
    for run in runs:
        if run.partition is not None:
            key = (run.seed, tuple(sorted(flat(run.tree.get("topology", {})).items())))
            other, digest = digests.setdefault(str(key), (run, run.partition.get("digest")))
            if digest != run.partition.get("digest"):
                found.setdefault("data", f"{other.id} and {run.id} have the same seed, but different splits")
    return found


def check(runs: Sequence[Run], allowed: Sequence[str]) -> None:
    """Raise InvalidExperiment if the runs differ in links, hardware or data, except for the `allowed` kinds."""
    wrong = {kind: text for kind, text in differences(runs).items() if kind not in allowed}
    if wrong:
        remedy = f"Compare runs that agree in these, or use --allow {','.join(wrong)}."
        raise InvalidExperiment("RUN", [run.id for run in runs], "; ".join(wrong.values()), remedy)


def speed_up(first: Group, other: Group) -> tuple[Spread | None, int, int]:
    """Return the first group's seconds over the other's, the number of paired seeds, and that of common seeds."""
    seeds = [[str(each.run.seed) for each in each_group.runs] for each_group in (first, other)]
    seconds, baseline = _seconds(other), _seconds(first)
    ratios = [baseline[seed] / seconds[seed] for seed in baseline if seconds.get(seed)]
    return Spread.of(ratios), len(ratios), len({*seeds[0]} & {*seeds[1]})


def table(groups: Sequence[Group], target: float) -> Table:
    """Return a table of the groups: means and deviations over the runs that reached the target."""
    byte_columns = (Column(f"{tier.upper()} {to}", "MB", 3) for tier in _tiers(groups) for to in ("up", "down"))
    figures = _figures(groups)
    columns = [Column("experiment", text=True), Column("reached", text=True), Column("global rounds"),
               Column("time", "s"), *byte_columns,
               Column("SGD steps", digits=0), Column("critical path", digits=0), Column("speed-up", digits=2),
               Column("seeds paired", text=True)]  # fmt: skip
    rows = []
    for each in groups:
        ratio, paired, common = speed_up(groups[0], each)
        costs = [each.spread(figure) for figure in figures]
        costs = [_mega(cost) if name.endswith("_bytes") else cost for name, cost in zip(figures, costs, strict=True)]
        rows.append([each.label, f"{len(each.reached)}/{len(each.runs)}", *costs, ratio, f"{paired}/{common}"])
    label = groups[0].runs[0].run.scored_by.label
    return Table(
        "compare", f"Costs of reaching {'an' if label[0] in VOWELS else 'a'} {label} of {target:g}", columns, rows
    )


def to_json(groups: Sequence[Group], target: float) -> dict[str, Any]:
    """Return the comparison as JSON: each group's means and deviations, and each run's costs."""
    return {
        "target": target,
        "groups": [
            {
                "label": each.label,
                "reached": len(each.reached),
                "of": len(each.runs),
                **{figure: _plain(each.spread(figure)) for figure in _figures(groups)},
                "speed_up": _plain(ratio) if (ratio := speed_up(groups[0], each)[0]) else None,
                "runs": [
                    {"run": r.run.id, "seed": r.run.seed, "state": r.run.state, "costs": r.costs} for r in each.runs
                ],
            }
            for each in groups
        ],
    }


def _tiers(groups: Sequence[Group]) -> list[str]:
    return tiers_of([each.run for group in groups for each in group.runs])


def _figures(groups: Sequence[Group]) -> list[str]:
    return ["rounds", "seconds", *columns_of(_tiers(groups)), "sgd_steps", "path_steps"]


def notes(groups: Sequence[Group]) -> list[str]:
    """Return notes on the table: runs that did not reach the target, and groups with a repeated seed."""
    found = []
    for each in groups:
        for left in (run for run in each.runs if run.costs is None):
            score = left.run.scored_by
            choose = max if score.higher else min
            best = choose((row.score for row in left.run.rounds if row.score is not None), default=None)
            seen = f"no {score.label}" if best is None else f"at best {best:.4f}"
            done = f"{len(left.run.rounds)} of {left.run.global_rounds} global rounds, {left.run.state}"
            name = f"{left.run.id} (seed {left.run.seed})"
            found.append(f"{each.label}: {name} did not reach the target: {seen} in {done}")
        seeds = [run.run.seed for run in each.runs]
        if len(set(map(str, seeds))) < len(seeds):
            found.append(f"{each.label}: several runs have the same seed; the deviation is over runs")
    return found


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return leaves


def _difference(kind: str, one: Run, other: Run) -> str:
    """Return the first difference of two runs of this kind, or "" if there is none."""
    if kind == "links":
        if one.direct != other.direct:
            return "links: one of them had no network"
        mine, theirs = (_links(run) for run in (one, other))
        shared = {key for key in mine if key in theirs}  # labs of different sizes are different groups anyway
        return _first(kind, *({key: links[key] for key in shared} for links in (mine, theirs)))
    if kind == "data":
        mine, theirs = ({**run.tree.get("data", {}), "root": ""} for run in (one, other))
        return _first(kind, mine, theirs)
    return _first(kind, *(_hardware(run) for run in (one, other)))


def _hardware(run: Run) -> dict[str, Any]:
    """Return the cloud's host and the declared hardware that devices emulate; its random spread depends on the seed."""
    emulated = {key: value for key, value in flat(run.tree.get("hardware", {})).items() if "profile" not in key}
    return {key: run.manifest.get(key) for key in _HOST} | emulated


def _links(run: Run) -> dict[str, Any]:
    """Return how rates are enforced and each node's link, without profile names, which change no number."""
    links = flat(run.manifest.get("links", {}))
    return {key: value for key, value in links.items() if not key.endswith(".profile")}


def _first(kind: str, one: Any, other: Any) -> str:
    mine, theirs = flat({kind: one}), flat({kind: other})
    apart = next((key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)), None)
    return "" if apart is None else f"{apart}: {_shown(mine.get(apart))} and {_shown(theirs.get(apart))}"


def _seconds(each: Group) -> dict[str, float]:
    """Return the mean seconds by seed, for seeds of which all runs reached the target."""
    by_seed: dict[str, list[float | None]] = {}
    for run in each.runs:
        by_seed.setdefault(str(run.run.seed), []).append(run.costs["seconds"] if run.costs else None)
    return {seed: mean(s for s in found if s is not None) for seed, found in by_seed.items() if None not in found}


def _mega(cost: Spread | None) -> Spread | None:
    return cost and Spread(cost.mean / 1e6, None if cost.deviation is None else cost.deviation / 1e6)


def _plain(cost: Spread | None) -> dict[str, float | None] | None:
    return None if cost is None else {"mean": cost.mean, "deviation": cost.deviation}


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
