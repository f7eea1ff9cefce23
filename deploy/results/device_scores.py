"""The scores of a run's devices: their course, their distribution, and a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from fedstrata.cloud.records import DEVICES, PERSONALISED
from fedstrata.common.settings.training import Score
from fedstrata.deploy.console.tabular import Column, Table
from fedstrata.deploy.results import charts
from fedstrata.deploy.results.charts import Axis, Curve
from fedstrata.deploy.results.figures import Figure
from fedstrata.deploy.results.run import Run

GLOBAL_ROUND: Final = Axis("global round", whole=True)
OVER_DEVICES: Final = {
    "mean": "mean over devices",
    "worst": "worst tenth",
    "spread": "spread over devices",
}
DEVICE_SCORES: Final = (
    "Each device scores the model on test samples of its own. The band is the standard deviation "
    "over devices. The"
    " worst tenth is the mean of the devices with the worst scores. All samples: each sample "
    "counts once, not each"
    " device. Personalised: the model that the device itself trained in the global round, on the "
    "same samples."
)


class OverDevices(NamedTuple):
    """A statistic over devices: its key, its title, and whether it is of the models that they
    trained.
    """

    statistic: str
    title: str
    personalised: bool

    @property
    def key(self) -> str:
        """Its name in JSON."""
        return f"{PERSONALISED if self.personalised else DEVICES}_{self.statistic}"

    def of(self, run: Run) -> float | None:
        """Return a run's last one, None without."""
        return run.of_devices(self.statistic, personalised=self.personalised)


def statistics_of(runs: Iterable[Run]) -> list[OverDevices]:
    """Return the statistics over devices that some of the runs have."""
    known = list(runs)
    return [
        OverDevices(statistic, f"{PERSONALISED}, {title}" if personalised else title, personalised)
        for personalised in (False, True)
        if any(run.of_devices("mean", personalised=personalised) is not None for run in known)
        for statistic, title in OVER_DEVICES.items()
    ]


def score_axis(score: Score, label: str = "") -> Axis:
    """Return the axis of a score. `label`: its name for people, if it is another one."""
    label = f"test {label or score.label}"
    if score.share:
        return Axis(label, "%", 100.0, (0.0, 1.0))
    return Axis(label)


def figures(run: Run) -> list[Figure]:
    """Return figures of the devices' scores: their course, and the distribution over devices; none
    without scores.
    """
    models = list(dict.fromkeys(each.personalised for each in statistics_of([run])))
    if not models:
        return []
    label = run.experiment.score_label
    axis = score_axis(run.experiment.score, label)

    def line(statistic: str, deviation: str = "", *, own: bool) -> Curve:
        rows = [row for row in run.rounds if row.of_devices("mean", personalised=own) is not None]
        points = [
            (float(row.global_round), row.of_devices(statistic, personalised=own) or 0.0)
            for row in rows
        ]
        return Curve(
            points,
            [row.of_devices(deviation, personalised=own) or 0.0 for row in rows]
            if deviation
            else (),
        )

    def distribution(global_round: int, *, own: bool) -> Curve:
        here = [each for each in run.devices if each.global_round == global_round]
        scores = [each.personalised_score if own else each.test_score for each in here]
        ordered = sorted(score for score in scores if score is not None)
        return Curve([(float(place), score) for place, score in enumerate(ordered, 1)])

    course: dict[str, Curve] = {}
    each: dict[str, Curve] = {}
    for own in models:
        kind = f"{PERSONALISED}, " if own else ""
        course[f"{kind}mean over devices"] = line("mean", "spread", own=own)
        course[f"{kind}worst tenth"], course[f"{kind}all samples"] = (
            line("worst", own=own),
            line("score", own=own),
        )
        rounds = [round(x) for x, _ in line("mean", own=own).points]
        for r in dict.fromkeys(
            rounds[-1:] if own else (rounds[place] for place in (0, len(rounds) // 2, -1))
        ):
            if (found := distribution(r, own=own)).points:
                each[f"{kind}after global round {r}"] = found
    title = f"{label[:1].upper()}{label[1:]}"
    rank = Axis("devices up to this score", whole=True)
    name = run.file_name("device-scores")
    over = charts.curves(
        name, f"{title} of devices over global rounds", course, x=GLOBAL_ROUND, y=axis
    )
    name = run.file_name("device-distribution")
    return [over, charts.curves(name, f"{title} of each device, in order", each, x=rank, y=axis)]


def table(run: Run) -> Table:
    """Return a table of the devices' scores of each global round."""
    share, unit = (100.0, "%") if run.experiment.score.share else (1.0, "")
    columns = [Column("global round")]
    rows = list[list[float | None]]()
    models = list(dict.fromkeys(each.personalised for each in statistics_of([run])))
    further = list(run.experiment.score.columns.values())
    for own in models:
        kind = f"{PERSONALISED}, " if own else ""
        columns += [Column(f"{kind}{name}") for name in ("devices", "test samples")]
        columns += [Column(f"{kind}test loss", digits=4)]
        columns += [
            Column(f"{kind}{name}", unit, 2 if unit else 4)
            for name in ("all samples", *OVER_DEVICES.values())
        ]
        columns += [Column(f"{kind}{name.removeprefix('score_')}", digits=4) for name in further]
    for row in run.rounds:
        cells: list[float | None] = []
        for own in models:
            cells += [
                row.of_devices(name, personalised=own) for name in ("scored", "samples", "loss")
            ]
            cells += [
                times(share, row.of_devices(name, personalised=own))
                for name in ("score", *OVER_DEVICES)
            ]
            cells += [row.of_devices(name, personalised=own) for name in further]
        if any(cells):
            rows.append([float(row.global_round), *cells])
    if run.experiment.several_models:
        title = "Scores of dispatched models"
    else:
        title = "Scores of the global model"
    return Table(run.file_name("device-scores"), f"{title} by devices", columns, rows)


def times(factor: float, value: float | None) -> float | None:
    """Return a value in another unit."""
    if value is None:
        return None
    return factor * value
