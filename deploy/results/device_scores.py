"""The scores of a run's devices: their course, and their distribution."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from fedstrata.cloud.records import DEVICES, PERSONALISED
from fedstrata.common.settings.training import Score
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
    found = []
    for own in (False, True):
        if any(run.of_devices("mean", personalised=own) is not None for run in known):
            kind = f"{PERSONALISED}, " if own else ""
            for statistic, title in OVER_DEVICES.items():
                found.append(OverDevices(statistic, f"{kind}{title}", own))
    return found


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
    course: dict[str, Curve] = {}
    each: dict[str, Curve] = {}
    for own in dict.fromkeys(each.personalised for each in statistics_of([run])):
        kind = f"{PERSONALISED}, " if own else ""
        course[f"{kind}mean over devices"] = _course(run, "mean", "spread", own=own)
        course[f"{kind}worst tenth"] = _course(run, "worst", own=own)
        course[f"{kind}all samples"] = _course(run, "score", own=own)
        rounds = [round(x) for x, _ in course[f"{kind}mean over devices"].points]
        shown = [rounds[-1]] if own else [rounds[0], rounds[len(rounds) // 2], rounds[-1]]
        for r in shown:
            found = _distribution(run, r, own=own)
            if found.points:
                each[f"{kind}after global round {r}"] = found
    if not course:
        return []
    label = run.experiment.score_label
    y = score_axis(run.experiment.score, label)
    title = f"{label[:1].upper()}{label[1:]} of"
    rank = Axis("devices up to this score", whole=True)
    over = run.file_name("device-scores")
    among = run.file_name("device-distribution")
    return [
        charts.curves(over, f"{title} devices over global rounds", course, x=GLOBAL_ROUND, y=y),
        charts.curves(among, f"{title} each device, in order", each, x=rank, y=y),
    ]


def _course(run: Run, statistic: str, deviation: str = "", *, own: bool) -> Curve:
    """Return a statistic by global round, with another one as its band."""
    points = []
    deviations = []
    for row in run.rounds:
        if row.of_devices("mean", personalised=own) is None:
            continue
        value = row.of_devices(statistic, personalised=own) or 0.0
        points.append((float(row.global_round), value))
        if deviation:
            deviations.append(row.of_devices(deviation, personalised=own) or 0.0)
    return Curve(points, deviations)


def _distribution(run: Run, global_round: int, *, own: bool) -> Curve:
    """Return the devices' scores in a global round, in their order."""
    scores = []
    for row in run.devices:
        score = row.personalised_score if own else row.test_score
        if row.global_round == global_round and score is not None:
            scores.append(score)
    return Curve([(float(place), score) for place, score in enumerate(sorted(scores), 1)])


def times(factor: float, value: float | None) -> float | None:
    """Return a value in another unit."""
    if value is None:
        return None
    return factor * value
