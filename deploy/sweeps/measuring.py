"""What a sweep measures in a finished run: pure functions of the rows of its rounds.csv."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Final

from cloud.records import GlobalRoundRecord
from deploy.console.tabular import Column
from deploy.sweeps.schema import SCALES, UNITS, Measure

DIGITS: Final = {"accuracy": 2, "rounds": 0, "steps": 0, "path_steps": 0}  # decimals; else 1
SPEED_UP_DIGITS: Final = 2
PERCENT: Final = 100.0
OF_DEVICES: Final = {"devices": "mean", "samples": "score"}


def value_of(rows: Sequence[GlobalRoundRecord], measure: Measure, *, target: float | None, rounds: int) -> float | None:
    """Return a measure of a run in the unit of `column_of`; None if the run has none, as it did not reach the target.

    `target`: the accuracy to reach. `rounds`: the global rounds of its experiment.
    """
    if measure.name == "accuracy":
        found = _accuracy(rows, measure, rounds)
        return None if found is None else PERCENT * found
    last = len(rows) - 1 if measure.until == "end" else reached(rows, target)
    if measure.name == "reached":
        return 0.0 if last is None else 1.0
    if last is None or last < 0:
        return None
    done = rows[: last + 1]
    cost = {
        "rounds": lambda: float(done[-1].global_round),
        "seconds": lambda: _seconds(done, measure),
        "bytes": lambda: float(sum(_bytes(row, measure) for row in done)),
        "steps": lambda: float(sum(row.sgd_steps for row in done)),
        "path_steps": lambda: float(sum(row.path_steps for row in done)),
    }[measure.name]()
    return cost / SCALES.get(unit_of(measure), 1.0)


def reached(rows: Sequence[GlobalRoundRecord], target: float | None) -> int | None:
    """Return the place of the first row whose accuracy reached the target, None without one."""
    if target is None:
        return None
    return next((i for i, row in enumerate(rows) if row.accuracy is not None and row.accuracy >= target), None)


def unit_of(measure: Measure) -> str:
    """Return the unit of a measure's values."""
    if measure.relation == "speed_up":
        return ""
    if measure.name == "accuracy":
        return "%" if not measure.against else "points"
    return measure.unit or UNITS.get(measure.name, ("",))[0]


def column_of(measure: Measure, head: str = "") -> Column:
    """Return the column of a measure; `head`: its title, if not the measure's label."""
    usual = SPEED_UP_DIGITS if measure.relation == "speed_up" else DIGITS.get(measure.name, 1)
    digits = usual if measure.digits is None else measure.digits
    return Column(head or measure.label, unit_of(measure), digits, text=measure.name == "reached")


def sign_of(measure: Measure) -> float:
    """Return 1 if a larger value of a measure is the better one, -1 if a smaller one is."""
    if measure.of == "spread":
        return -1.0
    return 1.0 if measure.name in ("accuracy", "reached") or measure.relation == "speed_up" else -1.0


def _accuracy(rows: Sequence[GlobalRoundRecord], measure: Measure, rounds: int) -> float | None:
    """Return an accuracy as a fraction. That of a round is the last one evaluated until then."""
    if measure.round is not None and measure.round > rounds:
        return None
    until = [row for row in rows if measure.round is None or row.global_round <= measure.round]
    known = [found for row in until if (found := _of(row, measure)) is not None]
    if not known:
        return None
    return (min if measure.of == "spread" else max)(known) if measure.best else mean(known[-(measure.last or 1) :])


def _of(row: GlobalRoundRecord, measure: Measure) -> float | None:
    """Return a row's accuracy over samples, or a statistic of the devices' accuracies."""
    if measure.of == "samples" and not measure.personalised:
        return row.accuracy
    return row.of_devices(OF_DEVICES.get(measure.of, measure.of), personalised=measure.personalised)


def _seconds(done: Sequence[GlobalRoundRecord], measure: Measure) -> float:
    """Return the seconds of some global rounds, or of their phases that the measure names."""
    if not measure.phases:
        return done[-1].elapsed_s
    return sum(row.phases[phase] for row in done for phase in measure.phases)


def _bytes(row: GlobalRoundRecord, measure: Measure) -> int:
    """Return the bytes of a global round, of the measure's tier and direction."""
    return sum(
        count
        for column, count in row.bytes_.items()
        for tier, way in [column.removesuffix("_bytes").rsplit("_", 1)]
        if measure.tier in ("", tier) and measure.direction in ("", way)
    )
