"""A run in virtual time: the lab of an experiment with real training, into a run's folder.

The agents, the protocol, training and evaluation are those of a lab of processes. The clock, the
broker, the links and the machines are simulated: each node has a machine of its own. Equal
experiments and speeds give equal events, on any machine.
"""

from __future__ import annotations

import asyncio
import shutil
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fedstrata.cloud.run_folder import SIMULATED, RunFolder
from fedstrata.common.errors import InvalidExperiment, RunFailed, as_known
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.processes import interruptible
from fedstrata.common.runtime.round import Observe
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.simulation.hardware import Durations, Workload
from fedstrata.deploy.simulation.link import LinkConditions
from fedstrata.deploy.simulation.simulated_broker import Routed
from fedstrata.deploy.simulation.simulated_computing import MachineSeconds, RealComputing
from fedstrata.deploy.simulation.simulated_lab import SimulatedLab, SimulationSettings, ignore
from fedstrata.deploy.simulation.simulated_machines import Placement
from fedstrata.deploy.simulation.virtual_loop import SimulationError

LIMIT_S: Final = 1e9  # virtual seconds
LOOPBACK_S: Final = 2e-5  # one way, of a node's link to the broker on its own host
REASON_S: Final = 5.0  # virtual time in which the cloud may end too: its error names the cause
FAREWELL_S: Final = 30.0  # virtual time in which an interrupted cloud writes its last byte counts


def check_simulated(experiment: Experiment) -> None:
    """Raise InvalidExperiment for what is not simulated: training at a node."""
    for tier in experiment.tiers:
        if tier.aggregation.refines:
            problem = "its training at a node is not simulated"
            remedy = "Use --direct, or a lab of processes."
            raise InvalidExperiment("aggregation.name", tier.aggregation.name, problem, remedy)


class VirtualRun:
    """The run of a simulated folder.

    conditions: of each node's link to its broker, beside what the agents' buckets shape
    null: a workload in place of real training and evaluation, and its durations
    routed: called with each message that a broker forwards
    """

    def __init__(
        self,
        folder: RunFolder,
        seconds: MachineSeconds,
        placement: Placement,
        conditions: Mapping[str, LinkConditions],
        *,
        accelerator: str = "cpu",
        workers: int | None = None,
        null: tuple[Workload, Durations] | None = None,
        routed: Callable[[Routed], None] = lambda message: None,
    ) -> None:
        self._folder = folder
        self._seconds = seconds
        self._placement = placement
        self._conditions = conditions
        self._options: dict[str, Any] = {"accelerator": accelerator, "workers": workers}
        self._null = null
        self._routed = routed
        self._lab: SimulatedLab | None = None
        self._computing: RealComputing | None = None

    @property
    def row_bytes(self) -> int:
        """The bytes of a model in memory, once the run has begun."""
        if self._null is not None:
            return self._null[0].layout.row_bytes
        if self._computing is None:
            return 0
        return self._computing.row_bytes

    def now(self) -> float:
        """Return the virtual seconds since the begin."""
        if self._lab is None:
            return 0.0
        return self._lab.now()

    def run(self, observe: Observe = ignore) -> Path:
        """Run, or resume, to the end; return the path of the final model. Raises FedstrataError,
        KeyboardInterrupt.
        """
        experiment = self._folder.experiment

        def observe_run(event: str, facts: dict[str, object]) -> None:
            more = {SIMULATED: True} if event == "run" else {}
            observe(event, facts | more)

        settings = SimulationSettings(
            seed=self._seed(),
            run=self._folder,
            conditions=LinkConditions(delay_s=LOOPBACK_S),
            placement=self._placement,
            broker_each=True,
            time_limit_s=LIMIT_S,
        )
        if self._null is not None:
            workload, durations = self._null
            settings = replace(settings, workload=workload, durations=durations)
        self._lab = lab = SimulatedLab(
            experiment, settings, scenario=self._watch, observe=observe_run
        )
        lab.network.hooks.append(self._routed)
        with interruptible(), closing(lab), ExitStack() as opened:
            if self._null is None:
                self._computing = RealComputing(
                    experiment, lab.hardware, self._seconds, **self._options
                )
                lab.agents = replace(lab.agents, hardware=opened.enter_context(self._computing))
            result = self._play(lab)
        if lab.ended.get(CLOUD) != "":
            raise (
                as_known(lab.errors[CLOUD], CLOUD) or lab.errors[CLOUD]
                if CLOUD in lab.errors
                else RunFailed(result)
            )
        shutil.rmtree(self._folder.path / "spool", ignore_errors=True)
        return self._folder.path / "model.safetensors"

    def _seed(self) -> int:
        """Return the seed of the sessions' ids, which no two processes of a run may share: the byte
        ledger has them.
        """
        if not self._folder.begun:
            return self._folder.experiment.seed
        file = self._folder.path / "events.jsonl"
        events = file.stat().st_size if file.exists() else 0
        return zlib.crc32(f"{self._folder.experiment.seed} {events}".encode())

    async def _watch(self, lab: SimulatedLab) -> None:
        """Set the links; then raise the error of the first node that fails, unless the cloud
        ends.
        """
        for node, conditions in self._conditions.items():
            lab.link(node).restore(conditions)
        await lab.failed.wait()
        await asyncio.sleep(REASON_S)
        node, error = next(iter(lab.errors.items()))
        raise as_known(error, node) or error

    def _play(self, lab: SimulatedLab) -> str:
        """Run the lab to its end and return the result; if it is interrupted, let the cloud write
        its byte counts.
        """
        try:
            return lab.play()
        except KeyboardInterrupt:
            for node, process in lab.processes.items():
                if node != CLOUD:
                    process.kill()
            cloud = lab.processes.get(CLOUD)
            if cloud is not None and cloud.alive:
                cloud.terminate()
                with suppress(SimulationError, TimeoutError):
                    lab.loop.run_until_complete(asyncio.wait_for(cloud.ended.wait(), FAREWELL_S))
            raise
