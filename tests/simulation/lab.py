"""A simulated lab that a scenario disturbs, and its outcome.

    outcome = ScenarioLab(experiment, seed=7, scenario=scenario).run()

A scenario is a coroutine that gets the lab and disturbs it: it kills, stops and starts nodes and
brokers, changes links, and injects messages. It starts before the first node.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.runtime.round import Observe
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.simulation.link import LinkConditions
from fedstrata.deploy.simulation.simulated_broker import SimulatedBroker
from fedstrata.deploy.simulation.simulated_lab import (
    BROKER,
    SimulatedLab,
    SimulationSettings,
    collected_warnings,
    ignore,
)
from fedstrata.deploy.simulation.simulated_machines import SimulatedProcess
from tests.simulation.outcome import LabOutcome, TraceDigest, model_digest, round_rows

Scenario = Callable[["ScenarioLab"], Awaitable[None]]


class ScenarioLab(SimulatedLab):
    """One lab; `run` may be called once. `at_end`: called with the lab before it is torn down."""

    def __init__(
        self,
        experiment: Experiment,
        *,
        at_end: Callable[[ScenarioLab], None] = lambda lab: None,
        scenario: Scenario | None = None,
        observe: Observe = ignore,
        **settings: Any,
    ) -> None:
        super().__init__(
            experiment, SimulationSettings(**settings), scenario=scenario, observe=observe
        )
        self.faults: list[tuple[float, str]] = []
        self.injecting = False  # a message that no node has sent is being routed
        self.lies: set[str] = set()  # what members have lied about
        self.usual: dict[str, LinkConditions] = {}  # of nodes whose links differ from `conditions`
        self._at_end = at_end
        # devices that the experiment does not name, and their parents
        self._entered: dict[str, str] = {}
        self._seconds: dict[str, SimulatedProcess] = {}
        self._second_ends: dict[str, str] = {}  # the errors of second nodes that have ended

    def run(self) -> LabOutcome:
        """Run the lab to its end and return the outcome. Raises the scenario's errors."""
        trace = TraceDigest(self.now)
        self.network.hooks.insert(0, trace)
        with closing(self), collected_warnings() as warnings:
            result = self.play()
            self._at_end(self)
            return LabOutcome(
                result=result,
                ended=dict(self.ended),
                digest=model_digest(self.agents.runs),
                virtual_s=self.now(),
                messages=trace.messages,
                trace=trace.hexadecimal(),
                trainings=self.hardware.trainings,
                errors=tuple(
                    str(e.get("exception") or e["message"])[:500] for e in self.loop.errors
                ),
                warnings=tuple(warnings),
                faults=tuple(self.faults),
                rounds=round_rows(self.agents.runs),
                lies=frozenset(self.lies),
            )

    # For scenarios

    @property
    def over(self) -> bool:
        """Whether the cloud has ended."""
        return CLOUD in self.ended

    def random(self, purpose: str) -> random.Random:
        """Return a random generator for the seed and this purpose."""
        return random.Random(f"{self.seed} scenario {purpose}")

    def record(self, fault: str) -> None:
        """Add a fault to the outcome."""
        self.faults.append((round(self.now(), 6), fault))

    def broker(self, name: str = BROKER) -> SimulatedBroker:
        """Return a broker."""
        return self.network.brokers[name]

    def inject(
        self, topic: str, body: bytes, *, qos: int = 1, retain: bool = False, broker: str = BROKER
    ) -> None:
        """Publish a message as an unknown client."""
        self.injecting = True
        self.broker(broker).route(topic, body, qos=qos, retain=retain)
        self.injecting = False

    def files(self, node: str) -> Path:
        """Return the folder that a node writes: the runs of the cloud, or what others keep for a
        restart.
        """
        return self.agents.runs if node == CLOUD else self.agents.spool_of(node)

    def start(
        self,
        node: str,
        *,
        clock_offset_s: float = 0.0,
        parent: str | None = None,
        keep_files: bool = True,
    ) -> SimulatedProcess:
        """Start or restart a node. A device that the experiment does not name needs a parent at its
        first start.
        """
        if not keep_files:
            shutil.rmtree(self.agents.spool_of(node), ignore_errors=True)
        if parent is not None and node not in self.names:
            self._entered[node] = parent
        return super().start(
            node, clock_offset_s=clock_offset_s, parent=parent or self._entered.get(node)
        )

    def kill(self, node: str) -> None:
        """Send SIGKILL to a node."""
        self.record(f"kill {node}")
        self.processes[node].kill()
        self.changed.set()

    def stop(self, node: str) -> None:
        """Send SIGSTOP to a node."""
        self.record(f"stop {node}")
        self.processes[node].stop()

    def continue_(self, node: str) -> None:
        """Send SIGCONT to a node."""
        self.record(f"continue {node}")
        self.processes[node].continue_()

    def terminate(self, node: str) -> None:
        """Send SIGTERM to a node; await `processes[node].ended.wait()` before restarting it."""
        self.record(f"terminate {node}")
        self.processes[node].terminate()

    # Two nodes with one name

    def start_second(self, node: str) -> SimulatedProcess:
        """Start a second node with the name of a device or an institution, with its own link and
        files.

        If the first one ends because of the duplicate name, the second one replaces it.
        """
        self.record(f"second {node}")
        second = self._seconds[node] = self.new_process(
            node, host=f"second {node}", resume=False, files=f"second-{node}"
        )
        return second

    def has_second(self, node: str) -> bool:
        """Return whether a second node lives that has not replaced the first one."""
        return node in self._seconds

    def kill_second(self, node: str) -> None:
        """Send SIGKILL to a second node that has not replaced the first one, if there is one."""
        second = self._seconds.pop(node, None)
        if second is not None:
            second.kill()

    def process_ended(self, node: str, process: SimulatedProcess, error: str) -> None:
        second = self._seconds.get(node)
        if process is second:
            del self._seconds[node]
            self._second_ends[node] = error
            return
        if error.startswith("DuplicateName"):
            if second is not None:
                self.processes[node] = self._seconds.pop(node)
                return
            # the second one took part, and ended before this one
            error = self._second_ends.pop(node, error)
        super().process_ended(node, process, error)
