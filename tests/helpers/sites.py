"""Where the nodes of a test live: on a simulated broker in virtual time, or on a real one."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.runtime.endpoint import Endpoint
from fedstrata.common.runtime.world import REAL, World
from fedstrata.deploy.brokers import broker as brokers
from fedstrata.deploy.brokers.broker import Kind
from fedstrata.deploy.simulation.simulated_broker import Routed
from fedstrata.deploy.simulation.simulated_machines import SimulatedProcess
from fedstrata.deploy.simulation.simulated_network import SimulatedLink, SimulatedNetwork
from fedstrata.deploy.simulation.simulated_world import SimulatedWorld
from fedstrata.deploy.simulation.virtual_loop import OWNER, START_S, SimulationError, VirtualLoop

BROKER: Final = "broker"
PATIENCE_S: Final = 30.0
PATIENCE_VIRTUAL_S: Final = 1200.0

_T = TypeVar("_T")


class Site(Protocol):
    """A broker, and the processes of the nodes on it."""

    address: BrokerAddress

    def make(self, name: str, build: Callable[[World], _T]) -> _T:
        """Return what `build` makes in a new process."""

    def start(self, endpoint: Endpoint, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the process of an endpoint."""


class RealSite:
    """A broker at an address; all nodes are in one process, this one or another world's."""

    def __init__(self, address: BrokerAddress, world: World = REAL) -> None:
        self.address, self.world = address, world

    def make(self, name: str, build: Callable[[World], _T]) -> _T:
        """Return what `build` makes."""
        return build(self.world)

    def start(self, endpoint: Endpoint, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine."""
        return asyncio.create_task(work)


def real(test: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine in real time, which is bounded: it may wait for processes."""

    async def bounded() -> None:
        async with asyncio.timeout(3 * PATIENCE_S):
            await test

    asyncio.run(bounded())


def in_real_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on a loop of its own, see `real`. Its parameters are fixtures."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        real(test(**fixtures))

    return run


class SimulatedSite:
    """A simulated broker, and a simulated process for each node; `routed` are the messages that it
    passed on.
    """

    def __init__(self) -> None:
        self.address = BrokerAddress(BROKER)
        self.loop = VirtualLoop()
        self.loop.time_limit = START_S + PATIENCE_VIRTUAL_S
        self.network = SimulatedNetwork(self.loop, seed=0)
        self.broker = self.network.add_broker(BROKER)
        self.routed: list[Routed] = []
        self.network.hooks.append(self.routed.append)
        self._contexts: dict[SimulatedProcess, contextvars.Context] = {}

    def make(self, name: str, build: Callable[[World], _T]) -> _T:
        """Return what `build` makes in a new process."""
        world = SimulatedWorld(self.network, name, generation=len(self._contexts))
        world.process = SimulatedProcess(self.loop, name, forever)
        context = contextvars.copy_context()
        context.run(OWNER.set, world.process)
        self._contexts[world.process] = context
        return context.run(build, world)

    def start(self, endpoint: Endpoint, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the process of an endpoint."""
        return self._contexts[_process(endpoint)].run(asyncio.create_task, work)

    def link(self, name: str, broker: str = BROKER) -> SimulatedLink:
        """Return a node's link to a broker."""
        return self.network.link(name, broker)

    def inject(self, topic: str, body: bytes, *, qos: int = 0, retain: bool = False) -> None:
        """Publish a message as a stranger would."""
        self.broker.route(topic, body, qos=qos, retain=retain)

    def kill(self, endpoint: Endpoint, *others: asyncio.Task[Any]) -> None:
        """Send SIGKILL to an endpoint's process; tasks of the test that use the endpoint end with
        it.
        """
        _process(endpoint).kill()
        for task in others:
            task.cancel()

    def break_connection(self, endpoint: Endpoint) -> None:
        """Break the present connection of a node, as a router may."""
        for session in list(self.broker.sessions.values()):
            if session.client_id.startswith(
                f"{endpoint.identity.name}-{endpoint.identity.session[:8]}-"
            ):
                self.broker.abort(session)

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Run a test's coroutine to its end; an error that nobody handled is the test's."""
        try:
            self.loop.run_until_complete(test)
            assert self.loop.errors == []
        except SimulationError as error:
            frame = test.cr_frame  # type: ignore[attr-defined]
            where = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
            error.add_note(f"the test waits{where}")
            raise
        finally:
            unfinished = asyncio.all_tasks(self.loop)
            for process in self._contexts:
                process.discard()
            for task in sorted(unfinished, key=hash):
                _close(task.get_coro())
            self.loop.discard()


def virtual(
    test: Callable[..., Coroutine[Any, Any, None]],
    *,
    make: Callable[[], SimulatedSite] = SimulatedSite,
) -> Callable[..., None]:
    """Run a test in virtual time. Its first parameter is the `SimulatedSite`, the others are
    fixtures.
    """

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        site = make()
        site.run(test(site, **fixtures))

    signature = inspect.signature(test)
    run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return run


class RestartableBroker:
    """A real broker that can be killed and started again on its port."""

    def __init__(self, kind: Kind, directory: Path) -> None:
        self._kind = kind
        self._directory = directory
        self._served = brokers.start(directory=directory, kind=kind)
        self.address = BrokerAddress(self._served.host, self._served.port)

    async def kill(self) -> None:
        """Send SIGKILL."""
        self._served.process.kill()
        await asyncio.to_thread(self._served.stop)

    async def start(self) -> None:
        """Start it again. From this thread: the broker lives as long as the thread that started it."""
        self._served = brokers.start(
            directory=self._directory, kind=self._kind, port=self._served.port
        )

    def close(self) -> None:
        """End it."""
        self._served.stop()


async def until(condition: Callable[[], object]) -> None:
    """Wait until something outside the test's control has come true."""
    while not condition():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.005)


async def forever() -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()


def _close(coroutine: Any) -> None:
    """Close a coroutine whose loop will not run again; each `finally` that awaits refuses it once."""
    for _ in range(20):
        try:
            coroutine.close()
        except Exception:  # noqa: BLE001 - whatever its handlers raise without their loop
            continue
        return


def _process(endpoint: Endpoint) -> SimulatedProcess:
    world = endpoint._world
    assert isinstance(world, SimulatedWorld)
    return world.process
