"""The scores of a run's devices: their course, their distribution, and a table."""

from __future__ import annotations

from typing import Final

from common.experiment.training import Score
from deploy.console.tabular import Column, Table
from deploy.results import charts
from deploy.results.charts import Axis, Curve
from deploy.results.figures import Figure
from deploy.results.run import Run

GLOBAL_ROUND: Final = Axis("global round", whole=True)
OVER_DEVICES: Final = {"mean": "mean over devices", "worst": "worst tenth", "spread": "spread over devices"}
DEVICE_SCORES: Final = (
    "Each device scores the model on test samples of its own. The band is the standard deviation over devices. The"
    " worst tenth is the mean of the devices with the worst scores. All samples: each sample counts once, not each"
    " device."
)


def score_axis(score: Score) -> Axis:
    """Return the axis of a score."""
    label = f"test {score.label}"
    return Axis(label, "%", 100.0, (0.0, 1.0)) if score.share else Axis(label)


def figures(run: Run) -> list[Figure]:
    """Return figures of the devices' scores: their course, and the distribution over devices; none without scores."""
    rows = [row for row in run.rounds if row.of_devices("mean") is not None]
    if not rows:
        return []
    score, axis = run.scored_by, score_axis(run.scored_by)

    def line(statistic: str, deviation: str = "") -> Curve:
        points = [(float(row.global_round), row.of_devices(statistic) or 0.0) for row in rows]
        return Curve(points, [row.of_devices(deviation) or 0.0 for row in rows] if deviation else ())

    def distribution(global_round: int) -> Curve:
        scores = (each.test_score for each in run.devices if each.global_round == global_round)
        ordered = sorted(score for score in scores if score is not None)
        return Curve([(float(place), score) for place, score in enumerate(ordered, 1)])

    course = {"mean over devices": line("mean", "spread"), "worst tenth": line("worst"), "all samples": line("score")}
    shown = dict.fromkeys(rows[place].global_round for place in (0, len(rows) // 2, -1))
    each = {f"after global round {r}": found for r in shown if (found := distribution(r)).points}
    title, rank = f"{score.label[:1].upper()}{score.label[1:]}", Axis("devices up to this score", whole=True)
    name = run.file_name("device-scores")
    over = charts.curves(name, f"{title} of devices over global rounds", course, x=GLOBAL_ROUND, y=axis)
    name = run.file_name("device-distribution")
    return [over, charts.curves(name, f"{title} of each device, in order", each, x=rank, y=axis)]


def table(run: Run) -> Table:
    """Return a table of the devices' scores of each global round."""
    share, unit = (100.0, "%") if run.scored_by.share else (1.0, "")
    columns = [Column("global round"), Column("devices"), Column("test samples"), Column("test loss", digits=4),
               *(Column(name, unit, 2 if unit else 4) for name in ("all samples", *OVER_DEVICES.values()))]  # fmt: skip
    rows = [
        (row.global_round, *(row.of_devices(name) for name in ("scored", "samples", "loss")),
         *(times(share, row.of_devices(name)) for name in ("score", *OVER_DEVICES)))
        for row in run.rounds
        if row.scored
    ]  # fmt: skip
    title = "Scores of dispatched models" if run.experiment.several_models else "Scores of the global model"
    return Table(run.file_name("device-scores"), f"{title} by devices", columns, rows)


def times(factor: float, value: float | None) -> float | None:
    """Return a value in another unit."""
    return None if value is None else factor * value
