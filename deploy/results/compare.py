"""Comparison of the costs of reaching a target score, accuracy by default, over the seeds of each experiment.

A group is a series of runs (`deploy.results.series`). Means include only runs that reached the target; the table shows
how many did. The speed-up is paired: the seconds of the first group of the same task over this group's, seed by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from common.errors import InvalidExperiment
from common.experiment.training import ACCURACY
from deploy.console.tabular import Column, Spread, Table
from deploy.results.device_costs import COSTS, costs_until, sources_of
from deploy.results.device_scores import OverDevices, statistics_of
from deploy.results.run import Run, State, columns_of, seconds_of, tiers_of
from deploy.results.sections import byte_columns
from deploy.results.series import Series, by_seed, condition_notes, firsts, paired, unlike

BY_TASK: Final = "--by-task"
VOWELS: Final = "aeiou"


@dataclass(frozen=True, slots=True)
class Group:
    """A series of runs, and of each the costs up to the first global round that reached the target, None if none did.

    `first`: the first series of the same task; `unlike`: the conditions in which it differs from that, as texts.
    """

    series: Series
    first: Series
    unlike: Mapping[str, str]
    costs: Sequence[Mapping[str, float] | None]

    @property
    def reached(self) -> int:
        """The number of runs that reached the target."""
        return sum(cost is not None for cost in self.costs)

    def of_devices(self, statistic: OverDevices) -> Spread | None:
        """Return the mean and the deviation of a statistic over the runs, of each the last one."""
        return Spread.of([value for run in self.series.runs if (value := statistic.of(run)) is not None])

    def spread(self, figure: str) -> Spread | None:
        """Return the mean and the standard deviation of a cost over the runs that reached the target."""
        return Spread.of([cost[figure] for cost in self.costs if cost is not None and figure in cost])


def costs_to(run: Run, target: float) -> Mapping[str, float] | None:
    """Return a run's costs until it first reached a score, None if it did not."""
    for i, row in enumerate(run.rounds):
        if run.experiment.score.reached(row.score, target):
            done = run.rounds[: i + 1]
            costs: dict[str, float] = {"rounds": row.global_round, "seconds": row.elapsed_s}
            costs |= {name: sum(each.bytes_[name] for each in done) for name in columns_of(run.tiers)}
            costs |= {"sgd_steps": sum(each.sgd_steps for each in done)}
            costs |= {"path_steps": sum(each.path_steps for each in done)}
            return costs | costs_until(run, row.global_round)
    return None


def target_of(runs: Sequence[Run], given: float | None) -> float:
    """Return the target of the score: `given`, else that of the experiments. Raises InvalidExperiment."""
    scores = {(run.experiment.score.name, run.experiment.score.higher) for run in runs}
    if len(scores) > 1:
        names = sorted({run.experiment.score.name for run in runs})
        raise InvalidExperiment("RUN", [run.id for run in runs], f"they have several scores: {', '.join(names)}",
                                "Compare runs with the same score.")  # fmt: skip
    if given is not None:
        if runs[0].experiment.score.name == ACCURACY and not 0 <= given <= 1:
            raise InvalidExperiment("--target", given, "an accuracy is a fraction of 1", "Write 0.9 for 90 %.")
        return given
    own = {run.experiment.stop.target for run in runs}
    if len(own) > 1:
        problem = "the experiments have different ones"
        raise InvalidExperiment("--target", sorted(map(str, own)), problem, "Give --target.")
    target = own.pop()
    if not isinstance(target, (int, float)):
        raise InvalidExperiment("--target", target, "the experiments have none", "Give --target, such as 0.9.")
    return target


def check(series: Sequence[Series], *, by_task: bool) -> None:
    """Raise InvalidExperiment if the series are of several tasks, unless they are compared task by task."""
    tasks = {each.task: each.runs[0] for each in series}
    if len(tasks) > 1 and not by_task:
        problem = f"{len(tasks)} tasks, between which no cost is comparable: {'; '.join(tasks)}"
        remedy = f"Compare runs of one task, or use {BY_TASK} for speed-ups within each."
        raise InvalidExperiment("RUN", [run.id for run in tasks.values()], problem, remedy)


def groups_of(series: Sequence[Series], target: float) -> list[Group]:
    """Return the groups, those of a task together."""
    base, other = firsts(series), unlike(series)
    return [
        Group(each, first, other[each.whole], [costs_to(run, target) for run in each.runs])
        for task, first in base.items()
        for each in series
        if each.task == task
    ]


def speed_up(group: Group, target: float) -> tuple[Spread | None, int, int]:
    """Return the first group's seconds over the group's, the number of paired seeds, and that of common seeds."""
    theirs, own = (_seconds(series, target) for series in (group.first, group.series))
    seeds = [{str(run.seed) for run in series.runs} for series in (group.first, group.series)]
    ratio = paired(theirs, {seed: s for seed, s in own.items() if s}, lambda first, other: first / other)
    return ratio, len([seed for seed in theirs if own.get(seed)]), len(seeds[0] & seeds[1])


def table(groups: Sequence[Group], target: float) -> Table:
    """Return a table of the groups: means and deviations over the runs that reached the target."""
    tasks, unlike = any(each.series.task for each in groups), any(each.unlike for each in groups)
    figures, runs = _figures(groups), [run for each in groups for run in each.series.runs]
    by_devices = statistics_of(runs)
    ratio_head = "speed-up within the task" if tasks else "speed-up"
    columns = [
        *[Column("task", text=True)] * tasks,
        *(Column(name, text=True) for name in ("experiment", "reached")),
        *(Column("global rounds"), Column("time", seconds_of(runs)), *byte_columns(tiers_of(runs))),
        *(Column(name, digits=0) for name in ("SGD steps", "critical path")),
        *(COSTS[name] for name in figures if name in COSTS),
        *(Column(ratio_head, digits=2), Column("seeds paired", text=True)),
        *(Column(statistic.title, digits=4) for statistic in by_devices),
        *[Column("also differs in", text=True)] * unlike,
    ]
    rows = []
    for each in groups:
        ratio, pairs, common = speed_up(each, target)
        costs = [each.spread(figure) for figure in figures]
        costs = [_mega(cost) if name.endswith("_bytes") else cost for name, cost in zip(figures, costs, strict=True)]
        rows.append([
            *[each.series.task] * tasks, each.series.label, f"{each.reached}/{len(each.costs)}", *costs, ratio,
            f"{pairs}/{common}", *map(each.of_devices, by_devices),
            *[", ".join(each.unlike)] * unlike,
        ])  # fmt: skip
    within = ", speed-ups within each task" if tasks else ""
    label = groups[0].first.runs[0].experiment.score.label
    article = "an" if label[0] in VOWELS else "a"
    return Table("compare", f"Costs of reaching {article} {label} of {target:g}{within}", columns, rows)


def to_json(groups: Sequence[Group], target: float) -> dict[str, Any]:
    """Return the comparison as JSON: each group's means and deviations, and each run's costs."""
    return {
        "target": target,
        "groups": [
            {
                "label": each.series.label,
                "simulated": any(run.simulated for run in each.series.runs),
                "task": each.series.task,
                "reached": each.reached,
                "of": len(each.costs),
                **{figure: _plain(each.spread(figure)) for figure in _figures(groups)},
                **{found.key: _plain(each.of_devices(found)) for found in statistics_of(each.series.runs)},
                "speed_up": _plain(ratio),
                "relative_to": each.first.label,
                "seeds_paired": pairs,
                "common_seeds": common,
                "also_differs_in": dict(each.unlike),
                "runs": [
                    {"run": run.id, "seed": run.seed, "state": run.state, "costs": cost}
                    for run, cost in zip(each.series.runs, each.costs, strict=True)
                ],
            }
            for each in groups
            for ratio, pairs, common in [speed_up(each, target)]
        ],
    }


def notes(groups: Sequence[Group], target: float) -> list[str]:
    """Return notes on the table: other conditions, runs that did not reach the target, and repeated seeds."""
    found = [*condition_notes([each.series for each in groups]), *source_notes([each.series for each in groups])]
    for each in groups:
        label, runs = each.series.whole, each.series.runs
        for left in (run for run, cost in zip(runs, each.costs, strict=True) if cost is None):
            score = left.experiment.score
            choose = max if score.higher else min
            best = choose((row.score for row in left.rounds if row.score is not None), default=None)
            seen = f"no {score.label}" if best is None else f"at best {best:.4f}"
            done = f"{len(left.rounds)} of {left.experiment.rounds} global rounds, {left.state}"
            own = left.experiment.stop.target
            if left.state is State.FINISHED and own is not None and not score.reached(own, target):
                done += f" at its own target of {own:g}"
            found.append(f"{label}: {left.id} (seed {left.seed}) did not reach the target: {seen} in {done}")
        if len({str(run.seed) for run in runs}) < len(runs):
            found.append(f"{label}: several runs have the same seed; the deviation is over runs")
    return found


def source_notes(series: Sequence[Series]) -> list[str]:
    """Return a line for each source of energy if the series have several: one counts more of a machine than another."""
    found: dict[str, list[str]] = {}
    for each in series:
        if sources := sources_of(each.runs):
            found.setdefault(sources, []).append(each.whole)
    return [f"{'; '.join(names)}: energy by {by}" for by, names in found.items()] if len(found) > 1 else []


def _figures(groups: Sequence[Group]) -> list[str]:
    known = {name for each in groups for cost in each.costs if cost is not None for name in cost}
    of_devices = [name for name in COSTS if name in known]
    tiers = tiers_of(run for each in groups for run in each.series.runs)
    return ["rounds", "seconds", *columns_of(tiers), "sgd_steps", "path_steps", *of_devices]


def _seconds(series: Series, target: float) -> dict[str, float]:
    """Return the mean seconds by seed, for seeds of which all runs reached the target."""
    return by_seed(series.runs, lambda run: (costs_to(run, target) or {}).get("seconds"))


def _mega(cost: Spread | None) -> Spread | None:
    return cost and Spread(cost.mean / 1e6, None if cost.deviation is None else cost.deviation / 1e6)


def _plain(cost: Spread | None) -> dict[str, float | None] | None:
    return None if cost is None else {"mean": cost.mean, "deviation": cost.deviation}
