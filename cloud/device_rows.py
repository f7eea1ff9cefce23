"""The rows of devices.csv that a run makes of the reports on its devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from fedstrata.cloud.records import AGAINST, COSTS, PERSONALISED, DeviceRecord
from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.methods.attacked_rule import refused_in

Plans = Mapping[str, Sequence[Mapping[str, Any]]]  # of each node, its decisions in a global round

NO_PLANS: Final[Plans] = MappingProxyType({})


class DeviceRows:
    """One run's rows; those of the last global round are kept, as their scores come later."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._further = experiment.score.columns.values()
        self.last: list[DeviceRecord] = []

    def add(
        self, global_round: int, reports: Iterable[ChildReport], plans: Plans
    ) -> list[DeviceRecord]:
        """Return the rows of these devices. `plans`: the decisions of their parents."""
        if self.last and self.last[0].global_round != global_round:
            self.last = []
        records = [self._record(global_round, report, plans) for report in reports]
        self.last += records
        return records

    def score(self, global_round: int, reports: Iterable[ChildReport]) -> int:
        """Add the devices' scores of a global round's model to the last rows; return how many rows
        there were before.
        """
        score = self._experiment.score
        rows = {record.node: record for record in self.last if record.global_round == global_round}
        count = len(rows)
        for report in reports:
            if report.work.tests is None or report.work.tests.received is None:
                continue
            tests = report.work.tests.received
            node = self._path(report)
            if node not in rows:
                untrained = replace(report, work=Work(report.work.samples), rounds=0)
                rows[node] = self._record(global_round, untrained, NO_PLANS)
            first, *further = tests.by(score.names)
            names = (f"test_{name}" for name in self._further)
            rows[node] = replace(
                rows[node],
                test_samples=tests.samples,
                test_loss=tests.mean_loss,
                test_score=first,
                evaluate_s=tests.seconds,
                more={**rows[node].more, **dict(zip(names, further, strict=True))},
            )
        self.last = [*rows.values()]
        return count

    def _record(self, global_round: int, report: ChildReport, plans: Plans) -> DeviceRecord:
        """Return the row of a device's work in a global round."""
        work = report.work
        trained = self._trained(report.work)
        if attackers := self._experiment.attackers:
            parent = report.parent or self._experiment.tree.parent(report.name)
            refused = sum(report.name in refused_in(plan) for plan in plans.get(parent, ()))
            cells = (attackers.lies(report.name), report.rounds - refused, refused)
            trained["more"] |= zip(AGAINST, map(float, cells), strict=True)
        return DeviceRecord(
            global_round=global_round,
            node=self._path(report),
            samples=work.samples,
            local_rounds=report.rounds,
            epochs=work.epochs,
            sgd_steps=work.steps,
            loss=work.loss,
            train_s=work.train_s,
            wait_s=work.wait_s,
            pause_s=work.pause_s,
            path=work.path,
            **{name: getattr(work.costs, name) for name in COSTS},
            **trained,
        )

    def _path(self, device: ChildReport) -> str:
        """Return the names from the cloud down to a device."""
        tree = self._experiment.tree
        if device.parent:
            return f"{tree.path(device.parent)}/{device.name}"
        return tree.path(device.name)

    def _trained(self, work: Work) -> dict[str, Any]:
        """Return the cells of a device's scores of the model that it trained, and `more`: all
        further columns.
        """
        evaluation = self._experiment.evaluation
        personalised = ("loss", "score", "s", *self._further)
        more: dict[str, float | None] = {}
        if evaluation.on_devices:
            more |= {f"test_{name}": None for name in self._further}
            if evaluation.personalised:
                more |= {f"{PERSONALISED}_{name}": None for name in personalised}
        tests = None if work.tests is None else work.tests.trained
        if tests is None:
            return {"more": more}
        first, *further = tests.by(self._experiment.score.names)
        found = (tests.mean_loss, first, tests.seconds, *further)
        for name, value in zip(personalised, found, strict=True):
            more[f"{PERSONALISED}_{name}"] = value
        return {"test_samples": tests.samples, "more": more}
