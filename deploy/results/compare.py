"""Comparison of the costs of reaching a target score, accuracy by default, over the seeds of each
experiment.

A group is a series of runs (`deploy.results.series`). Means include only runs that reached the
target; the table shows how many did. The speed-up is paired: the seconds of the task's baseline
over this group's, seed by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.settings.training import ACCURACY
from fedstrata.deploy.console.tabular import Column, Spread, Table
from fedstrata.deploy.results import whole
from fedstrata.deploy.results.acting import LatePart, late_parts, unacted
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

BY_TASK: Final = "--by-task"
VOWELS: Final = "aeiou"


@dataclass(frozen=True, slots=True)
class Group:
    """A series of runs, and of each the costs up to the first global round that reached the target,
    None if none did.

    `baseline`: the series of the same task that it is compared with; `unlike`: the conditions in
    which it differs from that, as texts. `late`: what it has beside another series of the task, and
    does not act in the first global round.
    """

    series: Series
    baseline: Series
    unlike: Mapping[str, str]
    late: Sequence[LatePart]
    costs: Sequence[Mapping[str, float] | None]

    @property
    def reached(self) -> int:
        """The number of runs that reached the target."""
        return sum(cost is not None for cost in self.costs)

    @property
    def rounds(self) -> list[float]:
        """The global rounds to the target of the runs that reached it."""
        return [cost["rounds"] for cost in self.costs if cost is not None]

    @property
    def acted(self) -> Spread | None:
        """In how many of them all late parts acted; None without one."""
        return Spread.of(
            [min(part.acted(count) for part in self.late) for count in self.rounds if self.late]
        )

    def of_devices(self, statistic: OverDevices) -> Spread | None:
        """Return the mean and the deviation of a statistic over the runs, of each the last one."""
        return Spread.of(
            [value for run in self.series.runs if (value := statistic.of(run)) is not None]
        )

    def spread(self, figure: str) -> Spread | None:
        """Return the mean and the standard deviation of a cost over the runs that reached the
        target.
        """
        return Spread.of(
            [cost[figure] for cost in self.costs if cost is not None and figure in cost]
        )


def costs_to(run: Run, target: float) -> Mapping[str, float] | None:
    """Return a run's costs until it first reached a score, None if it did not."""
    for i, row in enumerate(run.rounds):
        if run.experiment.score.reached(row.score, target):
            done = run.rounds[: i + 1]
            costs: dict[str, float] = {"rounds": row.global_round, "seconds": row.elapsed_s}
            costs |= {
                name: sum(each.bytes_[name] for each in done) for name in columns_of(run.tiers)
            }
            costs |= {"sgd_steps": sum(each.sgd_steps for each in done)}
            costs |= {"path_steps": sum(each.path_steps for each in done)}
            return costs | costs_until(run, row.global_round)
    return None


def target_of(runs: Sequence[Run], given: float | None) -> float | None:
    """Return the target of the score: `given`, else that of the experiments, None without. Raises
    InvalidExperiment.
    """
    scores = {(run.experiment.score.name, run.experiment.score.higher) for run in runs}
    if len(scores) > 1:
        names = sorted({run.experiment.score.name for run in runs})
        raise InvalidExperiment(
            "RUN",
            [run.id for run in runs],
            (f"they have several scores: {', '.join(names)}"),
            "Compare runs with the same score.",
        )
    if given is not None:
        if runs[0].experiment.score.name == ACCURACY and not 0 <= given <= 1:
            raise InvalidExperiment(
                "--target", given, "an accuracy is a fraction of 1", "Write 0.9 for 90 %."
            )
        return given
    own = {run.experiment.stop.target for run in runs}
    if len(own) > 1:
        problem = "the experiments have different ones"
        raise InvalidExperiment("--target", sorted(map(str, own)), problem, "Give --target.")
    return own.pop()


def check(series: Sequence[Series], *, by_task: bool) -> None:
    """Raise InvalidExperiment if the series are of several tasks, unless they are compared task by
    task.
    """
    tasks = {each.task: each.runs[0] for each in series}
    if len(tasks) > 1 and not by_task:
        problem = f"{len(tasks)} tasks, between which no cost is comparable: {'; '.join(tasks)}"
        remedy = f"Compare runs of one task, or use {BY_TASK} for speed-ups within each."
        raise InvalidExperiment("RUN", [run.id for run in tasks.values()], problem, remedy)


# the notes, the table, and what makes the JSON
Comparison = tuple[list[str], Table, Callable[[], dict[str, Any]]]


def compared(
    runs: Sequence[Run], *, target: float | None, label: Sequence[str] = (), by_task: bool = False
) -> Comparison:
    """Return the comparison of runs by a score to reach, by default the experiments' own; of whole
    runs without one.

    `label`: as `series_of` takes them. Raises InvalidExperiment if the runs cannot be compared.
    """
    goal = target_of(runs, target)
    series = series_of(runs, label)
    check(series, by_task=by_task)
    if goal is None:
        return of_whole_runs(series)
    return to_target(series, goal)


def to_target(series: Sequence[Series], target: float) -> Comparison:
    """Return the comparison of the costs of reaching a target."""
    groups = groups_of(series, target)
    return notes(groups, target), table(groups, target), lambda: to_json(groups, target)


def of_whole_runs(series: Sequence[Series]) -> Comparison:
    """Return the comparison of whole runs."""
    found = ["no target: whole runs are compared. --target gives the costs of reaching a score"]
    found += [
        *baseline_notes(series),
        *condition_notes(series),
        *source_notes(series),
        *whole.notes(series),
    ]
    for task in baselines(series):
        members = [each for each in series if each.task == task]
        experiments = [each.runs[0].experiment for each in members]
        for each, experiment in zip(members, experiments, strict=True):
            parts = late_parts(experiment, experiments)
            found += [
                f"{each.whole}: {text}"
                for text in unacted(parts, [len(run.rounds) for run in each.finished])
            ]
    return found, whole.table(series), lambda: whole.to_json(series)


def groups_of(series: Sequence[Series], target: float) -> list[Group]:
    """Return the groups, those of a task together."""
    other = unlike(series)
    found = []
    for task, baseline in baselines(series).items():
        members = [each for each in series if each.task == task]
        experiments = [each.runs[0].experiment for each in members]
        for each, experiment in zip(members, experiments, strict=True):
            costs = [costs_to(run, target) for run in each.runs]
            found.append(
                Group(each, baseline, other[each.whole], late_parts(experiment, experiments), costs)
            )
    return found


def speed_up(group: Group, target: float) -> tuple[Pairs, int]:
    """Return the baseline's seconds over the group's, and the number of common seeds, paired or
    not.
    """
    theirs, own = (_seconds(series, target) for series in (group.baseline, group.series))
    seeds = [{str(run.seed) for run in series.runs} for series in (group.baseline, group.series)]
    ratio = paired(
        theirs, {seed: s for seed, s in own.items() if s}, lambda base, other: base / other
    )
    return ratio, len(seeds[0] & seeds[1])


def table(groups: Sequence[Group], target: float) -> Table:
    """Return a table of the groups: means and deviations over the runs that reached the target."""
    tasks = any(each.series.task for each in groups)
    unlike = any(each.unlike for each in groups)
    late = any(each.late for each in groups)
    ratios = [speed_up(each, target) for each in groups]
    several = any(ratio.interval for ratio, _ in ratios)
    figures = _figures(groups)
    runs = [run for each in groups for run in each.series.runs]
    by_devices = statistics_of(runs)
    ratio_head = "speed-up within the task" if tasks else "speed-up"
    columns = [
        *[Column("task", text=True)] * tasks,
        *(Column(name, text=True) for name in ("experiment", "reached")),
        *(Column("global rounds"), Column("time", seconds_of(runs)), *byte_columns(tiers_of(runs))),
        *(Column(name, digits=0) for name in ("SGD steps", "critical path")),
        *(COSTS[name] for name in figures if name in COSTS),
        *[Column("rounds it acted in")] * late,
        Column(ratio_head, digits=2),
        *[Column(f"speed-up, {INTERVAL}", text=True)] * several,
        Column("seeds paired", text=True),
        *(Column(statistic.title, digits=4) for statistic in by_devices),
        *[Column("also differs in", text=True)] * unlike,
    ]
    rows = []
    for each, (ratio, common) in zip(groups, ratios, strict=True):
        costs = [each.spread(figure) for figure in figures]
        costs = [
            _mega(cost) if name.endswith("_bytes") else cost
            for name, cost in zip(figures, costs, strict=True)
        ]
        rows.append(
            [
                *[each.series.task] * tasks,
                each.series.label,
                f"{each.reached}/{len(each.costs)}",
                *costs,
                *[each.acted] * late,
                ratio.spread,
                *[ratio.text(2)] * several,
                f"{len(ratio.values)}/{common}",
                *map(each.of_devices, by_devices),
                *[", ".join(each.unlike)] * unlike,
            ]
        )
    within = ", speed-ups within each task" if tasks else ""
    label = groups[0].baseline.runs[0].experiment.score_label
    article = "an" if label[0] in VOWELS else "a"
    return Table(
        "compare",
        f"Costs of reaching {article} {label} of {target:g}{within}",
        columns,
        rows,
        keys=1 + tasks,
    )


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
                **{
                    found.key: _plain(each.of_devices(found))
                    for found in statistics_of(each.series.runs)
                },
                "acts_from": {part.key: part.begins for part in each.late},
                "rounds_acted": _plain(each.acted),
                "speed_up": ratio.plain(),
                "relative_to": each.baseline.label,
                "seeds_paired": len(ratio.values),
                "common_seeds": common,
                "also_differs_in": dict(each.unlike),
                "runs": [
                    {"run": run.id, "seed": run.seed, "state": run.state, "costs": cost}
                    for run, cost in zip(each.series.runs, each.costs, strict=True)
                ],
            }
            for each in groups
            for ratio, common in [speed_up(each, target)]
        ],
    }


def notes(groups: Sequence[Group], target: float) -> list[str]:
    """Return notes on the table: other conditions, runs that did not reach the target, and repeated
    seeds.
    """
    series = [each.series for each in groups]
    found = [*baseline_notes(series), *condition_notes(series), *source_notes(series)]
    for each in groups:
        label = each.series.whole
        runs = each.series.runs
        for left in (run for run, cost in zip(runs, each.costs, strict=True) if cost is None):
            score = left.experiment.score
            best = best_score(left)
            seen = f"no {left.experiment.score_label}" if best is None else f"at best {best:.4f}"
            done = f"{len(left.rounds)} of {left.experiment.rounds} global rounds, {left.state}"
            own = left.experiment.stop.target
            if left.state is State.FINISHED and own is not None and not score.reached(own, target):
                done += f" at its own target of {own:g}"
            found.append(
                f"{label}: {left.id} (seed {left.seed}) did not reach the target: {seen} in {done}"
            )
        found += [f"{label}: {text} before the target" for text in unacted(each.late, each.rounds)]
        if len({str(run.seed) for run in runs}) < len(runs):
            found.append(f"{label}: several runs have the same seed; the deviation is over runs")
    return found


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


def _figures(groups: Sequence[Group]) -> list[str]:
    known = {name for each in groups for cost in each.costs if cost is not None for name in cost}
    of_devices = [name for name in COSTS if name in known]
    tiers = tiers_of(run for each in groups for run in each.series.runs)
    return ["rounds", "seconds", *columns_of(tiers), "sgd_steps", "path_steps", *of_devices]


def _seconds(series: Series, target: float) -> dict[str, float]:
    """Return the mean seconds by seed, for seeds of which all runs reached the target."""
    return by_seed(series.runs, lambda run: (costs_to(run, target) or {}).get("seconds"))


def _mega(cost: Spread | None) -> Spread | None:
    return cost and Spread(
        cost.mean / 1e6, None if cost.deviation is None else cost.deviation / 1e6
    )


def _plain(cost: Spread | None) -> dict[str, float | None] | None:
    if cost is None:
        return None
    return {"mean": cost.mean, "deviation": cost.deviation}
