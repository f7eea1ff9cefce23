"""The agents of a simulated lab, configured as by the command line."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cloud.agent import CloudAgent
from cloud.results import RunFolder
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from common.metrics import Metrics
from common.net.address import BrokerAddress
from common.runtime.round import Observe
from common.runtime.world import Host
from deploy.simulation.hardware import SimulatedEvaluator, SimulatedHardware
from deploy.simulation.world import SimulatedWorld
from device.agent import DeviceAgent
from institution.agent import InstitutionAgent

BROKER: Final = "broker"
CONNECT_TIMEOUT_S: Final = 120.0


def ignore(event: str, facts: dict[str, object]) -> None:
    """Ignore an event of the cloud."""


@dataclass(frozen=True, slots=True)
class AgentFactory:
    """Factory of agents. `broker_each`: each institution's devices have a broker of their own, with its name.

    `stay`: nodes wait for the next run.
    """

    experiment: Experiment
    hardware: SimulatedHardware
    metrics: Metrics
    path: Path
    broker_each: bool
    spool: bool
    stay: bool = False
    observe: Observe = ignore
    folders: list[RunFolder] = field(default_factory=list)

    @property
    def runs(self) -> Path:
        """The folder that contains the runs' folders."""
        return self.path / "runs"

    def upper_broker(self, node: str) -> str:
        """Return the name of the broker between a node and its parent."""
        return self._own_broker(self.experiment.tree.parent(node)) if node != CLOUD else BROKER

    def lower_broker(self, node: str) -> str:
        """Return the name of the broker between an institution and its children."""
        return self._own_broker(node)

    def forget_files(self, node: str) -> None:
        """Remove the files that a node keeps for a restart."""
        shutil.rmtree(self._spool(node), ignore_errors=True)

    def new(
        self, node: str, world: SimulatedWorld, *, resume: bool, parent: str | None = None, files: str = ""
    ) -> CloudAgent | InstitutionAgent | DeviceAgent:
        """Return an agent. `resume`: a cloud continues the existing run, if any.

        `parent`: in its configuration, by default its own    `files`: name of its spool folder, by default the node's
        """
        spool = self._spool(files or node) if self.spool else None
        if spool is not None:
            spool.mkdir(parents=True, exist_ok=True)
        above, below = BrokerAddress(self.upper_broker(node)), BrokerAddress(self.lower_broker(node))
        host = Host(above, CONNECT_TIMEOUT_S, self.metrics, spool=spool, stay=self.stay, world=world)
        if node == CLOUD:
            begun = self.folders[-1].path / "manifest.json" if resume and self.folders else None
            begun = begun if begun is not None and begun.exists() else None
            if begun is None:
                folder = RunFolder.create(self.runs, self.experiment, world=world)
            else:
                for earlier in self.folders:
                    earlier.release()  # like the kernel, when a process is killed
                folder = RunFolder.reopen(begun.parent, world=world)
            self.folders.append(folder)
            evaluator = SimulatedEvaluator(self.hardware)
            return CloudAgent(
                folder,
                host,
                resume=begun is not None,
                observe=self.observe,
                evaluator=lambda experiment, path: evaluator,
            )
        parent = parent or self.experiment.tree.parent(node)
        if node in self.experiment.tree.children:
            return InstitutionAgent(node, host, parent=parent, child_broker=below)
        return DeviceAgent(node, host, parent=parent, pool=self.hardware.pool(node), states=spool)

    def _own_broker(self, parent: str) -> str:
        return parent if self.broker_each and parent != CLOUD else BROKER

    def files(self, node: str) -> Path:
        """Return the folder that a node writes: the runs of the cloud, or what others keep for a restart."""
        return self.runs if node == CLOUD else self._spool(node)

    def _spool(self, node: str) -> Path:
        return self.path / "spool" / node
