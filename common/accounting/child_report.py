"""The report on one node in a global round, passed on by each node above it up to the cloud."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from common.accounting.costs import UNKNOWN_COSTS, DeviceCosts
from common.accounting.traffic import NO_WIRE, Measured, TcpStats, Traffic
from common.model.scores import ScoredModels, summed
from common.text import NameText


class TrainingPath(StrEnum):
    """How a device trained: in its agent's process, in a worker process, or vmapped with other devices."""

    NONE = ""
    IN_PROCESS = "in-process"
    WORKERS = "workers"
    VMAPPED = "vmapped"


@dataclass(frozen=True, slots=True)
class ChildReport:
    """Work of one node in a global round, its link's calibration before the run, and the link's bytes since then.

    Both directions are counted on arrival: `up` at the parent, `down` at the child. The seconds are those of `Result`,
    summed over the rounds. `broker`: the node's own connection to the broker of its children, if it has any. `tests`,
    `costs`: those of `Result`. `parent`: of a device that the experiment does not name below that node, else empty.
    """

    name: NameText
    samples: int = 0
    rounds: int = 0
    epochs: int = 0
    steps: int = 0
    loss: float | None = None
    train_s: float = 0.0
    wait_s: float = 0.0
    pause_s: float = 0.0
    path: TrainingPath = TrainingPath.NONE
    measured: Measured = Measured()
    traffic: Traffic = Traffic()
    broker: TcpStats = NO_WIRE
    tests: ScoredModels | None = None
    costs: DeviceCosts = UNKNOWN_COSTS
    parent: NameText = ""

    @property
    def link(self) -> str:
        """What identifies its link: its name, behind that of its parent if it entered; who moves has several links."""
        return f"{self.parent}/{self.name}" if self.parent else self.name

    def with_work_of(self, earlier: ChildReport) -> ChildReport:
        """Return this report with the work of an earlier one added."""
        return replace(
            self,
            rounds=earlier.rounds + self.rounds,
            epochs=earlier.epochs + self.epochs,
            steps=earlier.steps + self.steps,
            train_s=earlier.train_s + self.train_s,
            wait_s=earlier.wait_s + self.wait_s,
            pause_s=earlier.pause_s + self.pause_s,
            tests=summed((earlier.tests, self.tests)),
            costs=self._costs_after(earlier),
        )

    def _costs_after(self, earlier: ChildReport) -> DeviceCosts:
        if not self.rounds:  # it only scored
            return earlier.costs
        return self.costs.after(earlier.costs) if earlier.rounds else self.costs

    def with_bytes_of(self, earlier: ChildReport) -> ChildReport:
        """Return this report with the bytes of an earlier session added."""
        return replace(self, traffic=earlier.traffic + self.traffic, broker=earlier.broker + self.broker)

    def without_bytes_of(self, earlier: ChildReport) -> ChildReport:
        """Return this report with only the bytes since an earlier one."""
        return replace(self, traffic=self.traffic - earlier.traffic, broker=self.broker - earlier.broker)

    def without_bytes(self) -> ChildReport:
        """Return this report with no bytes."""
        return replace(self, traffic=Traffic(), broker=NO_WIRE)
