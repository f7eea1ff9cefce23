"""Processes and machines of a simulated lab.

A process gets the signals of an operating system, which its sockets feel, and is busy while it
handles messages; the cores of a host are shared.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Final, Protocol

from fedstrata.common.runtime.discovery import SEEKER
from fedstrata.deploy.simulation.link import ClientStream, Packet, RateQueue
from fedstrata.deploy.simulation.virtual_loop import OWNER, OwnedHandle, VirtualLoop


class SimulatedProcess:
    """`main` and the tasks that it starts. `ended` is set when it returns or raises, or the process
    is killed.

    A killed task stays referenced until `discard`: if it were collected earlier, its `finally`
    blocks would run.
    """

    def __init__(self, loop: VirtualLoop, name: str, main: Callable[[], Awaitable[None]]) -> None:
        self.name = name
        self.killed = False
        self.stopped = False
        self.tasks: set[asyncio.Task[Any]] = set()
        self.slept_s = 0.0
        self.kept: list[OwnedHandle] = []
        self.sockets: dict[ClientStream, None] = {}
        self.ended = asyncio.Event()
        self._loop = loop
        self._main = main
        context = contextvars.copy_context()
        context.run(OWNER.set, self)
        self._running = context.run(lambda: loop.create_task(self._run(), name=name))

    @property
    def alive(self) -> bool:
        """Whether it is running or stopped."""
        return not self.killed and not self._running.done()

    @property
    def seeks(self) -> bool:
        """Whether it is searching for a run: a node without one waits for the next."""
        return any(task.get_name() == SEEKER for task in self.tasks)

    def kill(self) -> None:
        """Send SIGKILL: none of its callbacks run again, and the kernel closes its sockets."""
        if not self.alive:
            return
        self.killed = True
        self.kept.clear()
        for socket in list(self.sockets):
            socket.process_killed()
        self.ended.set()

    def stop(self) -> None:
        """Send SIGSTOP: its callbacks and timers wait, and its sockets are silent."""
        if self.alive and not self.stopped:
            self.stopped = True
            self._notify_sockets()

    def continue_(self, *, slept_s: float = 0.0) -> None:
        """Send SIGCONT: callbacks that became due meanwhile run now.

        `slept_s`: its host slept meanwhile, so that its clock stood still, and timers are due
        later.
        """
        if self.stopped:
            self.stopped = False
            self._loop.resume(self, slept_s=slept_s)
            self._notify_sockets()

    def terminate(self) -> None:
        """Send SIGTERM: the agent is cancelled and publishes its final state."""
        if self.alive:
            self._running.cancel()

    def discard(self) -> None:
        """Close the tasks of a killed process, after the simulation; the loop runs none of its
        callbacks any more.
        """
        self.killed = True
        for task in sorted(self.tasks, key=hash):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine: Any = task.get_coro()
            for _ in range(20):  # `close` fails once for each await in a finally block
                try:
                    coroutine.close()
                    break
                except (Exception, BaseExceptionGroup):  # noqa: BLE001 - handlers may raise anything without their loop
                    continue
        self.tasks.clear()
        self.sockets.clear()

    async def _run(self) -> None:
        try:
            await self._main()
        finally:  # like asyncio.run
            rest = self.tasks - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            if rest:
                await asyncio.wait(rest)
            self.ended.set()

    def _notify_sockets(self) -> None:
        for socket in list(self.sockets):
            socket.process_paused()


TRANSIT: Final = Context()  # of the work of hosts and interfaces, which belongs to no process


@dataclass(frozen=True, slots=True)
class MessageCosts:
    """Seconds of one core per packet, and per byte of it, where an agent or a broker sends or
    receives it.
    """

    agent_s: float = 0.0
    agent_byte_s: float = 0.0
    broker_s: float = 0.0
    broker_byte_s: float = 0.0


class InterfaceRate(Protocol):
    """The rate of each host's network interface."""

    def __call__(self, host: str, *, up: bool) -> float:
        """Return it for the direction towards the broker of a host, or from it, bytes per
        second.
        """


@dataclass(frozen=True, slots=True)
class Placement:
    """What runs where.

    hosts: the host of each node, by name    brokers: the host of each broker
    interface: rate of a host's network interface in one direction, bytes per second; None =
    unlimited work_s: calls a function that runs beside the event loop of a process on a host, and
    returns its seconds of one core loads: by host, how many clients each client of its broker
    stands for; by default 1
    """

    cores: int
    hosts: Mapping[str, str]
    brokers: Mapping[str, str]
    costs: MessageCosts
    interface: InterfaceRate | None
    work_s: Callable[[Callable[[], None], str], float]
    loads: Mapping[str, float] = field(default_factory=dict)


class SimulatedHost:
    """A host whose computations share its cores equally: n of them progress at min(1, cores / n)
    each.
    """

    def __init__(self, loop: VirtualLoop, cores: int) -> None:
        self._loop = loop
        self._cores = cores
        # by the work at which they end
        self._running: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()
        self._work = 0.0  # seconds of one core that each computation would have had so far
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._finishing = False  # planned once, at the end

    def compute(self, seconds: float, done: Callable[[], object]) -> None:
        """Call `done` after so many seconds of one core."""
        self._advance()
        heapq.heappush(self._running, (self._work + seconds, next(self._numbers), done))
        if not self._finishing:
            self._plan()

    async def use(self, seconds: float) -> None:
        """Compute for so many seconds of one core."""
        ended: asyncio.Future[None] = self._loop.create_future()
        self.compute(seconds, partial(_end, ended))
        await ended

    def _speed(self) -> float:
        return min(1.0, self._cores / len(self._running))

    def _advance(self) -> None:
        now = self._loop.now
        if self._running:
            self._work += (now - self._since) * self._speed()
        self._since = now

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            left = max(0.0, self._running[0][0] - self._work)
            self._timer = self._loop.call_on(
                self._since + left / self._speed(), self._finish, context=TRANSIT
            )

    def _finish(self) -> None:
        self._timer = None
        self._advance()
        self._work = max(self._work, self._running[0][0])  # the timer may be a bit early
        ended = []
        while self._running and self._running[0][0] <= self._work:
            ended.append(heapq.heappop(self._running)[2])
        self._finishing = True
        for done in ended:
            done()
        self._finishing = False
        self._plan()


class ProcessThread:
    """The event loop's thread of a process: it handles one message after another."""

    def __init__(self, host: SimulatedHost) -> None:
        self.host = host
        self._waiting: deque[tuple[float, Callable[[], object]]] = deque()

    def handle(self, seconds: float, then: Callable[[], object]) -> None:
        """Call a function after so many seconds of one core, and after everything before it."""
        self._waiting.append((seconds, then))
        if len(self._waiting) == 1:
            self.host.compute(seconds, self._handled)

    def _handled(self) -> None:
        then = self._waiting.popleft()[1]
        if self._waiting:
            self.host.compute(self._waiting[0][0], self._handled)
        then()


class ClientPath:
    """The machines between one process and one broker: each end is busy with a packet, and the
    interface passes it.
    """

    def __init__(self, machines: Machines, node: str, broker: str) -> None:
        costs = machines.costs
        self._loop = machines.loop
        load, own = machines.loads(node, broker)
        self._agent = machines.thread(node)
        self._agent_costs = (own * costs.agent_s, own * costs.agent_byte_s)
        self._broker = machines.broker_thread(broker)
        self._broker_costs = load * costs.broker_s, load * costs.broker_byte_s
        self._up, self._down = (machines.interface(node, broker, up=up) for up in (True, False))

    def send(self, packet: Packet, link: RateQueue) -> None:
        """Send an agent's packet to its link."""
        _handle(self._agent, self._agent_costs, packet, partial(_cross, self._up, link, packet))

    def at_broker(self, packet: Packet, arrived: Callable[[Packet], None]) -> None:
        """Let the broker process a packet."""
        _handle(self._broker, self._broker_costs, packet, partial(arrived, packet))

    def send_down(self, packet: Packet, link: RateQueue) -> None:
        """Send a broker's packet to the link of its client."""
        _handle(self._broker, self._broker_costs, packet, partial(_cross, self._down, link, packet))

    def at_agent(self, packet: Packet, arrived: Callable[[Packet], None], context: Context) -> None:
        """Let the agent process a packet."""
        _handle(
            self._agent,
            self._agent_costs,
            packet,
            partial(self._loop.call_soon, arrived, packet, context=context),
        )


class Machines:
    """The hosts and processes of a placement."""

    def __init__(self, loop: VirtualLoop, placement: Placement) -> None:
        self.costs = placement.costs
        self.loop = loop
        self._placement = placement
        names = {*placement.hosts.values(), *placement.brokers.values()}
        self._hosts = {name: SimulatedHost(loop, placement.cores) for name in sorted(names)}
        self._threads: dict[str, ProcessThread] = {}
        self._slots: dict[object, asyncio.Semaphore] = {}  # by process
        self._interfaces: dict[tuple[str, bool], RateQueue] = {}
        loop.work = self._beside

    def host(self, node: str) -> SimulatedHost:
        """Return a node's host."""
        return self._hosts[self._placement.hosts[node]]

    def thread(self, node: str) -> ProcessThread:
        """Return the thread of a node's process."""
        return self._thread(node, self.host(node))

    def broker_thread(self, broker: str) -> ProcessThread:
        """Return a broker's thread."""
        return self._thread(f"broker {broker}", self._hosts[self._placement.brokers[broker]])

    def loads(self, node: str, broker: str) -> tuple[float, float]:
        """Return the load of a broker's host, and that of a node by its messages: of a child on its
        own host, 1.
        """
        host = self._placement.brokers[broker]
        load = self._placement.loads.get(host, 1.0)
        return load, load if self._placement.hosts[node] == host else 1.0

    def slots(self, node: str) -> asyncio.Semaphore:
        """Return the one concurrent training of a device's process; that of a killed process ends
        with it.
        """
        process = OWNER.get() or node
        if process not in self._slots:
            self._slots[process] = asyncio.Semaphore(1)
        return self._slots[process]

    def interface(self, node: str, broker: str, *, up: bool) -> RateQueue | None:
        """Return the interface of a broker's host towards a node, None if both are on one host, or
        it has no limit.

        Packets leave it for the node's link.
        """
        placement = self._placement
        host = placement.brokers[broker]
        if placement.interface is None or placement.hosts[node] == host:
            return None
        if (host, up) not in self._interfaces:
            queue = self._interfaces[host, up] = RateQueue(self.loop, _leave_interface)
            queue.change(rate=placement.interface(host, up=up), paused=False)
        return self._interfaces[host, up]

    def _thread(self, name: str, host: SimulatedHost) -> ProcessThread:
        if name not in self._threads:
            self._threads[name] = ProcessThread(host)
        return self._threads[name]

    def _beside(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Run a function for a process's executor: it occupies a core of its host."""
        owner = OWNER.get()
        assert owner is not None
        host = self._placement.hosts[owner.name]
        self._hosts[host].compute(self._placement.work_s(begin, host), end)


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _handle(
    thread: ProcessThread, costs: tuple[float, float], packet: Packet, then: Callable[[], object]
) -> None:
    thread.handle(costs[0] + packet.size * costs[1], then)


def _cross(interface: RateQueue | None, link: RateQueue, packet: Packet) -> None:
    if interface is None:
        link.put(packet)
    else:
        packet.link = link
        interface.put(packet)


def _leave_interface(packet: Packet) -> None:
    assert packet.link is not None
    packet.link.put(packet)
