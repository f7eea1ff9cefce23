"""Comparison of the costs of reaching a target score, accuracy by default, over the seeds of each
experiment.

A group is a series of runs (`deploy.results.series`). Means include only runs that reached the
target; the table shows how many did. The speed-up is paired: the seconds of the task's baseline
over this group's, seed by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.settings.training import ACCURACY
from fedstrata.deploy.console.tabular import Cell, Column, Spread, Table, plain
from fedstrata.deploy.results import whole
from fedstrata.deploy.results.acting import LatePart, late_parts, rounds_acted, unacted
from fedstrata.deploy.results.device_costs import COSTS, costs_until, sources_of
from fedstrata.deploy.results.device_scores import OverDevices, statistics_of
from fedstrata.deploy.results.pairs import INTERVAL, Pairs, by_seed, paired
from fedstrata.deploy.results.run import Run, State, columns_of, seconds_of, tiers_of
from fedstrata.deploy.results.series import (
    Series,
    baseline_notes,
    baselines,
    condition_notes,
    series_of,
    unlike,
)
from fedstrata.deploy.results.whole import best_score, byte_columns

Columns: TypeAlias = list[tuple[Column, Callable[["Group"], Cell]]]


@dataclass(frozen=True, slots=True)
class Group:
    """A series of runs, and of each the costs up to the first global round that reached the target,
    None if none did.

    `baseline`: the series of the same task that it is compared with; `unlike`: the conditions in
    which it differs from that, as texts. `late`: what it has beside another series of the task, and
    does not act in the first global round. `ratio`: the baseline's seconds over its own, by seed;
    `common`: the number of common seeds, with a ratio or not.
    """

    series: Series
    baseline: Series
    unlike: Mapping[str, str]
    late: Sequence[LatePart]
    costs: Sequence[Mapping[str, float] | None]
    ratio: Pairs
    common: int

    @property
    def reached(self) -> int:
        """The number of runs that reached the target."""
        return len(self.of("rounds"))

    def of(self, cost: str) -> list[float]:
        """Return a cost of the runs that reached the target, of those that have it."""
        return [costs[cost] for costs in self.costs if costs is not None and cost in costs]

    @property
    def acted(self) -> Spread | None:
        """In how many of them all late parts acted; None without one."""
        if not self.late:
            return None
        begins = max(part.begins for part in self.late)
        return Spread.of([rounds_acted(begins, count) for count in self.of("rounds")])

    def of_devices(self, statistic: OverDevices) -> Spread | None:
        """Return the mean and the deviation of a statistic over the runs, of each the last one."""
        found = [statistic.of(run) for run in self.series.runs]
        return Spread.of([value for value in found if value is not None])

    def spread(self, cost: str) -> Spread | None:
        """Return the mean and the standard deviation of a cost over the runs that reached the
        target; bytes in MB.
        """
        found = Spread.of(self.of(cost))
        if found is None or not cost.endswith("_bytes"):
            return found
        return found.over(1e6)


def costs_to(run: Run, target: float) -> Mapping[str, float] | None:
    """Return a run's costs until it first reached a score, None if it did not."""
    done = []
    for row in run.rounds:
        done.append(row)
        if run.experiment.score.reached(row.score, target):
            costs: dict[str, float] = {"rounds": row.global_round, "seconds": row.elapsed_s}
            for name in columns_of(run.tiers):
                costs[name] = sum(each.bytes_[name] for each in done)
            costs["sgd_steps"] = sum(each.sgd_steps for each in done)
            costs["path_steps"] = sum(each.path_steps for each in done)
            return costs | costs_until(run, row.global_round)
    return None


def target_of(runs: Sequence[Run], given: float | None) -> float | None:
    """Return the target of the score: `given`, else that of the experiments, None without. Raises
    InvalidExperiment.
    """
    score = runs[0].experiment.score
    every = [run.experiment.score for run in runs]
    scores = {(each.name, each.higher) for each in every}
    if len(scores) > 1:
        names = ", ".join(sorted({name for name, _ in scores}))
        problem = f"they have several scores: {names}"
        remedy = "Compare runs with the same score."
        raise InvalidExperiment("RUN", [run.id for run in runs], problem, remedy)
    if given is not None:
        if score.name == ACCURACY and not 0 <= given <= 1:
            raise InvalidExperiment(
                "--target", given, "an accuracy is a fraction of 1", "Write 0.9 for 90 %."
            )
        return given
    own = {run.experiment.stop.target for run in runs}
    if len(own) > 1:
        problem = "the experiments have different ones"
        raise InvalidExperiment("--target", sorted(map(str, own)), problem, "Give --target.")
    return own.pop()


# the notes, the table, and what makes the JSON
Comparison = tuple[list[str], Table, Callable[[], dict[str, Any]]]


def compared(runs: Sequence[Run], *, target: float | None, label: Sequence[str] = ()) -> Comparison:
    """Return the comparison of runs by a score to reach, by default the experiments' own; of whole
    runs without one.

    `label`: as `series_of` takes them. Raises InvalidExperiment if the runs cannot be compared.
    """
    goal = target_of(runs, target)
    series = series_of(runs, label)
    tasks = list(baselines(series))
    found = [*baseline_notes(series), *condition_notes(series), *source_notes(series)]
    if len(tasks) > 1:
        names = "; ".join(tasks)
        found.append(f"{len(tasks)} tasks, between which no cost is comparable: {names}")
    if goal is not None:
        groups = groups_of(series, goal)
        return [*found, *notes(groups, goal)], table(groups), lambda: to_json(groups, goal)
    what = "no target: whole runs are compared. --target gives the costs of reaching a score"
    found = [what, *found, *whole.notes(series)]
    for each, parts in _late(series):
        texts = unacted(parts, [len(run.rounds) for run in each.finished])
        found += [f"{each.whole}: {text}" for text in texts]
    return found, whole.table(series), lambda: whole.to_json(series)


def _late(series: Sequence[Series]) -> list[tuple[Series, list[LatePart]]]:
    """Return the series, those of a task together, with what each has beside the others and acts
    late.
    """
    found = []
    for task in baselines(series):
        members = [each for each in series if each.task == task]
        experiments = [each.runs[0].experiment for each in members]
        found += [(each, late_parts(each.runs[0].experiment, experiments)) for each in members]
    return found


def groups_of(series: Sequence[Series], target: float) -> list[Group]:
    """Return the groups, those of a task together."""
    other = unlike(series)
    base = baselines(series)
    found = []
    for each, late in _late(series):
        first = base[each.task]
        costs = [costs_to(run, target) for run in each.runs]
        ratio, common = speed_up(first, each, target)
        found.append(Group(each, first, other[each.whole], late, costs, ratio, common))
    return found


def speed_up(baseline: Series, series: Series, target: float) -> tuple[Pairs, int]:
    """Return the baseline's seconds over the series', and the number of common seeds, paired or
    not.
    """

    def seconds(run: Run) -> float | None:
        return (costs_to(run, target) or {}).get("seconds")

    theirs = by_seed(baseline.runs, seconds)
    own = {seed: s for seed, s in by_seed(series.runs, seconds).items() if s}
    ratio = paired(theirs, own, lambda base, other: base / other)
    return ratio, len({*baseline.seeds} & {*series.seeds})


def table(groups: Sequence[Group]) -> Table:
    """Return a table of the groups: means and deviations over the runs that reached the target."""
    runs = [run for each in groups for run in each.series.runs]
    tiers = tiers_of(runs)
    tasks = any(each.series.task for each in groups)
    ratio = "speed-up within the task" if tasks else "speed-up"
    heads = {
        "rounds": Column("global rounds"),
        "seconds": Column("time", seconds_of(runs)),
        **dict(zip(columns_of(tiers), byte_columns(tiers), strict=True)),
        "sgd_steps": Column("SGD steps", digits=0),
        "path_steps": Column("critical path", digits=0),
        **COSTS,
    }
    columns: Columns = []
    if tasks:
        columns.append((Column("task", text=True), lambda each: each.series.task))
    columns += [
        (Column("experiment", text=True), lambda each: each.series.label),
        (Column("reached", text=True), lambda each: f"{each.reached}/{len(each.costs)}"),
    ]
    for cost in _costs(groups):
        columns.append((heads[cost], partial(_spread, cost)))
    if any(each.late for each in groups):
        columns.append((Column("rounds it acted in"), lambda each: each.acted))
    columns.append((Column(ratio, digits=2), lambda each: each.ratio.spread))
    if any(each.ratio.interval for each in groups):
        columns.append(
            (Column(f"speed-up, {INTERVAL}", text=True), lambda each: each.ratio.text(2))
        )
    columns.append(
        (Column("seeds paired", text=True), lambda each: f"{len(each.ratio.values)}/{each.common}")
    )
    for statistic in statistics_of(runs):
        columns.append((Column(statistic.title, digits=4), partial(_of_devices, statistic)))
    if any(each.unlike for each in groups):
        columns.append((Column("also differs in", text=True), lambda each: ", ".join(each.unlike)))
    return Table.of("compare", "Costs of reaching the target", columns, groups, keys=1 + tasks)


def _spread(cost: str, group: Group) -> Spread | None:
    return group.spread(cost)


def _of_devices(statistic: OverDevices, group: Group) -> Spread | None:
    return group.of_devices(statistic)


def to_json(groups: Sequence[Group], target: float) -> dict[str, Any]:
    """Return the comparison as JSON: each group's means and deviations, and each run's costs."""
    return {"target": target, "groups": [_facts(each, _costs(groups)) for each in groups]}


def _facts(group: Group, costs: Sequence[str]) -> dict[str, Any]:
    runs = group.series.runs
    facts: dict[str, Any] = {
        "label": group.series.label,
        "simulated": any(run.simulated for run in runs),
        "task": group.series.task,
        "reached": group.reached,
        "of": len(runs),
    }
    facts |= {cost: plain(Spread.of(group.of(cost))) for cost in costs}
    facts |= {each.key: plain(group.of_devices(each)) for each in statistics_of(runs)}
    return facts | {
        "acts_from": {part.key: part.begins for part in group.late},
        "rounds_acted": plain(group.acted),
        "speed_up": group.ratio.plain(),
        "relative_to": group.baseline.label,
        "seeds_paired": len(group.ratio.values),
        "common_seeds": group.common,
        "also_differs_in": dict(group.unlike),
        "runs": [
            {"run": run.id, "seed": run.seed, "state": run.state, "costs": cost}
            for run, cost in zip(runs, group.costs, strict=True)
        ],
    }


def notes(groups: Sequence[Group], target: float) -> list[str]:
    """Return notes on the groups: runs that did not reach the target, what did not act before it,
    and repeated seeds.
    """
    found = []
    for each in groups:
        label = each.series.whole
        runs = each.series.runs
        for run, cost in zip(runs, each.costs, strict=True):
            if cost is None:
                found.append(f"{label}: {_unreached(run, target)}")
        texts = unacted(each.late, each.of("rounds"))
        found += [f"{label}: {text} before the target" for text in texts]
        if len(each.series.seeds) < len(runs):
            found.append(f"{label}: several runs have the same seed; the deviation is over runs")
    return found


def _unreached(run: Run, target: float) -> str:
    experiment = run.experiment
    best = best_score(run)
    seen = f"no {experiment.score_label}" if best is None else f"at best {best:.4f}"
    done = f"{len(run.rounds)} of {experiment.rounds} global rounds, {run.state}"
    own = experiment.stop.target
    ended = run.state is State.FINISHED and own is not None
    if ended and not experiment.score.reached(own, target):
        done += f" at its own target of {own:g}"
    return f"{run.id} (seed {run.seed}) did not reach the target: {seen} in {done}"


def source_notes(series: Sequence[Series]) -> list[str]:
    """Return a line for each source of energy if the series have several: one counts more of a
    machine than another.
    """
    found: dict[str, list[str]] = {}
    for each in series:
        if sources := sources_of(each.runs):
            found.setdefault(sources, []).append(each.whole)
    if len(found) > 1:
        return [f"{'; '.join(names)}: energy by {by}" for by, names in found.items()]
    return []


def _costs(groups: Sequence[Group]) -> list[str]:
    """Return the names of the costs; those of devices where some run has them."""
    tiers = tiers_of(run for each in groups for run in each.series.runs)
    known = set[str]()
    for each in groups:
        known.update(*(cost for cost in each.costs if cost is not None))
    of_devices = [name for name in COSTS if name in known]
    return ["rounds", "seconds", *columns_of(tiers), "sgd_steps", "path_steps", *of_devices]
