"""A lab in virtual time: the real agents on a simulated network, with all randomness from one seed.

    outcome = SimulatedLab(experiment, seed=7, scenario=scenario).run()

A scenario is a coroutine that gets the lab and disturbs it: it kills, stops and starts nodes and brokers, changes
links, and injects messages. It starts before the first node.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cloud.agent import CloudAgent
from cloud.results import RunFolder
from common.experiment.own import is_own
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from common.metrics import Metrics
from common.net.address import BrokerAddress
from common.runtime.round import Observe
from common.runtime.world import Host
from deploy.simulation.broker import SimulatedBroker
from deploy.simulation.hardware import Computing, Durations, NullWorkload, SimulatedHardware, Workload
from deploy.simulation.link import LinkConditions
from deploy.simulation.loop import START_S, SimulationError, VirtualLoop
from deploy.simulation.machines import Machines, Placement, SimulatedProcess
from deploy.simulation.network import SimulatedLink, SimulatedNetwork
from deploy.simulation.outcome import OK, LabOutcome, TraceDigest, collected_warnings, model_digest, round_rows
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

    `path`: the folder of the runs and the spools    `stay`: nodes wait for the next run
    `run`: the one run of the lab, if it exists; then nodes keep files only where the next process needs them
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
        return self.lower_broker(parent or self.experiment.tree.parent(node)) if node != CLOUD else BROKER

    def lower_broker(self, node: str) -> str:
        """Return the name of the broker between a node and its children."""
        return node if self.broker_each and node != CLOUD else BROKER

    def forget_files(self, node: str) -> None:
        """Remove the files that a node keeps for a restart."""
        shutil.rmtree(self._spool(node), ignore_errors=True)

    def new(
        self, node: str, world: SimulatedWorld, *, resume: bool, parent: str | None = None, files: str = ""
    ) -> CloudAgent | InstitutionAgent | DeviceAgent:
        """Return an agent. `resume`: a cloud continues the existing run, if any.

        `parent`: in its configuration, by default its own    `files`: name of its spool folder, by default the node's
        """
        spool = self._spool(files or node) if self._keeps(node) else None
        if spool is not None:
            spool.mkdir(parents=True, exist_ok=True)
        above, below = BrokerAddress(self.upper_broker(node, parent)), BrokerAddress(self.lower_broker(node))
        data, code = self.experiment.data.root, self.experiment.code_at(node)
        host = Host(
            above,
            CONNECT_TIMEOUT_S,
            self.metrics,
            spool=spool,
            allow=tuple(filter(is_own, code.values())),  # the user who starts the lab chose the code, and the data
            data=data,
            stay=self.stay,
            world=world,
        )
        if node == CLOUD:
            folder, begun = self._folder(world, resume=resume)
            return CloudAgent(folder, host, resume=begun, observe=self.observe, evaluator=self.hardware.evaluator)
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
        return self.spool and (self.run is None or (node != CLOUD and self.experiment.remembers(node)))

    def files(self, node: str) -> Path:
        """Return the folder that a node writes: the runs of the cloud, or what others keep for a restart."""
        return self.runs if node == CLOUD else self._spool(node)

    def _spool(self, node: str) -> Path:
        return self.path / "spool" / node


LOOK_S: Final = 0.5  # between two looks at nodes that stay
MEMORY: Final = Path("/dev/shm")

Scenario = Callable[["SimulatedLab"], Awaitable[None]]


class SimulatedLab:
    """One lab; `run` may be called once.

    run: the folder of the lab's run, by default a temporary one that the cloud creates
    workload: models and training, by default a `NullWorkload` of `model_bytes`
    conditions: of every link, until the scenario changes them
    placement: the machines of processes and brokers, None: only training and evaluation take time
    broker_each: each institution's children have their own broker, named like the institution
    autostart: the nodes that start at once, by default all    spool: whether nodes keep files for a restart
    time_limit_s: virtual seconds until the lab is aborted
    runs: of the experiment, one after another; in several of them the other nodes stay
    grace_s: virtual seconds for the other nodes to end after the cloud
    observe: called with the cloud's events    at_end: called with the lab before it is torn down
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        seed: int = 0,
        run: RunFolder | None = None,
        scenario: Scenario | None = None,
        workload: Workload | None = None,
        model_bytes: int = 10_000,
        durations: Durations | None = None,
        conditions: LinkConditions | None = None,
        placement: Placement | None = None,
        broker_each: bool = False,
        autostart: Collection[str] | None = None,
        spool: bool = True,
        executor_delay_s: float = 0.0,
        runs: int = 1,
        time_limit_s: float = 3600.0,
        grace_s: float = 60.0,
        observe: Observe = ignore,
        at_end: Callable[[SimulatedLab], None] = lambda lab: None,
    ) -> None:
        tree = experiment.tree
        self.seed = seed
        self.institutions = tuple(tree.aggregators)
        self.homes = {device: tree.parent(device) for device in tree.layers[-1]}
        self.names = (CLOUD, *self.institutions, *self.homes)
        self.processes: dict[str, SimulatedProcess] = {}
        self.ended: dict[str, str] = {}
        self._entered: dict[str, str] = {}  # devices that the experiment does not name, and their parents
        self.errors: dict[str, Exception] = {}  # of nodes that ended with one
        self.failed = asyncio.Event()  # set with the first of them
        self.loop = VirtualLoop(seed, executor_delay_s=executor_delay_s)
        machines = None if placement is None else Machines(self.loop, placement)
        workload = workload or NullWorkload(model_bytes)
        self.hardware = SimulatedHardware(workload, durations or Durations(), seed, machines)
        self.loop.time_limit = START_S + time_limit_s
        self.network = SimulatedNetwork(self.loop, seed, conditions or LinkConditions(), machines=machines)
        for name in (BROKER, *(self.institutions if broker_each else ())):
            self.network.add_broker(name)
        self._remove_files: Callable[[], object] = lambda: None
        if run is None:
            path = Path(tempfile.mkdtemp(prefix="fedstrata-simulation-", dir=MEMORY if MEMORY.is_dir() else None))
            self._remove_files = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        else:
            path = run.path
        self.agents = AgentFactory(
            experiment,
            self.hardware,
            Metrics(),
            path,
            broker_each=broker_each,
            spool=spool,
            stay=runs > 1,
            observe=observe,
            run=run,
        )
        self.usual: dict[str, LinkConditions] = {}  # of nodes whose links differ from `conditions`
        self.worlds: dict[str, list[SimulatedWorld]] = {name: [] for name in self.names}
        self._scenario = scenario
        self._autostart = self.names if autostart is None else tuple(autostart)
        self._runs = runs
        self._grace_s = grace_s
        self._at_end = at_end
        self._started: list[SimulatedProcess] = []
        self._seconds: dict[str, SimulatedProcess] = {}
        self._second_ends: dict[str, str] = {}  # the errors of second nodes that have ended
        self.faults: list[tuple[float, str]] = []
        self.injecting = False  # a message that no node has sent is being routed
        self._changed = asyncio.Event()

    def run(self) -> LabOutcome:
        """Run the lab to its end and return the outcome. Raises the scenario's errors."""
        trace = TraceDigest(self.now)
        self.network.hooks.insert(0, trace)
        try:
            with collected_warnings() as warnings:
                result = self.play()
                self._at_end(self)
                outcome = LabOutcome(
                    result=result,
                    ended=dict(self.ended),
                    digest=model_digest(self.agents.runs),
                    virtual_s=self.now(),
                    messages=trace.messages,
                    trace=trace.hexadecimal(),
                    trainings=self.hardware.trainings,
                    errors=tuple(str(e.get("exception") or e["message"])[:500] for e in self.loop.errors),
                    warnings=tuple(warnings),
                    faults=tuple(self.faults),
                    rounds=round_rows(self.agents.runs),
                )
        finally:
            self.close()
        return outcome

    def play(self) -> str:
        """Run the lab to its end and return the result, "ok" or the problem. Raises the scenario's errors."""
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

    # For scenarios

    @property
    def over(self) -> bool:
        """Whether the cloud has ended."""
        return CLOUD in self.ended

    def now(self) -> float:
        """Return the seconds since the lab began."""
        return self.loop.now - START_S

    def random(self, purpose: str) -> random.Random:
        """Return a random generator for the seed and this purpose."""
        return random.Random(f"{self.seed} scenario {purpose}")

    def record(self, fault: str) -> None:
        """Add a fault to the outcome."""
        self.faults.append((round(self.now(), 6), fault))

    def broker(self, name: str = BROKER) -> SimulatedBroker:
        """Return a broker."""
        return self.network.brokers[name]

    def link(self, node: str, broker: str | None = None) -> SimulatedLink:
        """Return a node's link to a broker, by default to the one between the node and its parent."""
        return self.network.link(node, broker or self.agents.upper_broker(node))

    def inject(self, topic: str, body: bytes, *, qos: int = 1, retain: bool = False, broker: str = BROKER) -> None:
        """Publish a message as an unknown client."""
        self.injecting = True
        self.network.brokers[broker].route(topic, body, qos=qos, retain=retain)
        self.injecting = False

    def alive(self, node: str) -> bool:
        """Return whether a node's process exists and has not ended."""
        return node in self.processes and self.processes[node].alive

    def start(
        self, node: str, *, parent: str | None = None, keep_files: bool = True, clock_offset_s: float = 0.0
    ) -> SimulatedProcess:
        """Start or restart a node; a restarted cloud resumes its run.

        `parent`: the one in the node's configuration, by default its own; a device that the experiment does not name
        needs one at its first start. Raises ValueError if the node runs.
        """
        if self.alive(node):
            raise ValueError(f"{node} is running")
        if not keep_files:
            self.agents.forget_files(node)
        if parent is not None and node not in self.names:
            self._entered[node] = parent
        parent = parent or self._entered.get(node)
        again = node in self.processes
        self.ended.pop(node, None)
        process = self.processes[node] = self._process(node, resume=again, parent=parent, clock_offset_s=clock_offset_s)
        return process

    def start_second(self, node: str) -> SimulatedProcess:
        """Start a second node with the name of a device or an institution, with its own link and files.

        If the first one ends because of the duplicate name, the second one replaces it.
        """
        self.record(f"second {node}")
        return self._process(node, second=True)

    def has_second(self, node: str) -> bool:
        """Return whether a second node lives that has not replaced the first one."""
        return node in self._seconds

    def kill_second(self, node: str) -> None:
        """Send SIGKILL to a second node that has not replaced the first one, if there is one."""
        second = self._seconds.pop(node, None)
        if second is not None:
            second.kill()

    def kill(self, node: str) -> None:
        """Send SIGKILL to a node."""
        self.record(f"kill {node}")
        self.processes[node].kill()
        self._changed.set()

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

    # The run

    async def _run_nodes(self) -> str:
        disturbing = asyncio.create_task(self._disturb(), name="scenario")
        disturbing.add_done_callback(lambda task: self._changed.set())
        await asyncio.sleep(0)  # the scenario starts first
        for node in self._autostart:
            if node not in self.processes:
                self.start(node)
        await self._until(lambda: CLOUD in self.ended, disturbing)
        for _ in range(1, self._runs):
            if self.ended[CLOUD]:
                break
            del self.processes[CLOUD]  # the next one begins another run
            self.start(CLOUD)
            await self._until(lambda: CLOUD in self.ended, disturbing)
        present = [process for process in self.processes.values() if process.alive]
        try:
            async with asyncio.timeout(self._grace_s):
                if self._runs == 1:
                    await self._until(lambda: not any(process.alive for process in present), disturbing)
                while any(process.alive and not process.seeks for process in present):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            pass
        disturbing.cancel()
        failed = [f"{node}: {error}" for node, error in self.ended.items() if error]
        stuck = sorted(process.name for process in present if process.alive and not process.seeks)
        if failed:
            return "failed: " + "; ".join(failed)
        return f"stuck: {' '.join(stuck)}" if stuck else OK

    async def _until(self, condition: Callable[[], bool], disturbing: asyncio.Task[None]) -> None:
        while not condition():
            await self._changed.wait()
            self._changed.clear()
            if disturbing.done() and not disturbing.cancelled():
                disturbing.result()

    async def _disturb(self) -> None:
        if self._scenario is not None:
            await self._scenario(self)

    def _process(
        self,
        node: str,
        *,
        resume: bool = False,
        parent: str | None = None,
        clock_offset_s: float = 0.0,
        second: bool = False,
    ) -> SimulatedProcess:
        generation = len(self._started)
        host = f"second {node}" if second else node
        world = SimulatedWorld(self.network, host, generation=generation, clock_offset_s=clock_offset_s)
        self.worlds.setdefault(node, []).append(world)
        files = host.replace(" ", "-")

        async def main() -> None:
            try:
                await self.agents.new(node, world, resume=resume, parent=parent, files=files).run()
            except Exception as error:  # noqa: BLE001 - reported in the outcome
                self.errors[node] = error
                self.failed.set()
                self._ended(node, world.process, f"{type(error).__name__}: {error}")
            else:
                self._ended(node, world.process, "")

        process = world.process = SimulatedProcess(self.loop, node, main)
        self._started.append(process)
        if second:
            self._seconds[node] = process
        return process

    def _ended(self, node: str, process: SimulatedProcess, error: str) -> None:
        second = self._seconds.get(node)
        if process is second:
            del self._seconds[node]
            self._second_ends[node] = error
            return
        if error.startswith("DuplicateName"):
            if second is not None:
                self.processes[node] = self._seconds.pop(node)
                return
            error = self._second_ends.pop(node, error)  # the second one took part, and ended before this one
        self.ended[node] = error
        self.loop.call_soon(self._changed.set)
