"""The report on one node in a global round, passed on by each node above it up to the cloud."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedstrata.common.accounting.traffic import NO_WIRE, Measured, TcpStats, Traffic
from fedstrata.common.accounting.work import NO_WORK, Work
from fedstrata.common.text import NameText


@dataclass(frozen=True, slots=True)
class ChildReport:
    """Work of one node in a global round, its link's calibration before the run, and the link's
    bytes since then.

    Both directions are counted on arrival: `up` at the parent, `down` at the child.
    """

    name: NameText
    work: Work = NO_WORK  # summed over the rounds
    rounds: int = 0  # in which it trained
    measured: Measured = Measured()
    traffic: Traffic = Traffic()
    broker: TcpStats = NO_WIRE  # its own connection to the broker of its children, if it has any
    parent: NameText = ""  # of a device that the experiment does not name below that node

    @property
    def link(self) -> str:
        """What identifies its link: its name, behind that of its parent if it entered; who moves
        has several links.
        """
        if self.parent:
            return f"{self.parent}/{self.name}"
        return self.name

    def with_work_of(self, earlier: ChildReport) -> ChildReport:
        """Return this report with the work of an earlier one added."""
        return replace(
            self, work=self.work.after(earlier.work), rounds=earlier.rounds + self.rounds
        )

    def with_bytes_of(self, earlier: ChildReport) -> ChildReport:
        """Return this report with the bytes of an earlier session added."""
        return replace(
            self, traffic=earlier.traffic + self.traffic, broker=earlier.broker + self.broker
        )

    def without_bytes_of(self, earlier: ChildReport) -> ChildReport:
        """Return this report with only the bytes since an earlier one."""
        return replace(
            self, traffic=self.traffic - earlier.traffic, broker=self.broker - earlier.broker
        )

    def without_bytes(self) -> ChildReport:
        """Return this report with no bytes."""
        return replace(self, traffic=Traffic(), broker=NO_WIRE)
