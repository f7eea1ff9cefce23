"""The curves of a report: score and loss over global rounds, seconds and bytes, over seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Final

from fedstrata.deploy.results import charts
from fedstrata.deploy.results.charts import Axis, Curve
from fedstrata.deploy.results.device_scores import GLOBAL_ROUND, score_axis
from fedstrata.deploy.results.figures import Figure, Point
from fedstrata.deploy.results.phases import POSITIVE
from fedstrata.deploy.results.run import Run, columns_of, seconds_of, tiers_of
from fedstrata.deploy.results.series import Series
from fedstrata.deploy.results.traffic_tables import bytes_axis
from fedstrata.deploy.results.whole import scores_of

SCORES: Final = (
    "Measured on the cloud's test set, with the model that the experiment evaluates (the mean of "
    "the uploads). Seconds are the cloud's monotonic clock since the whole lab was ready; "
    "evaluation in parallel with the next global round is not counted. Bytes are MQTT packets, in "
    "both directions of all links of a tier. Equal curves are drawn once."
)
BANDS: Final = (
    "Finished runs that differ only in the seed are one line: the mean, global round by global "
    "round. The band is one standard deviation (n - 1) above and below it. Thin lines are single "
    "runs: those that did not finish, and what others have beyond the shortest."
)
LOSSES: Final = {
    "loss": Axis("test loss", bounds=POSITIVE),
    "train_loss": Axis("training loss", bounds=POSITIVE),
}
ROUNDS: Final = "rounds"
SECONDS: Final = "seconds"


def curves(series: Sequence[Series], key: str = "") -> list[Figure]:
    """Return figures of the score and, where it is recorded, of loss, side by side, then the score
    over bytes.

    `key` is appended to their names.
    """
    runs = [run for each in series for run in each.runs]
    overs = [("score", ROUNDS), ("loss", ROUNDS), ("score", SECONDS), ("loss", SECONDS)]
    overs += [("score", tier) for tier in tiers_of(runs)]
    score = runs[0].experiment.score
    label = scores_of(runs)
    shown = {"score": score_axis(score, label), **LOSSES}
    targets = {run.experiment.stop.target for run in runs}
    target = targets.pop() if len(targets) == 1 else None
    figures: list[Figure] = []
    for field, over in (*overs, ("train_loss", ROUNDS)):
        lines = {each.label: _curve(each, field, over) for each in series}
        if field != "score" and not any(map(_points_of, lines.values())):
            continue
        x = _axis(over, runs, list(lines.values()))
        y = shown[field]
        name = y.name
        quantity = field
        goal = None
        if field == "score":
            name = label
            quantity = score.label
            goal = target
        place = "global rounds" if over == ROUNDS else x.name
        unit = f", {y.unit}" if y.unit else ""
        title = f"{name[:1].upper()}{name[1:]} over {place}{unit}"
        file = f"{re.sub('[ _]', '-', quantity)}-{over}{key}"
        figures.append(charts.curves(file, title, lines, x=x, y=y, target=goal))
    return figures


def _axis(over: str, runs: Sequence[Run], lines: Sequence[Curve]) -> Axis:
    if over == ROUNDS:
        return GLOBAL_ROUND
    if over == SECONDS:
        return Axis("time", seconds_of(runs))
    most = max((x for line in lines for x, _ in _points_of(line)), default=0.0)
    return bytes_axis(f"{over.upper()} bytes", most)


def _points_of(line: Curve) -> list[Point]:
    """Return the points of a curve and of its thin lines."""
    return [point for part in (line.points, *line.rest) for point in part]


def _curve(series: Series, field: str, over: str) -> Curve:
    """Return the mean over a series' finished runs, the others as thin lines; over all of them if
    none has finished.
    """
    mean = mean_curve([_points(run, field, over) for run in series.counted])
    rest = list(mean.rest)
    for run in series.runs:
        others = {} if run in series.counted else _points(run, field, over)
        rest += [list(others.values())] if others else []
    return Curve(mean.points, mean.deviations, rest, series.style)


def _points(run: Run, field: str, over: str) -> dict[int, Point]:
    """Return a run's points by global round, none over the bytes of a tier that it has not."""
    if over not in (ROUNDS, SECONDS, *run.tiers):
        return {}
    spent = 0
    found = dict[int, Point]()
    for row in run.rounds:
        spent += sum(row.bytes_.get(name, 0) for name in columns_of([over]))
        at = {ROUNDS: float(row.global_round), SECONDS: row.elapsed_s}
        if (value := getattr(row, field)) is not None:
            found[row.global_round] = (at.get(over, float(spent)), value)
    return found


def mean_curve(runs: Sequence[Mapping[int, Point]]) -> Curve:
    """Return the mean over the points of several runs, by global round, and the sample deviations
    (n - 1) of y.

    A point of the mean is at the mean x. It covers the global rounds that all runs with any point
    have; what a run has beyond them is a line of its own in `rest`.
    """
    some = [run for run in runs if run]
    if len(some) < 2:
        return Curve([point for run in some for _, point in sorted(run.items())])
    common = sorted(set.intersection(*map(set, some)))
    last = max(common, default=0)
    means = []
    deviations = []
    for i in common:
        across, levels = zip(*(run[i] for run in some), strict=True)
        means.append((fmean(across), fmean(levels)))
        deviations.append(stdev(levels))
    longer = [run for run in some if max(run) > last]
    beyond = [_from(last, run) for run in longer]
    return Curve(means, deviations, beyond)


def _from(first: int, run: Mapping[int, Point]) -> list[Point]:
    return [point for i, point in sorted(run.items()) if i >= first]
