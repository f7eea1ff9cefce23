"""A lab in virtual time: the real agents on a simulated network, with all randomness from one seed.

`play` runs it once, to its end; `close` discards its processes and its temporary files, whatever
came of it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fedstrata.cloud.cloud_agent import CloudAgent
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.metrics import Metrics
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.runtime.round import Observe
from fedstrata.common.runtime.world import Host
from fedstrata.common.settings.own import is_own
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.simulation.hardware import (
    Computing,
    Durations,
    NullWorkload,
    SimulatedHardware,
    Workload,
)
from fedstrata.deploy.simulation.link import LinkConditions
from fedstrata.deploy.simulation.simulated_machines import Machines, Placement, SimulatedProcess
from fedstrata.deploy.simulation.simulated_network import SimulatedLink, SimulatedNetwork
from fedstrata.deploy.simulation.simulated_world import SimulatedWorld
from fedstrata.deploy.simulation.virtual_loop import START_S, SimulationError, VirtualLoop
from fedstrata.device.device_agent import DeviceAgent
from fedstrata.institution.institution_agent import InstitutionAgent

BROKER: Final = "broker"
OK: Final = "ok"
CONNECT_TIMEOUT_S: Final = 120.0


def ignore(event: str, facts: dict[str, object]) -> None:
    """Ignore an event of the cloud."""


@dataclass(frozen=True, slots=True)
class AgentFactory:
    """Factory of agents. `broker_each`: each institution's devices have a broker of their own, with
    its name.

    `path`: the folder of the runs and the spools    `stay`: nodes wait for the next run
    `run`: the one run of the lab, if it exists; then nodes keep files only where the next process
    needs them
    """

    experiment: Experiment
    hardware: Computing
    metrics: Metrics
    path: Path
    broker_each: bool
    spool: bool
    stay: bool = False
    observe: Observe = ignore
    run: RunFolder | None = None
    folders: list[RunFolder] = field(default_factory=list)

    @property
    def runs(self) -> Path:
        """The folder that contains the runs' folders."""
        return self.path / "runs"

    def upper_broker(self, node: str, parent: str | None = None) -> str:
        """Return the name of the broker between a node and its parent, by default its own."""
        if node != CLOUD:
            return self.lower_broker(parent or self.experiment.tree.parent(node))
        return BROKER

    def lower_broker(self, node: str) -> str:
        """Return the name of the broker between a node and its children."""
        if self.broker_each and node != CLOUD:
            return node
        return BROKER

    def new(
        self,
        node: str,
        world: SimulatedWorld,
        *,
        resume: bool,
        parent: str | None = None,
        files: str = "",
    ) -> CloudAgent | InstitutionAgent | DeviceAgent:
        """Return an agent. `resume`: a cloud continues the existing run, if any.

        `parent`: in its configuration, by default its own    `files`: name of its spool folder, by
        default the node's
        """
        spool = self.spool_of(files or node) if self._keeps(node) else None
        if spool is not None:
            spool.mkdir(parents=True, exist_ok=True)
        above = BrokerAddress(self.upper_broker(node, parent))
        below = BrokerAddress(self.lower_broker(node))
        data = self.experiment.data.root
        code = self.experiment.code_at(node)
        host = Host(
            above,
            CONNECT_TIMEOUT_S,
            self.metrics,
            spool=spool,
            # the user who starts the lab chose the code, and the data
            allow=tuple(filter(is_own, code.values())),
            data=data,
            stay=self.stay,
            world=world,
        )
        if node == CLOUD:
            folder, begun = self._folder(world, resume=resume)
            return CloudAgent(
                folder, host, resume=begun, observe=self.observe, evaluator=self.hardware.evaluator
            )
        parent = parent or self.experiment.tree.parent(node)
        if node in self.experiment.tree.children:
            return InstitutionAgent(node, host, parent=parent, child_broker=below)
        return DeviceAgent(node, host, parent=parent, pool=self.hardware.pool(node), states=spool)

    def _folder(self, world: SimulatedWorld, *, resume: bool) -> tuple[RunFolder, bool]:
        """Return the folder of the cloud's run, and whether that is resumed."""
        if self.run is not None:
            return self.run, self.run.begun
        begun = resume and bool(self.folders) and (self.folders[-1].path / "manifest.json").exists()
        if begun:
            for earlier in self.folders:
                earlier.release()  # like the kernel, when a process is killed
            folder = RunFolder.reopen(self.folders[-1].path, world=world)
        else:
            folder = RunFolder.create(self.runs, self.experiment, world=world)
        self.folders.append(folder)
        return folder, begun

    def _keeps(self, node: str) -> bool:
        """Return whether a node keeps files for a restart."""
        return self.spool and (
            self.run is None or (node != CLOUD and self.experiment.remembers(node))
        )

    def spool_of(self, node: str) -> Path:
        """Return the folder in which a node keeps files for a restart."""
        return self.path / "spool" / node


LOOK_S: Final = 0.5  # between two looks at nodes that stay
MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """What a simulated lab is beside its experiment."""

    seed: int = 0  # of all randomness
    # The folder of the lab's run; None: a temporary one, in which the cloud creates the run.
    run: RunFolder | None = None
    runs: int = 1  # of the experiment, one after another; in several the other nodes stay
    # Models and training; None: a `NullWorkload` of `model_bytes`.
    workload: Workload | None = None
    model_bytes: int = 10_000
    durations: Durations = field(default_factory=Durations)
    # Of every link, until the scenario changes them.
    conditions: LinkConditions = field(default_factory=LinkConditions)
    # The machines of processes and brokers; None: only training and evaluation take time.
    placement: Placement | None = None
    # Whether each institution's children have their own broker, named like the institution.
    broker_each: bool = False
    autostart: Collection[str] | None = None  # the nodes that start at once; None: all
    spool: bool = True  # whether nodes keep files for a restart
    executor_delay_s: float = 0.0  # virtual seconds until a call in an executor begins
    time_limit_s: float = 3600.0  # virtual seconds until the lab is aborted
    grace_s: float = 60.0  # virtual seconds for the other nodes to end after the cloud


class SimulatedLab:
    """One lab; `play` may be called once, then `close`.

    scenario: a coroutine that gets the lab and changes it; it starts before the first node
    observe: called with the cloud's events
    """

    def __init__(
        self,
        experiment: Experiment,
        settings: SimulationSettings,
        *,
        scenario: Callable[[Any], Awaitable[None]] | None = None,
        observe: Observe = ignore,
    ) -> None:
        tree = experiment.tree
        seed = settings.seed
        self.seed = seed
        self.institutions = tuple(tree.aggregators)
        self.homes = {device: tree.parent(device) for device in tree.layers[-1]}
        self.names = (CLOUD, *self.institutions, *self.homes)
        self.processes: dict[str, SimulatedProcess] = {}
        self.ended: dict[str, str] = {}
        self.errors: dict[str, Exception] = {}  # of nodes that ended with one
        self.failed = asyncio.Event()  # set with the first of them
        self.loop = VirtualLoop(seed, executor_delay_s=settings.executor_delay_s)
        self.loop.time_limit = START_S + settings.time_limit_s
        machines = None
        if settings.placement is not None:
            machines = Machines(self.loop, settings.placement)
        workload = settings.workload or NullWorkload(settings.model_bytes)
        self.hardware = SimulatedHardware(workload, settings.durations, seed, machines)
        self.network = SimulatedNetwork(self.loop, seed, settings.conditions, machines=machines)
        self.network.add_broker(BROKER)
        for name in self.institutions if settings.broker_each else ():
            self.network.add_broker(name)
        self._remove_files: Callable[[], object] = lambda: None
        if settings.run is None:
            home = MEMORY if MEMORY.is_dir() else None
            path = Path(tempfile.mkdtemp(prefix="fedstrata-simulation-", dir=home))
            self._remove_files = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        else:
            path = settings.run.path
        self.agents = AgentFactory(
            experiment,
            self.hardware,
            Metrics(),
            path,
            broker_each=settings.broker_each,
            spool=settings.spool,
            stay=settings.runs > 1,
            observe=observe,
            run=settings.run,
        )
        self.worlds: dict[str, list[SimulatedWorld]] = {name: [] for name in self.names}
        self._scenario = scenario
        self._settings = settings
        self._started: list[SimulatedProcess] = []
        # set when a process has ended or was killed: the lab looks again
        self.changed = asyncio.Event()

    def play(self) -> str:
        """Run the lab to its end and return the result, "ok" or the problem. Raises the scenario's
        errors.
        """
        try:
            return self.loop.run_until_complete(self._run_nodes())
        except SimulationError as error:
            return f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Discard the processes, and temporary files."""
        with collected_warnings():
            for process in self._started:
                process.discard()
        self.loop.discard()
        self._remove_files()

    def now(self) -> float:
        """Return the seconds since the lab began."""
        return self.loop.now - START_S

    def link(self, node: str, broker: str | None = None) -> SimulatedLink:
        """Return a node's link to a broker, by default to the one between the node and its
        parent.
        """
        return self.network.link(node, broker or self.agents.upper_broker(node))

    def alive(self, node: str) -> bool:
        """Return whether a node's process exists and has not ended."""
        return node in self.processes and self.processes[node].alive

    def start(
        self, node: str, *, clock_offset_s: float = 0.0, parent: str | None = None
    ) -> SimulatedProcess:
        """Start or restart a node; a restarted cloud resumes its run. Raises ValueError if the node
        runs.

        `parent`: the one in the node's configuration, by default its own
        """
        if self.alive(node):
            raise ValueError(f"{node} is running")
        again = node in self.processes
        self.ended.pop(node, None)
        process = self.processes[node] = self.new_process(
            node, clock_offset_s=clock_offset_s, resume=again, parent=parent
        )
        return process

    def new_process(
        self, node: str, *, host: str | None = None, clock_offset_s: float = 0.0, **agent: Any
    ) -> SimulatedProcess:
        """Return a new process of a node, by default on a host of its name. `agent`: see
        `AgentFactory.new`.
        """
        generation = len(self._started)
        world = SimulatedWorld(
            self.network, host or node, generation=generation, clock_offset_s=clock_offset_s
        )
        self.worlds.setdefault(node, []).append(world)

        async def main() -> None:
            try:
                await self.agents.new(node, world, **agent).run()
            except Exception as error:  # noqa: BLE001 - it is in `errors` and `ended`
                self.errors[node] = error
                self.failed.set()
                self.process_ended(node, world.process, f"{type(error).__name__}: {error}")
            else:
                self.process_ended(node, world.process, "")

        process = world.process = SimulatedProcess(self.loop, node, main)
        self._started.append(process)
        return process

    def process_ended(self, node: str, process: SimulatedProcess, error: str) -> None:
        """Note that a node's process has ended, with an error or ""."""
        self.ended[node] = error
        self.loop.call_soon(self.changed.set)

    async def _run_nodes(self) -> str:
        disturbing = asyncio.create_task(self._disturb(), name="scenario")
        disturbing.add_done_callback(lambda task: self.changed.set())
        await asyncio.sleep(0)  # the scenario starts first
        autostart = self._settings.autostart
        for node in self.names if autostart is None else autostart:
            if node not in self.processes:
                self.start(node)
        await self._until(lambda: CLOUD in self.ended, disturbing)
        for _ in range(1, self._settings.runs):
            if self.ended[CLOUD]:
                break
            del self.processes[CLOUD]  # the next one begins another run
            self.start(CLOUD)
            await self._until(lambda: CLOUD in self.ended, disturbing)
        present = [process for process in self.processes.values() if process.alive]
        try:
            async with asyncio.timeout(self._settings.grace_s):
                if self._settings.runs == 1:
                    await self._until(
                        lambda: not any(process.alive for process in present), disturbing
                    )
                while any(process.alive and not process.seeks for process in present):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            pass
        disturbing.cancel()
        failed = [f"{node}: {error}" for node, error in self.ended.items() if error]
        stuck = sorted(process.name for process in present if process.alive and not process.seeks)
        if failed:
            return "failed: " + "; ".join(failed)
        if stuck:
            return f"stuck: {' '.join(stuck)}"
        return OK

    async def _until(self, condition: Callable[[], bool], disturbing: asyncio.Task[None]) -> None:
        while not condition():
            await self.changed.wait()
            self.changed.clear()
            if disturbing.done() and not disturbing.cancelled():
                disturbing.result()

    async def _disturb(self) -> None:
        if self._scenario is not None:
            await self._scenario(self)


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect the agents' log messages of level WARNING and above, in place of the usual
    handlers.
    """
    found: list[str] = []
    handler = _Collector(found)
    logger = logging.getLogger("fedstrata")
    before = logger.propagate, list(logger.handlers)
    logger.propagate = False
    logger.handlers = [handler]
    try:
        yield found
    finally:
        logger.propagate, logger.handlers = before


class _Collector(logging.Handler):
    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(record.getMessage())
