"""Whole runs side by side, without a target: what each series reached, and what that cost.

Means are over the finished runs. Differences and ratios are to the baseline of the task, seed by
seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Final, TypeAlias

from fedstrata.cloud.records import HONEST
from fedstrata.common.experiment.attackers import SUCCESS
from fedstrata.deploy.console.tabular import Cell, Column, Spread, Table, plain
from fedstrata.deploy.results.device_costs import COSTS, costs_until
from fedstrata.deploy.results.device_scores import statistics_of
from fedstrata.deploy.results.pairs import INTERVAL, Pairs, by_seed, paired
from fedstrata.deploy.results.run import Run, columns_of, largest_epsilon, seconds_of, tiers_of
from fedstrata.deploy.results.series import Series, baselines

AGAINST: Final = {  # columns of rounds.csv in experiments with adversaries, and their titles
    SUCCESS: "attack success",
    f"{HONEST}_mean": "mean over honest devices",
    f"{HONEST}_worst": "worst tenth of honest devices",
}
ENERGY: Final = ("joules", "cpu_s")  # of COSTS, those of whole runs
# its key in JSON, its column, and what it makes of the baseline's value and the own one
Relation: TypeAlias = tuple[str, Column, Callable[[float, float], float]]
TITLE: Final = "The series: mean ± standard deviation (n - 1) over the finished runs"


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number of a run: its key in JSON, its column, whose values are `factor` times as large, and
    where it is from.

    `relation`: how it is compared with that of the baseline, seed by seed; None: it is not.
    """

    key: str
    column: Column
    of: Callable[[Run], float | None]
    factor: float = 1.0
    relation: Relation | None = None

    def known(self, runs: Iterable[Run]) -> bool:
        """Return whether some runs have it."""
        return any(self.of(run) is not None for run in runs)

    def spread(self, series: Series, *, in_units_of_runs: bool = False) -> Spread | None:
        """Return the mean and the deviation over the finished runs that have it."""
        factor = 1.0 if in_units_of_runs else self.factor
        known = [value for run in series.finished if (value := self.of(run)) is not None]
        if inf in known:
            return Spread(inf, None)
        return Spread.of([factor * value for value in known])

    def pairs(self, series: Series, base: Series, *, in_units_of_runs: bool = False) -> Pairs:
        """Return its relation to the baseline's, none for the baseline itself."""
        if self.relation is None or series is base:
            return Pairs({})
        factor = 1.0 if in_units_of_runs else self.factor
        relate = self.relation[2]
        theirs = by_seed(base.finished, self.of)
        own = by_seed(series.finished, self.of)
        return paired(theirs, own, lambda first, other: relate(factor * first, factor * other))


def quantities(series: Sequence[Series]) -> list[Quantity]:
    """Return what some finished runs have."""
    runs = [run for each in series for run in each.runs]
    shares = all(run.experiment.score.share for run in runs)
    factor, unit, digits = (100.0, "%", 2) if shares else (1.0, "", 4)
    scores = scores_of(runs)
    tiers = tiers_of(runs)

    def scored(
        key: str, title: str, of: Callable[[Run], float | None], relation: Relation | None = None
    ) -> Quantity:
        return Quantity(key, Column(title, unit, digits), of, factor, relation)

    points = Column("difference, paired", unit and "points", digits)
    loss = Column("loss, difference", digits=4)
    ratio = Column("time, ratio", digits=2)
    found = [
        Quantity("rounds", Column("global rounds"), lambda run: len(run.rounds)),
        scored(
            "score", f"test {scores}", lambda run: run.score, ("difference", points, _difference)
        ),
        scored("best_score", f"best {scores}", best_score),
        Quantity(
            "loss", Column("test loss", digits=4), lambda run: run.loss, 1.0,
            ("loss_difference", loss, _difference),
        ),
        Quantity(
            "seconds", Column("time", seconds_of(runs)), lambda run: run.seconds or None, 1.0,
            ("seconds_ratio", ratio, lambda base, own: own / base),
        ),
    ]  # fmt: skip
    for name, column in zip(columns_of(tiers), byte_columns(tiers), strict=True):
        found.append(Quantity(name, column, partial(_bytes, name), 1e-6))
    epsilon = Column("epsilon", digits=3)
    found.append(Quantity("epsilon", epsilon, lambda run: largest_epsilon(run.rounds)))
    found += [Quantity(name, COSTS[name], partial(_cost, name)) for name in ENERGY]
    found += [scored(name, title, partial(_last_of, name)) for name, title in AGAINST.items()]
    found += [scored(each.key, each.title, each.of) for each in statistics_of(runs)]
    done = [run for each in series for run in each.finished]
    optional = {"best_score", "epsilon", *ENERGY, *AGAINST}
    return [each for each in found if each.key not in optional or each.known(done)]


def table(series: Sequence[Series]) -> Table:
    """Return a table with a row for each series."""
    shown = quantities(series)
    base = baselines(series)
    tasks = any(each.task for each in series)
    compared = len(series) > len(base)
    pairs = []
    for one in series:
        pairs.append([each.pairs(one, base[one.task]) for each in shown])
    several = compared and any(own.interval for every in pairs for own in every)
    texts = (*["task"] * tasks, "series", "finished", "seeds")
    columns = [Column(name, text=True) for name in texts]
    for each in shown:
        columns.append(each.column)
        if each.relation is not None and compared:
            columns.append(each.relation[1])
            head = f"{each.relation[1].name.partition(',')[0]}, {INTERVAL}"
            columns += [Column(head, text=True)] * several
    rows: list[list[Cell]] = []
    for one, every in zip(series, pairs, strict=True):
        counted = f"{len(one.finished)}/{len(one.runs)}"
        row: list[Cell] = [*[one.task] * tasks, one.label, counted, ", ".join(one.seeds)]
        for each, own in zip(shown, every, strict=True):
            row.append(each.spread(one))
            if each.relation is not None and compared:
                row.append(own.spread)
                row += [own.text(each.relation[1].digits)] * several
        rows.append(row)
    return Table("series", TITLE, columns, rows, keys=1 + tasks)


def to_json(series: Sequence[Series]) -> dict[str, Any]:
    """Return the same as JSON, with the numbers of each run. Scores are shares; an infinite epsilon
    is null.
    """
    shown = quantities(series)
    base = baselines(series)
    groups = []
    for one in series:
        first = base[one.task]
        facts: dict[str, Any] = {"label": one.label, "task": one.task, "relative_to": first.label}
        facts |= {"finished": len(one.finished), "of": len(one.runs)}
        for each in shown:
            facts[each.key] = plain(each.spread(one, in_units_of_runs=True))
            if each.relation is not None:
                facts[each.relation[0]] = each.pairs(one, first, in_units_of_runs=True).plain()
        facts["runs"] = []
        for run in one.runs:
            known = {"run": run.id, "seed": run.seed, "state": run.state}
            facts["runs"].append(known | {each.key: each.of(run) for each in shown})
        groups.append(facts)
    return {"target": None, "groups": groups}


def notes(series: Sequence[Series]) -> list[str]:
    """Return a line on each run that is in no mean."""
    found = []
    for each in series:
        for run in each.runs:
            if run not in each.finished:
                done = f"{run.state}, {len(run.rounds)} of {run.experiment.rounds} global rounds"
                found.append(f"{each.whole}: {run.id} (seed {run.seed}) is in no mean: {done}")
    return found


def score_column(runs: Sequence[Run]) -> str:
    """Return the title of a column of the runs' scores."""
    return f"test {scores_of(runs)}"


def byte_columns(tiers: Sequence[str], unit: str = "MB") -> list[Column]:
    """Return a column for the bytes up and down of each tier."""
    return [Column(f"{tier.upper()} {way}", unit, 3) for tier in tiers for way in ("up", "down")]


def best_score(run: Run) -> float | None:
    """Return the best score of a run, None without one."""
    best = max if run.experiment.score.higher else min
    return best((row.score for row in run.rounds if row.score is not None), default=None)


def scores_of(runs: Sequence[Run]) -> str:
    """Return the names for people of the runs' scores."""
    return " or ".join(sorted({run.experiment.score_label for run in runs}))


def _difference(base: float, own: float) -> float:
    return own - base


def _bytes(name: str, run: Run) -> float | None:
    return run.totals.get(name)


def _last_of(name: str, run: Run) -> float | None:
    """Return the last known value of a column of rounds.csv that only some experiments have."""
    return run.last(lambda row: row.further(name))


def _cost(name: str, run: Run) -> float | None:
    if run.rounds:
        return costs_until(run, run.rounds[-1].global_round).get(name)
    return None
