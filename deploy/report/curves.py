"""Curves of a report: score and loss over global rounds, seconds and bytes, a line and a band for each series."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Final

from cloud.records import GlobalRoundRecord
from common.experiment.score import Score
from deploy.report import charts
from deploy.report.charts import Axis, Curve, Point
from deploy.report.figures import Figure
from deploy.report.link_sections import bytes_axis
from deploy.runs.groups import Series
from deploy.runs.run import Run, tiers_of

LOSS: Final = Axis("test loss", bounds=(0.0, float("inf")))
TRAINING_LOSS: Final = Axis("training loss", bounds=(0.0, float("inf")))
GLOBAL_ROUND: Final = Axis("global round")
SECONDS_AXIS: Final = Axis("time", "s")


def mean_curve(runs: Sequence[Mapping[int, Point]]) -> Curve:
    """Return the mean over the points of several runs, by global round, and the sample deviations (n - 1) of y.

    A point of the mean is at the mean x. It covers the global rounds that all runs with any point have; what a run has
    beyond them is a line of its own in `rest`.
    """
    some = [run for run in runs if run]
    if len(some) < 2:
        return Curve([point for run in some for _, point in sorted(run.items())])
    common = sorted(set.intersection(*(set(run) for run in some)))
    means = [(fmean(run[i][0] for run in some), fmean(run[i][1] for run in some)) for i in common]
    deviations = [stdev(run[i][1] for run in some) for i in common]
    last = max(common, default=0)
    beyond = [[point for i, point in sorted(run.items()) if i >= last] for run in some if max(run) > last]
    return Curve(means, deviations, beyond)


def curves(series: Sequence[Series], key: str = "") -> list[Figure]:
    """Return figures of the score and, where it is recorded, of loss, side by side, then the score over bytes.

    `key` is appended to their names.
    """
    runs = [run for each in series for run in each.runs]
    tiers = tiers_of(runs)
    overs = [("score", "rounds"), ("loss", "rounds"), ("score", "seconds"), ("loss", "seconds"),
             *(("score", tier) for tier in tiers), ("train_loss", "rounds")]  # fmt: skip
    scored_by = runs[0].scored_by
    shown = {"score": score_axis(scored_by), "loss": LOSS, "train_loss": TRAINING_LOSS}
    names = {"score": scored_by.label, "loss": "test loss", "train_loss": "training loss"}
    targets = {run.target for run in runs}
    target = targets.pop() if len(targets) == 1 else None
    figures: list[Figure] = []
    for field, over in overs:
        lines = {each.label: _curve(each, field, over) for each in series}
        y, name = shown[field], names[field]
        if field != "score" and not any(line.points or line.rest for line in lines.values()):
            continue
        x = {"rounds": GLOBAL_ROUND, "seconds": SECONDS_AXIS}.get(over) or bytes_axis(
            f"{over.upper()} bytes", {label: line.every_point(y) for label, line in lines.items()}
        )
        short = {each.label: each.mark for each in series}
        place = {"rounds": "global rounds", "seconds": "time"}.get(over, f"{over.upper()} bytes")
        unit = f", {y.unit}" if y.unit else ""
        figures.append(
            charts.curves(
                f"{re.sub('[ _]', '-', scored_by.label if field == 'score' else field)}-{over}{key}",
                f"{name[:1].upper()}{name[1:]} over {place}{unit}", lines, x=x, y=y,
                target=target if field == "score" else None, short=short,
            )
        )  # fmt: skip
    return figures


def score_axis(score: Score) -> Axis:
    """Return the axis of a score."""
    label = f"test {score.label}"
    return Axis(label, "%", 100.0, (0.0, 1.0)) if score.share else Axis(label)


def _curve(series: Series, field: str, over: str) -> Curve:
    """Return the mean over a series' finished runs, the others as thin lines; over all of them if none has finished."""
    mean = mean_curve([_points(run, field, over) for run in series.counted])
    others = [_points(run, field, over) for run in series.runs if run not in series.counted]
    return Curve(mean.points, mean.deviations, [*mean.rest, *([*run.values()] for run in others if run)])


def _points(run: Run, field: str, over: str) -> dict[int, Point]:
    """Return a run's points by global round."""
    spent, found = 0, dict[int, Point]()
    known = over in ("rounds", "seconds", *run.tiers)
    for row in run.rounds if known else ():
        spent += _bytes(row, over)
        value = getattr(row, field)
        if value is not None:
            x = {"rounds": float(row.global_round), "seconds": row.elapsed_s}.get(over, float(spent))
            found[row.global_round] = (x, value)
    return found


def _bytes(row: GlobalRoundRecord, tier: str) -> int:
    return row.bytes_.get(f"{tier}_up_bytes", 0) + row.bytes_.get(f"{tier}_down_bytes", 0)
