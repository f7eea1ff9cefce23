"""Whole runs side by side, without a target: what each series reached, and what that cost.

Means are over the finished runs. Differences and ratios are to the baseline of the task, seed by
seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Final

from fedstrata.cloud.records import HONEST
from fedstrata.common.experiment.attackers import SUCCESS
from fedstrata.common.settings.training import Score
from fedstrata.deploy.console.tabular import Cell, Column, Spread, Table
from fedstrata.deploy.results.device_costs import COSTS, costs_until
from fedstrata.deploy.results.device_scores import statistics_of
from fedstrata.deploy.results.pairs import INTERVAL, SEEDS_LEAST, Pairs, by_seed, paired
from fedstrata.deploy.results.run import Run, columns_of, seconds_of, tiers_of
from fedstrata.deploy.results.series import Series, baselines

AGAINST: Final = (  # columns of rounds.csv in experiments with adversaries, and their titles
    (SUCCESS, "attack success"),
    (f"{HONEST}_mean", "mean over honest devices"),
    (f"{HONEST}_worst", "worst tenth of honest devices"),
)
ENERGY: Final = ("joules", "cpu_s")  # of COSTS, those of whole runs
TITLE: Final = "The series: mean ± standard deviation (n - 1) over the finished runs"


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number of a run: its key in JSON, its column, whose values are `factor` times as large, and
    where it is from.

    `relation`: how it is compared with that of the baseline, seed by seed, with the column of that;
    None: it is not.
    """

    key: str
    column: Column
    of: Callable[[Run], float | None]
    factor: float = 1.0
    relation: tuple[str, Column, Callable[[float, float], float]] | None = None

    def spread(self, series: Series) -> Spread | None:
        """Return the mean and the deviation over the finished runs that have it."""
        known = [value for run in series.finished if (value := self.of(run)) is not None]
        if inf in known:
            return Spread(inf, None)
        return Spread.of([self.factor * value for value in known])

    def pairs(self, series: Series, base: Series) -> Pairs:
        """Return its relation to the baseline's, none for the baseline itself."""
        if self.relation is None or series is base:
            return Pairs({})
        theirs, own = (by_seed(each.finished, self.of) for each in (base, series))
        relate = self.relation[2]
        return paired(
            theirs, own, lambda first, other: relate(self.factor * first, self.factor * other)
        )


def quantities(series: Sequence[Series]) -> list[Quantity]:
    """Return what some finished runs have."""
    runs = [run for each in series for run in each.runs]
    factor, digits, unit = (
        (100.0, 2, "%") if all(run.experiment.score.share for run in runs) else (1.0, 4, "")
    )
    points = Column("difference, paired", "points" if unit else "", digits)
    found = [
        Quantity("rounds", Column("global rounds"), lambda run: len(run.rounds)),
        Quantity(
            "score", Column(score_column(runs), unit, digits), lambda run: run.score, factor,
            ("difference", points, _difference),
        ),
        Quantity("best_score", Column(f"best {scores_of(runs)}", unit, digits), best_score, factor),
        Quantity(
            "loss", Column("test loss", digits=4), lambda run: run.loss, 1.0,
            ("loss_difference", Column("loss, difference", digits=4), _difference),
        ),
        Quantity(
            "seconds", Column("time", seconds_of(runs)), lambda run: run.seconds or None, 1.0,
            ("seconds_ratio", Column("time, ratio", digits=2), lambda base, own: own / base),
        ),
    ]  # fmt: skip
    for name, column in zip(columns_of(tiers_of(runs)), byte_columns(tiers_of(runs)), strict=True):
        found.append(Quantity(name, column, partial(_bytes, name), 1e-6))
    found.append(Quantity("epsilon", Column("epsilon", digits=3), _epsilon))
    found += [Quantity(name, COSTS[name], partial(_cost, name)) for name in ENERGY]
    found += [
        Quantity(name, Column(title, unit, digits), partial(last_of, name), factor)
        for name, title in AGAINST
    ]
    found += [
        Quantity(each.key, Column(each.title, unit, digits), each.of, factor)
        for each in statistics_of(runs)
    ]
    done = [run for each in series for run in each.finished]
    optional = ("best_score", "epsilon", *ENERGY, *dict(AGAINST))
    return [
        each
        for each in found
        if each.key not in optional or any(each.of(run) is not None for run in done)
    ]


def table(series: Sequence[Series]) -> Table:
    """Return a table with a row for each series."""
    shown = quantities(series)
    base = baselines(series)
    tasks = any(each.task for each in series)
    compared = len(series) > len(base)
    texts = (*["task"] * tasks, "series", "finished", "seeds")
    columns = [Column(name, text=True) for name in texts]
    several = compared and max(
        len(each.pairs(one, base[one.task]).values) for each in shown for one in series
    )
    for each in shown:
        columns.append(each.column)
        if each.relation is not None and compared:
            interval = Column(f"{each.relation[1].name.partition(',')[0]}, {INTERVAL}", text=True)
            columns += [each.relation[1], *[interval] * (several >= SEEDS_LEAST)]
    rows: list[Sequence[Cell]] = []
    for one in series:
        row: list[Cell] = [
            *[one.task] * tasks,
            one.label,
            f"{len(one.finished)}/{len(one.runs)}",
            ", ".join(one.seeds),
        ]
        for each in shown:
            row.append(each.spread(one))
            if each.relation is not None and compared:
                pairs = each.pairs(one, base[one.task])
                row += [
                    pairs.spread,
                    *[pairs.text(each.relation[1].digits)] * (several >= SEEDS_LEAST),
                ]
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
            plain = _in_units_of_runs(each)
            found = plain.spread(one)
            facts[each.key] = (
                None if found is None else {"mean": found.mean, "deviation": found.deviation}
            )
            if each.relation is not None:
                facts[each.relation[0]] = plain.pairs(one, first).plain()
        facts["runs"] = [
            {
                "run": run.id,
                "seed": run.seed,
                "state": run.state,
                **{each.key: each.of(run) for each in shown},
            }
            for run in one.runs
        ]
        groups.append(facts)
    return {"target": None, "groups": groups}


def notes(series: Sequence[Series]) -> list[str]:
    """Return a line on each run that is in no mean."""
    left = [(each.whole, run) for each in series for run in each.runs if run not in each.finished]
    return [
        f"{name}: {run.id} (seed {run.seed}) is in no mean: {run.state}, {len(run.rounds)} of "
        f"{run.experiment.rounds}"
        " global rounds"
        for name, run in left
    ]


def score_column(runs: Sequence[Run]) -> str:
    """Return the title of a column of the runs' scores."""
    return f"test {scores_of(runs)}"


def byte_columns(tiers: Sequence[str], unit: str = "MB") -> list[Column]:
    """Return a column for the bytes up and down of each tier."""
    return [Column(f"{tier.upper()} {way}", unit, 3) for tier in tiers for way in ("up", "down")]


def best_score(run: Run) -> float | None:
    """Return the best score of a run, None without one."""
    known = [row.score for row in run.rounds if row.score is not None]
    if known:
        return _best(run.experiment.score)(known)
    return None


def _best(score: Score) -> Callable[[Sequence[float]], float]:
    if score.higher:
        return max
    return min


def scores_of(runs: Sequence[Run]) -> str:
    """Return the names for people of the runs' scores."""
    return " or ".join(sorted({run.experiment.score_label for run in runs}))


def _difference(base: float, own: float) -> float:
    return own - base


def _bytes(name: str, run: Run) -> float | None:
    return run.totals.get(name)


def _epsilon(run: Run) -> float | None:
    """Return the largest epsilon of the tiers after the last global round, infinite without
    noise.
    """
    last = run.rounds[-1].epsilon.values() if run.rounds else ()
    return max((inf if value is None else value for value in last), default=None)


def last_of(name: str, run: Run) -> float | None:
    """Return the last known value of a column of rounds.csv that only some experiments have."""
    known = (row.further(name) for row in reversed(run.rounds))
    return next((value for value in known if value is not None), None)


def _cost(name: str, run: Run) -> float | None:
    if run.rounds:
        return costs_until(run, run.rounds[-1].global_round).get(name)
    return None


def _in_units_of_runs(quantity: Quantity) -> Quantity:
    return Quantity(quantity.key, quantity.column, quantity.of, 1.0, quantity.relation)
